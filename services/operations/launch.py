"""Starts a service in a process of its own and waits until it is ready: for programs that bring their own balancer."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals
from typing import Protocol, TypeAlias

START_SECONDS = 240.0  # a balancer compiles its kernels first, if nothing has yet
_END_SECONDS = 30.0


class Process(Protocol):
    """What of a `subprocess.Popen` is used here."""

    pid: int

    def poll(self) -> int | None:
        """The exit code; None while it runs."""

    def wait(self, timeout: float) -> int:
        """The exit code, once it has ended."""

    def send_signal(self, sig: Signals) -> None:
        """Sends a signal, if it runs."""


Spawn: TypeAlias = Callable[[str, tuple[str, ...], Path, Mapping[str, str]], Process]
"""Starts `python -m MODULE ARGUMENTS` with its output to a file and some more variables in its environment."""


def spawn(module: str, arguments: tuple[str, ...], log: Path, environment: Mapping[str, str]) -> Process:
    """A process with an interpreter of its own."""
    with log.open("ab") as output:
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **environment})


@dataclass(slots=True, kw_only=True)
class ServiceProcess:
    """A service on this machine; `stop` and `kill` end it, and `start` begins another at the same port.

    Attributes:
        module: That is run.
        flags: Of its command line.
        log_file: That it writes to.
        environment: Variables beside those of this process.
        spawn: How its process is started.
        port: Where it listens.
        process: The one that runs, or ran last.
    """

    module: str
    flags: tuple[str, ...]
    log_file: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    spawn: Spawn = spawn
    port: int = 0
    process: Process | None = None

    @property
    def address(self) -> str:
        """`host:port` of it."""
        return f"127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """What it has written so far."""
        return self.log_file.read_text()

    @property
    def running(self) -> Process:
        """The process, which has been started."""
        assert self.process is not None
        return self.process

    def start(self) -> None:
        """Starts it, and waits until it is ready.

        Raises:
            RuntimeError: If it ends instead, or takes too long; the message holds its log.
        """
        with tempfile.TemporaryDirectory() as folder:
            port_file = Path(folder) / "port"
            arguments = ("--port", str(self.port), "--port-file", str(port_file), *self.flags)
            self.process = self.spawn(self.module, arguments, self.log_file, self.environment)
            deadline = time.monotonic() + START_SECONDS
            while not port_file.exists():
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.kill()
                    raise RuntimeError(f"{self.module} did not start:\n{self.log}")
                time.sleep(0.02)
            self.port = int(port_file.read_text())

    def signal(self, number: Signals) -> None:
        """Sends it a signal."""
        self.running.send_signal(number)

    def kill(self) -> None:
        """Ends it at once, also where it is paused."""
        self.signal(SIGKILL)
        self.running.wait(_END_SECONDS)

    def stop(self) -> int:
        """Asks it to end; returns its exit code."""
        self.signal(SIGTERM)
        return self.running.wait(_END_SECONDS)


@contextlib.contextmanager
def running_service(
    module: str, *flags: str, log_file: Path | None = None, spawn: Spawn = spawn, **environment: str
) -> Iterator[ServiceProcess]:
    """A service on a free port of this machine, ended with the block.

    Args:
        module: Such as `services.balancer`.
        flags: Of its command line.
        log_file: That it writes to, a new one; None: one that goes with the block.
        spawn: How its process is started.
        environment: Variables beside those of this process.

    Raises:
        RuntimeError: If it does not start; the message holds its log.
    """
    with tempfile.TemporaryDirectory() as folder:
        if log_file is not None:
            log_file.unlink(missing_ok=True)
        service = ServiceProcess(
            module=module, flags=flags, log_file=log_file or Path(folder) / "log", environment=environment, spawn=spawn
        )
        service.start()
        try:
            yield service
        finally:
            if service.running.poll() is None:
                service.kill()
