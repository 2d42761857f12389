"""A real balancer in a process of its own."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests import zygote

START_SECONDS = 240.0  # compiles its kernels first, if nothing has yet


@dataclass(slots=True)
class BalancerProcess:
    """A started balancer; `stop` and `kill` end it, and `start` begins another at the same port.

    Attributes:
        flags: Of its command line.
        folder: Of its log.
        interpreter: Whether it gets a Python of its own even if there is one to fork that has imported everything.
        port: Where it listens.
        process: The one that runs, or ran last.
    """

    flags: tuple[str, ...]
    folder: Path
    interpreter: bool = False
    port: int = 0
    process: subprocess.Popen[bytes] | zygote.Program | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        port_file = self.folder / "port"
        port_file.unlink(missing_ok=True)
        arguments = ("--port", str(self.port), "--port-file", str(port_file), *self.flags)
        if self.interpreter or not zygote.is_warm():
            with (self.folder / "log").open("ab") as log:
                command = [sys.executable, "-m", "services.balancer", *arguments]
                self.process = subprocess.Popen(command, stdout=log, stderr=log)
        else:
            self.process = zygote.Program("services.balancer", *arguments, output=self.folder / "log")
        deadline = time.monotonic() + START_SECONDS
        while not (port_file.exists() and port_file.read_text().strip()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the balancer did not start:\n{self.log}")
            time.sleep(0.02)
        self.port = int(port_file.read_text())

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(30)


@contextlib.contextmanager
def running_balancer(*flags: str, interpreter: bool = False) -> Iterator[BalancerProcess]:
    """A balancer on a free port, ended with the block."""
    with tempfile.TemporaryDirectory() as folder:
        balancer = BalancerProcess(flags=flags, folder=Path(folder), interpreter=interpreter)
        balancer.start()
        try:
            yield balancer
        finally:
            if balancer.process is not None and balancer.process.poll() is None:
                balancer.signal(signal.SIGCONT)
                balancer.kill()
