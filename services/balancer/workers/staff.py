"""The workers of a balancer: forked, given out, replaced when they end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import time
from typing import Protocol

import structlog

from services.balancer.workers import zygote
from services.balancer.workers.arena import Arena
from services.balancer.workers.worker import MESSAGE
from services.operations import nursery

log = structlog.get_logger(__name__)

_KEEP_BYTES = 64 << 20  # of shared memory above which a worker ends after its task
_RESTART_SECONDS = (0.0, 0.05, 0.2, 0.5)  # after so many deaths in a row of workers that had just been forked
_INFANCY_SECONDS = 1.0
_NICE = 10


class Worker:
    """This process's end of a worker.

    Attributes:
        number: By which the zygote knows it.
        end: Where it is told of rounds, and tells of plans.
        rounds: Where its rounds are written.
        plans: Where it writes their plans.
        born: When it was asked for, by the monotonic clock.
    """

    __slots__ = ("born", "end", "number", "plans", "rounds")

    def __init__(self, number: int, end: socket.socket, rounds: Arena, plans: Arena, *, born: float) -> None:
        self.born = born
        self.number = number
        self.end = end
        self.rounds = rounds
        self.plans = plans

    def ask(self, nbytes: int, *, is_cheap: bool) -> None:
        """Tells of the round that was written.

        Raises:
            OSError: If the worker has ended.
        """
        self.end.send(MESSAGE.pack(nbytes, is_cheap))

    def answer(self) -> tuple[int, float] | None:
        """Length of the plan that it has written, and seconds of the processor that it took; None if it has ended.

        Raises:
            BlockingIOError: If it says nothing.
        """
        try:
            data = self.end.recv(MESSAGE.size)
        except ConnectionResetError:
            return None
        if len(data) != MESSAGE.size:
            return None
        nbytes, nanoseconds = MESSAGE.unpack(data)
        return nbytes, 1e-9 * nanoseconds

    @property
    def nbytes(self) -> int:
        """Shared memory that it holds, as far as this process has seen it in use."""
        return self.rounds.mapped_bytes + self.plans.mapped_bytes

    def close(self) -> None:
        """Gives up its socket and memory."""
        self.end.close()
        self.rounds.close()
        self.plans.close()


class Employer(Protocol):
    """What is told about the workers."""

    def staff_ready(self, speed: float) -> None:
        """Workers can be had. `speed` of this machine is beside the one that estimates were fitted on."""

    def worker_answered(self, worker: Worker, nbytes: int, seconds: float) -> None:
        """A worker that was hired has written its plan, and says how much of the processor's time that took."""

    def worker_ended(self, worker: Worker, how: str) -> None:
        """A worker that was hired has ended; it is to be closed, and is replaced already."""

    def worker_lost_idle(self) -> None:
        """A worker has ended that had nothing to do."""


class Staff:
    """Keeps `size` workers, of which some are hired; more are forked on demand."""

    def __init__(self, size: int, memory_bytes: int, employer: Employer, zygote: Zygote | None) -> None:
        """Forks nobody yet.

        Args:
            size: Workers to keep.
            memory_bytes: Memory that a partition may take.
            employer: Is told about the workers.
            zygote: Where they come from; started if None.
        """
        self._size = size
        self._memory_bytes = memory_bytes
        self._employer = employer
        self._zygote = zygote
        self._idle: dict[int, Worker] = {}
        self._hired: dict[int, Worker] = {}
        self._pids: dict[int, int] = {}
        self._numbers = itertools.count()
        self._early_deaths = 0
        self._closed = False
        self._started: asyncio.Future[None] | None = None
        self.is_ready = False

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers."""
        return tuple(self._pids.values())

    async def start(self) -> None:
        """Returns when workers can be hired: all kernels are compiled.

        Raises:
            RuntimeError: If the zygote ends before.
        """
        self._started = asyncio.get_running_loop().create_future()
        self._attach(self._zygote or Zygote.start())
        await self._started

    def hire(self) -> Worker:
        """A worker that has nothing to do.

        Raises:
            OSError: If none can be forked.
        """
        worker = self._idle.popitem()[1] if self._idle else self._fork()
        self._hired[worker.number] = worker
        return worker

    def take_back(self, worker: Worker) -> None:
        """A worker that was hired has done its work."""
        if worker.nbytes > _KEEP_BYTES or len(self._idle) >= self._size:
            self.dismiss(worker)
            return
        del self._hired[worker.number]
        self._idle[worker.number] = worker

    def dismiss(self, worker: Worker, *, close: bool = True) -> None:
        """Kills a worker that was hired and replaces it; without `close` it is for the caller to close."""
        assert self._zygote is not None
        del self._hired[worker.number]
        asyncio.get_running_loop().remove_reader(worker.end)
        self._zygote.kill(worker.number)
        if close:
            worker.close()
        self._refill()

    def be_nice(self, worker: Worker) -> None:
        """Has a worker give way to others."""
        pid = self._pids.get(worker.number)
        if pid is not None:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, pid, _NICE)

    def pid_of(self, worker: Worker) -> int | None:
        """Its process id, for people; None if it has only just been forked."""
        return self._pids.get(worker.number)

    def close(self) -> None:
        """Ends the workers; does not wait for them. Those that are hired are for the caller to close."""
        self._closed = True
        loop = asyncio.get_running_loop()
        for worker in [*self._idle.values(), *self._hired.values()]:
            loop.remove_reader(worker.end)
        for worker in self._idle.values():
            worker.close()
        if self._zygote is not None:
            self._zygote.close()

    # ------------------------------------------------------------------ inside

    def _attach(self, zygote: Zygote) -> None:
        self._zygote = zygote
        zygote.attach(self._ready, self._forked, self._ended, self._lost)

    def _ready(self, ready: nursery.Ready) -> None:
        self.is_ready = True
        for name, error in ready.broken.items():
            log.warning("strategy cannot be loaded", strategy=name, error=error)
        self._refill()
        if self._started is not None and not self._started.done():
            self._started.set_result(None)
        self._employer.staff_ready(ready.speed)

    def _forked(self, number: int, pid: int) -> None:
        self._pids[number] = pid

    def _refill(self) -> None:
        while self.is_ready and not self._closed and len(self._idle) + len(self._hired) < self._size:
            try:
                worker = self._fork()
            except OSError as error:
                log.error("no partition worker can be started", error=str(error))
                return
            self._idle[worker.number] = worker

    def _fork(self) -> Worker:
        assert self._zygote is not None
        worker = self._zygote.fork(next(self._numbers), self._memory_bytes)
        asyncio.get_running_loop().add_reader(worker.end, self._read, worker)
        return worker

    def _read(self, worker: Worker) -> None:
        try:
            answer = worker.answer()
        except BlockingIOError:
            return
        if answer is None or worker.number not in self._hired:
            asyncio.get_running_loop().remove_reader(worker.end)  # it has ended: the zygote will tell how
            return
        self._employer.worker_answered(worker, *answer)

    def _ended(self, number: int, status: int) -> None:
        pid = self._pids.pop(number, None)
        hired, idle = self._hired.pop(number, None), self._idle.pop(number, None)
        if hired is None and idle is None:
            return  # it was dismissed
        how = _describe_status(status)
        loop = asyncio.get_running_loop()
        if hired is not None:
            loop.remove_reader(hired.end)
            self._refill()
            self._employer.worker_ended(hired, how)
        elif idle is not None:
            loop.remove_reader(idle.end)
            idle.close()
            log.error("partition worker died that had nothing to do", worker=pid, how=how)
            self._employer.worker_lost_idle()
            early = time.monotonic() - idle.born < _INFANCY_SECONDS
            self._early_deaths = self._early_deaths + 1 if early else 0
            loop.call_later(_RESTART_SECONDS[min(self._early_deaths, len(_RESTART_SECONDS) - 1)], self._refill)

    def _lost(self) -> None:
        """The zygote has ended, and its workers with it: another is started, from a Python of its own."""
        self.is_ready = False
        self._pids.clear()
        if self._closed:
            return
        if self._started is not None and not self._started.done():
            self._started.set_exception(RuntimeError("the process that compiles and forks workers has ended"))
            return
        log.error("zygote of the partition workers died")
        loop = asyncio.get_running_loop()
        hired, self._hired = self._hired, {}
        idle, self._idle = self._idle, {}
        for worker in [*hired.values(), *idle.values()]:
            loop.remove_reader(worker.end)
        for worker in idle.values():
            worker.close()
        for worker in hired.values():
            self._employer.worker_ended(worker, "with the process that all workers come from")
        loop.call_later(_RESTART_SECONDS[-1], lambda: None if self._closed else self._attach(Zygote.start()))


class Zygote(nursery.Zygote):
    """A zygote whose workers share memory with this process."""

    @classmethod
    def start(cls) -> Zygote:
        """Forks one if this process has a single thread, at once; else starts a Python, which takes seconds."""
        return cls.begin(zygote.__name__, zygote.TRADE)

    def fork(self, number: int, memory_bytes: int) -> Worker:
        """Asks for a worker, which can be given work at once.

        Raises:
            OSError: If this process has no more descriptors, or the zygote has ended.
        """
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(ours.close)
            with theirs:
                rounds = Arena.create("evenkeel-round")
                undo.callback(rounds.close)
                plans = Arena.create("evenkeel-plan")
                undo.callback(plans.close)
                ours.setblocking(False)
                self.send_fork(number, memory_bytes, [theirs.fileno(), rounds.fd, plans.fd])
            undo.pop_all()
        return Worker(number, ours, rounds, plans, born=time.monotonic())


def _describe_status(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return f"with exit status {os.waitstatus_to_exitcode(status)}"
    number = os.WTERMSIG(status)
    with contextlib.suppress(ValueError):
        return f"by {signal.Signals(number).name}"
    return f"by signal {number}"
