"""Where workers come from: this process's end of the zygote, and of each worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.balancer.workers import zygote
from services.balancer.workers.arena import Arena
from services.balancer.workers.worker import MESSAGE, ends_with_parent

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What a zygote says when workers can be forked from it.

    Attributes:
        speed: of this machine beside the one that estimates were fitted on.
        broken: strategies of installed packages that cannot be used, with the reason.
    """

    speed: float
    broken: dict[str, str]


class Zygote:
    """A zygote that was started, and what it says."""

    def __init__(self, control: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        """Takes over this process's end of its socket; `process` if it is one to be waited for."""
        control.setblocking(False)
        self._control = control
        self._process = process
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def start(cls) -> Zygote:
        """Forks one if this process has a single thread, at once; else starts a Python, which takes seconds."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            if len(os.listdir("/proc/self/task")) > 1:
                return cls(ours, _spawn(theirs))
            parent = os.getpid()
            if os.fork() == 0:
                ends_with_parent(parent, "evenkeel-zygote")
                ours.close()
                zygote.run(theirs)
            return cls(ours)

    def attach(
        self,
        ready: Callable[[Ready], None],
        forked: Callable[[int, int], None],
        ended: Callable[[int, int], None],
        lost: Callable[[], None],
    ) -> None:
        """Listens to it on the running loop.

        Args:
            ready: workers can be forked.
            forked: number and process id of a worker.
            ended: number and wait status of a worker.
            lost: the zygote has ended, and with it all its workers.
        """
        self._loop = asyncio.get_running_loop()

        def read() -> None:
            while True:
                try:
                    data = self._control.recv(zygote.MAX_REPORT)
                except BlockingIOError:
                    return
                except OSError:
                    data = b""
                if not data:
                    self.close()
                    lost()
                    return
                kind, number, value, speed = zygote.REPORT.unpack_from(data)
                if kind == b"R":
                    ready(Ready(speed=speed, broken=json.loads(data[zygote.REPORT.size :])))
                elif kind == b"F":
                    forked(number, value)
                else:
                    ended(number, value)

        self._loop.add_reader(self._control, read)

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
                command = zygote.COMMAND.pack(b"F", number, memory_bytes)
                socket.send_fds(self._control, [command], [theirs.fileno(), rounds.fd, plans.fd])
            undo.pop_all()
        return Worker(number, ours, rounds, plans, born=time.monotonic())

    def kill(self, number: int) -> None:
        """Kills a worker, also one that is stopped."""
        with contextlib.suppress(OSError):
            self._control.send(zygote.COMMAND.pack(b"K", number, 0))

    def close(self) -> None:
        """Ends it and its workers; does not wait for them."""
        if self._loop is not None:
            self._loop.remove_reader(self._control)
            self._loop = None
        self._control.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.2)


class Worker:
    """This process's end of a worker.

    Attributes:
        number: by which the zygote knows it.
        end: where it is told of rounds, and tells of plans.
        rounds: where its rounds are written.
        plans: where it writes their plans.
        born: when it was asked for, by the monotonic clock.
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

    def answer(self) -> int | None:
        """Length of the plan that it has written; None if it has ended.

        Raises:
            BlockingIOError: If it says nothing.
        """
        try:
            data = self.end.recv(MESSAGE.size)
        except ConnectionResetError:
            return None
        return int(MESSAGE.unpack(data)[0]) if len(data) == MESSAGE.size else None

    @property
    def nbytes(self) -> int:
        """Shared memory that it holds at most."""
        return self.rounds.nbytes + self.plans.nbytes

    def close(self) -> None:
        """Gives up its socket and memory."""
        self.end.close()
        self.rounds.close()
        self.plans.close()


def _spawn(theirs: socket.socket) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path)
    command = [sys.executable, "-m", zygote.__name__, str(theirs.fileno()), str(os.getpid())]
    environment = {**os.environ, **_ONE_THREAD, "PYTHONPATH": path}
    return subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment)
