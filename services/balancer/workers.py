"""Processes that plan rounds: one that dies or takes too long fails the call that it had, and is replaced.

A library's pool that can end a worker at its deadline (pebble) took twice as long here: 8 ranks 3.4 ms where this takes
1.7, and 500 rounds a second of 100 jobs where this plans 1,230 (`python -m benchmarks.rounds --quick`, two cores).
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import multiprocessing
import pickle
import signal
import socket
import struct
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import structlog

from evenkeel.partitioning import warm_up
from evenkeel.protocol.plan_round import RoundLimits
from services.balancer.planning import CallError, plan_call
from services.balancer.summary import RoundSummary
from services.operations.process import keep_memory

log = structlog.get_logger(__name__)

_HEADER = struct.Struct("<QQ")  # bytes of the two parts of a message
_COPIED_BYTES = 1 << 16
_BUFFER_BYTES = 4 << 20
_START_SECONDS = 300.0  # of a worker, which may have to compile
_PAUSE_SECONDS = 1.0  # between attempts to start a worker
_OUT_OF_MEMORY_SCORE = "500"  # of 1000: the kernel ends workers before the service

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["services.balancer.preloaded"])


@dataclass(slots=True)
class _Call:
    job: str
    data: bytes
    result: asyncio.Future[tuple[RoundSummary, bytes]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class WorkerPool:
    """A fixed number of processes, each with one call at a time; calls wait in order.

    Attributes:
        restarts: Workers that were replaced.
    """

    def __init__(self, limits: RoundLimits, *, workers: int, seconds: float) -> None:
        """Prepares a pool.

        Args:
            limits: How large a round may be.
            workers: Number of processes.
            seconds: That a call may take of a worker; then the worker is killed.
        """
        self.restarts = 0
        self._limits = limits
        self._size = workers
        self._seconds = seconds
        self._waiting: asyncio.Queue[_Call] = asyncio.Queue()
        self._workers: dict[int, _Worker] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def waiting(self) -> int:
        """Calls that wait for a worker."""
        return self._waiting.qsize()

    async def start(self) -> None:
        """Starts the processes; all have compiled what they need when this returns.

        Raises:
            OSError: If a process ends instead.
        """
        workers = await asyncio.gather(*[_Worker.start(self._limits) for _ in range(self._size)])
        self._workers = dict(enumerate(workers))
        self._tasks = [asyncio.create_task(self._serve(slot), name=f"worker-{slot}") for slot in self._workers]

    async def plan(self, job: str, data: bytes) -> tuple[RoundSummary, bytes]:
        """Plans a round in the next process that is free; see `plan_call`.

        Raises:
            CallError: If there is no plan.
        """
        call = _Call(job, data)
        self._waiting.put_nowait(call)
        return await call.result

    def close(self) -> None:
        """Ends the processes."""
        for task in self._tasks:
            task.cancel()
        for worker in self._workers.values():
            worker.kill()

    async def _serve(self, slot: int) -> None:
        while True:
            call = await self._waiting.get()
            if call.result.done():  # the caller has gone
                continue
            try:
                async with asyncio.timeout(self._seconds):
                    answer = await self._workers[slot].exchange(call.job, call.data)
            except TimeoutError:
                answer = CallError(
                    "DEADLINE_EXCEEDED", "worker", f"planning took longer than {self._seconds:g} s; send fewer samples"
                )
            except OSError as error:
                log.error("worker ended", job=call.job, error=str(error))
                answer = CallError("UNAVAILABLE", "worker", "the worker that planned this round has ended; call again")
            if not call.result.done():
                if isinstance(answer, CallError):
                    call.result.set_exception(answer)
                else:
                    call.result.set_result(answer)
            if isinstance(answer, CallError) and answer.reason == "worker":
                await self._replace(slot)

    async def _replace(self, slot: int) -> None:
        self._workers[slot].kill()
        while True:
            try:
                self._workers[slot] = await _Worker.start(self._limits)
            except OSError as error:
                log.error("no worker could be started; trying again", error=str(error))
                await asyncio.sleep(_PAUSE_SECONDS)
            else:
                self.restarts += 1
                return


class _Worker(asyncio.Protocol):
    """A process, and this side of its socket."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        self._transport: asyncio.WriteTransport = asyncio.WriteTransport()
        self._content = bytearray()  # of an answer that has not come whole
        self._answer: asyncio.Future[tuple[bytes, bytes]] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(cls, limits: RoundLimits) -> _Worker:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        with theirs:
            process = _processes.Process(target=serve, args=(theirs, limits), name="evenkeel-worker", daemon=True)
            await asyncio.to_thread(process.start)
        _, worker = await asyncio.get_running_loop().create_connection(lambda: cls(process), sock=ours)
        try:
            async with asyncio.timeout(_START_SECONDS):
                await worker._answer
        except BaseException:
            worker.kill()
            raise
        log.info("worker ready", pid=process.pid)
        return worker

    async def exchange(self, job: str, data: bytes) -> tuple[RoundSummary, bytes] | CallError:
        if self._transport.is_closing():
            raise ConnectionResetError(f"process {self._process.pid} has ended")
        self._answer = asyncio.get_running_loop().create_future()
        for part in _message(job.encode(), data):
            self._transport.write(part)
        answer, response = await self._answer
        found: RoundSummary | CallError = pickle.loads(answer)  # of our own process
        return found if isinstance(found, CallError) else (found, response)

    def kill(self) -> None:
        """Ends the process, whatever it does."""
        self._transport.abort()
        with contextlib.suppress(OSError):
            self._process.kill()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket can be written to."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Takes a piece of the answer."""
        self._content += data
        if len(self._content) < _HEADER.size:
            return
        size, rest = _HEADER.unpack_from(self._content)
        if len(self._content) == _HEADER.size + size + rest:
            content = bytes(self._content)
            self._content.clear()
            if not self._answer.done():
                begin = _HEADER.size + size
                self._answer.set_result((content[_HEADER.size : begin], content[begin:]))

    def connection_lost(self, error: Exception | None) -> None:
        """The process has ended."""
        if not self._answer.done():
            self._answer.set_exception(ConnectionResetError(f"process {self._process.pid} has ended: {error}"))


def serve(connection: socket.socket, limits: RoundLimits) -> None:
    """All that a worker does: answers calls until the other end is closed."""
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the service decides when its workers end
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OUT_OF_MEMORY_SCORE)
    keep_memory()
    warm_up()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(_HEADER.pack(0, 0))
        while header := connection.recv(_HEADER.size, socket.MSG_WAITALL):
            name_size, data_size = _HEADER.unpack(header)
            job = connection.recv(name_size, socket.MSG_WAITALL).decode()
            answer = plan_call(job, connection.recv(data_size, socket.MSG_WAITALL), limits)
            summary, response = (answer, b"") if isinstance(answer, CallError) else answer
            for part in _message(pickle.dumps(summary, pickle.HIGHEST_PROTOCOL), response):
                connection.sendall(part)


def _message(small: bytes, large: bytes) -> tuple[bytes, ...]:
    """The parts of a message in the order of sending: one, which wakes the reader once, or without a copy."""
    head = _HEADER.pack(len(small), len(large)) + small
    return (head + large,) if len(large) < _COPIED_BYTES else (head, large)
