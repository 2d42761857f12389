"""Where the balancer's workers come from: this process's end of the zygote, and of each worker."""

from __future__ import annotations

import contextlib
import socket
import time

from services.balancer.workers import zygote
from services.balancer.workers.arena import Arena
from services.balancer.workers.worker import MESSAGE
from services.operations import nursery


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
