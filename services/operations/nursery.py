"""Where a service's workers come from: this process's end of the zygote."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from services.operations import zygote
from services.operations.children import ends_with_parent

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What a zygote says when workers can be forked from it.

    Attributes:
        speed: Of this machine beside the one that estimates were fitted on.
        broken: Strategies of installed packages that cannot be used, with the reason.
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
    def begin(cls, module: str, trade: zygote.Trade) -> Self:
        """Forks one if this process has a single thread, at once; else starts a Python, which takes seconds.

        Args:
            module: That runs the zygote as a program, given a descriptor and its parent's process id.
            trade: What it does.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            if len(os.listdir("/proc/self/task")) > 1:
                return cls(ours, _spawn(module, theirs))
            parent = os.getpid()
            if os.fork() == 0:
                ends_with_parent(parent, "evenkeel-zygote")
                ours.close()
                zygote.run(theirs, trade)
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
            ready: Workers can be forked.
            forked: Number and process id of a worker.
            ended: Number and wait status of a worker.
            lost: The zygote has ended, and with it all its workers.
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

    def send_fork(self, number: int, memory_bytes: int, fds: list[int]) -> None:
        """Asks for a worker, which gets the descriptors.

        Raises:
            OSError: If the zygote has ended.
        """
        socket.send_fds(self._control, [zygote.COMMAND.pack(b"F", number, memory_bytes)], fds)

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


def _spawn(module: str, theirs: socket.socket) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path)
    command = [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())]
    environment = {**os.environ, **_ONE_THREAD, "PYTHONPATH": path}
    return subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment)
