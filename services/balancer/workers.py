"""Processes that plan rounds: one that dies or takes too long is replaced, and fails the call that it had, if any.

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
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TypeAlias

import structlog

from evenkeel.partitioning import warm_up
from evenkeel.protocol.plan_round import RoundLimits
from services.balancer.planning import CallError, plan_call
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


Planned: TypeAlias = tuple[bytes, bytes]
"""A pickled `RoundSummary`, which nobody needs before the caller has its answer, and the response."""

_Answer: TypeAlias = Planned | OSError


@dataclass(slots=True)
class _Call:
    job: str
    data: bytes
    result: asyncio.Future[Planned] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


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
        self._calls: deque[_Call] = deque()  # that wait
        self._free: list[_Worker] = []
        self._workers: set[_Worker] = set()
        self._replacing: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        """Calls that wait for a worker."""
        return len(self._calls)

    @property
    def size(self) -> int:
        """Processes that are there; fewer than wanted while some are replaced."""
        return len(self._workers)

    async def start(self) -> None:
        """Starts the processes; all have compiled what they need when this returns.

        Raises:
            OSError: If a process ends instead.
        """
        for worker in await asyncio.gather(*[_Worker.start(self._limits, self._lost) for _ in range(self._size)]):
            self._add(worker)

    async def plan(self, job: str, data: bytes) -> Planned:
        """Plans a round in the next process that is free; see `plan_call`.

        Raises:
            CallError: If there is no plan.
        """
        call = _Call(job, data)
        self._calls.append(call)
        self._begin_calls()
        return await call.result

    def close(self) -> None:
        """Ends the processes."""
        for task in self._replacing:
            task.cancel()
        workers, self._workers = self._workers, set()  # so that none is replaced
        for worker in workers:
            worker.kill()

    def _add(self, worker: _Worker) -> None:
        """Takes a worker that has just started."""
        self._workers.add(worker)
        self._free.append(worker)
        if worker.has_ended:  # before it was ours
            self._lost(worker)

    def _begin_calls(self) -> None:
        while self._free and self._calls:
            call = self._calls.popleft()
            if not call.result.done():  # else the caller has gone
                self._free.pop().begin(call, self._seconds, self._ended)

    def _lost(self, worker: _Worker) -> None:
        """A worker has ended, whether or not it had a call."""
        if worker not in self._workers:  # it was not ready, or the pool is closed
            return
        self._workers.discard(worker)
        if worker in self._free:
            log.error("worker ended", error="it had no call")
            self._free.remove(worker)
        task = asyncio.create_task(self._replace())
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    def _ended(self, worker: _Worker, call: _Call, answer: _Answer) -> None:
        """A worker is through with a call, or is no more."""
        if isinstance(answer, tuple):
            self._free.append(worker)
        else:
            worker.kill()
            self._lost(worker)
        result: Planned | CallError
        if isinstance(answer, TimeoutError):
            result = CallError(
                "DEADLINE_EXCEEDED", "worker", f"planning took longer than {self._seconds:g} s; send fewer samples"
            )
        elif isinstance(answer, OSError):
            log.error("worker ended", job=call.job, error=str(answer))
            result = CallError("UNAVAILABLE", "worker", "the worker that planned this round has ended; call again")
        else:
            result = answer if answer[1] else pickle.loads(answer[0])  # of our own process
        if not call.result.done():
            if isinstance(result, CallError):
                call.result.set_exception(result)
            else:
                call.result.set_result(result)
        self._begin_calls()

    async def _replace(self) -> None:
        while True:
            try:
                started = await _Worker.start(self._limits, self._lost)
            except (OSError, EOFError) as error:  # the latter if the process that forks them dies meanwhile
                log.error("no worker could be started; trying again", error=repr(error))
                await asyncio.sleep(_PAUSE_SECONDS)
            else:
                self.restarts += 1
                self._add(started)
                self._begin_calls()
                return


class _Worker(asyncio.Protocol):
    """A process, and this side of its socket."""

    def __init__(self, process: ForkServerProcess, lost: Callable[[_Worker], None]) -> None:
        self.has_ended = False
        self._process, self._lost = process, lost
        self._transport: asyncio.WriteTransport = asyncio.WriteTransport()
        self._content = bytearray()  # of an answer that has not come whole
        self._end: Callable[[_Answer], None] | None = None  # of the call that it has

    @classmethod
    async def start(cls, limits: RoundLimits, lost: Callable[[_Worker], None]) -> _Worker:
        """One that is ready; `lost` is called once it has ended, after what its call is told."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        with theirs:
            process = _processes.Process(target=serve, args=(theirs, limits), name="evenkeel-worker", daemon=True)
            await asyncio.to_thread(process.start)
        loop = asyncio.get_running_loop()
        worker, ready = cls(process, lost), loop.create_future()
        worker._end = ready.set_result
        await loop.create_connection(lambda: worker, sock=ours)
        try:
            async with asyncio.timeout(_START_SECONDS):
                if isinstance(answer := await ready, OSError):
                    raise answer
        except BaseException:
            worker._end = None
            worker.kill()
            raise
        log.info("worker ready", pid=process.pid)
        return worker

    def begin(self, call: _Call, seconds: float, ended: Callable[[_Worker, _Call, _Answer], None]) -> None:
        """Plans a round; `ended` is called once, after so many seconds at the latest."""
        timer = asyncio.get_running_loop().call_later(seconds, self._finish, TimeoutError())

        def end(answer: _Answer) -> None:
            timer.cancel()
            ended(self, call, answer)

        self._end = end
        for part in _message(call.job.encode(), call.data):
            self._transport.write(part)

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
            begin = _HEADER.size + size
            self._finish((content[_HEADER.size : begin], content[begin:]))

    def eof_received(self) -> None:
        """The process has ended: told of at once, before a call that comes until the connection is closed gets it."""
        self.connection_lost(None)

    def connection_lost(self, error: Exception | None) -> None:
        """The process has ended."""
        self.has_ended = True
        self._finish(ConnectionResetError(f"process {self._process.pid} has ended: {error}"))
        self._lost(self)

    def _finish(self, answer: _Answer) -> None:
        end, self._end = self._end, None
        if end is not None:
            end(answer)


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
