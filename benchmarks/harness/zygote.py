"""Processes forked from one that has imported and compiled what ranks and services need.

A rank that starts from nothing takes four seconds of a core until its first batch, a service two to three; forked,
they take a few hundredths. The server that they are forked from has no threads, which is what makes forking safe.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing import forkserver, reduction
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

START_SECONDS = 900.0  # compiles all kernels first, if nothing has yet

context = multiprocessing.get_context("forkserver")
# All that benchmarks want.
context.set_forkserver_preload(
    ["torch.distributed", "trainer_client.balancing.loader", "trainer_client.balancing.costs"]
)
_environment_at_start = dict(os.environ)
_is_warm = False


def is_warm() -> bool:
    """Whether `warm` has been called, as it has in tests; benchmarks measure services that start by themselves."""
    return _is_warm


def warm(preloaded: str) -> None:
    """Starts the server with the modules of tests and benchmarks imported so far, and waits until it is ready.

    Args:
        preloaded: A module that is imported there first.
    """
    global _is_warm  # noqa: PLW0603
    ours = sorted(name for name in sys.modules if name.startswith(("tests.", "benchmarks.")))
    context.set_forkserver_preload([preloaded, *ours])
    end, theirs = context.Pipe(duplex=False)
    first = process(_describe_server, theirs, preloaded)
    theirs.close()
    assert end.poll(START_SECONDS), "what processes are forked from did not start"
    num_threads, is_preloaded = end.recv()
    first.join()
    assert is_preloaded, f"{preloaded} cannot be imported; start in the repository's root"
    assert num_threads == 1, f"a module or a library starts threads at import: {num_threads}; do not fork from it"
    _is_warm = True


def process(target: Callable[..., Any], *args: Any) -> ForkServerProcess:
    """Starts `target(*args)`, a module-level function, with this process's folder, environment and output."""
    started = context.Process(target=_call, args=(_Output(), dict(os.environ), target, args))
    started.start()
    return started


def end(started: ForkServerProcess) -> None:
    """Ends a process that leads a session, and all that it has started, such as workers of a DataLoader."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started.pid or 0, signal.SIGKILL)
    started.kill()
    started.join(10)


class _Output:
    """Where this process writes to; unpickled, it is where the process that it has come to writes to."""

    def __getstate__(self) -> list[Any]:
        return [reduction.DupFd(number) for number in (1, 2)]

    def __setstate__(self, state: list[Any]) -> None:
        for number, there in enumerate(state, 1):
            received = there.detach()
            os.dup2(received, number)
            os.close(received)


def _call(_output: _Output, environment: Mapping[str, str], target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    for name in _environment_at_start.keys() - environment.keys():
        os.environ.pop(name, None)
    os.environ.update(environment)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # what nohup started ignores it, and would pass that on
    target(*args)


def _describe_server(end: Connection, preloaded: str) -> None:
    end.send((len(os.listdir(f"/proc/{os.getppid()}/task")), preloaded in sys.modules))


class Program:
    """`python -m MODULE ARGUMENTS` without the start of an interpreter; used like a `subprocess.Popen`."""

    def __init__(
        self, module: str, *arguments: str, output: Path | None = None, errors: Path | None = None, **environment: str
    ) -> None:
        self._process = process(_run_module, module, arguments, output, errors, environment)
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """The exit code, once it has ended."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self._process.pid or 0, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(module: str, *arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """`python -m MODULE ARGUMENTS` to its end, without the start of an interpreter; used like `subprocess.run`."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = Path(folder, "stdout"), Path(folder, "stderr")
        program = Program(module, *arguments, output=outputs[0], errors=outputs[1])
        try:
            code = program.wait(timeout)
        finally:
            program.kill()
        return subprocess.CompletedProcess([module, *arguments], code, *(path.read_text() for path in outputs))


# What a program leaves is not taken apart: torch may wait for ever in the end of a Gloo group that DDP has kept, whose
# thread waits for the interpreter's lock.
_left: list[dict[str, Any]] = []


def _run_module(
    module: str,
    arguments: tuple[str, ...],
    output: Path | None,
    errors: Path | None,
    environment: Mapping[str, str],
) -> None:
    os.environ.update(environment)
    for number, path in ((1, output), (2, errors or output)):
        if path is not None:
            with path.open("ab") as file:
                os.dup2(file.fileno(), number)
    if module.startswith("services."):  # whose workers are forked
        _fork_server()
    sys.argv = [module, *arguments]
    sys.executable = os.environ.get("PYTHON_EXEC", sys.executable)  # as torchrun starts its ranks
    sys.modules.pop(f"{module}.__main__", None)  # which runpy would warn of, on the log of what runs
    _left.append(runpy.run_module(module, run_name="__main__", alter_sys=True))


def _fork_server() -> None:
    """Forks what multiprocessing would start with an interpreter of its own, which imports everything once more."""
    server: Any = forkserver._forkserver
    alive, server._forkserver_alive_fd = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0evenkeel-{os.getpid()}-{os.urandom(8).hex()}")  # abstract: goes with the last that has it
        listener.listen()
        server._forkserver_address = listener.getsockname()
        server._forkserver_pid = os.fork() or None
        if server._forkserver_pid is None:
            os.close(server._forkserver_alive_fd)
            try:
                forkserver.main(listener.detach(), alive, [])  # until nobody has the other end
            finally:
                os._exit(0)
    os.close(alive)
