"""A real balancer in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.harness import zygote
from services.operations.launch import Process, ServiceProcess, running_service, spawn

__all__ = ["ServiceProcess", "fork", "running_balancer", "until_logged"]


def fork(module: str, arguments: tuple[str, ...], log: Path, environment: Mapping[str, str]) -> Process:
    """A process without the start of an interpreter, where there is one to fork that has imported everything."""
    if not zygote.is_warm():
        return spawn(module, arguments, log, environment)
    return zygote.Program(module, *arguments, output=log, errors=None, **environment)


def until_logged(service: ServiceProcess, text: str, times: int = 1, *, seconds: float = 60.0) -> str:
    """The log, as soon as a text is in it; a service writes its lines in the background.

    Raises:
        AssertionError: If it is not there in time; the message holds the log.
    """
    deadline = time.monotonic() + seconds
    while service.log.count(text) < times:
        assert time.monotonic() < deadline, f"not {times} times {text!r} in:\n{service.log}"
        time.sleep(0.02)
    return service.log


def running_balancer(*flags: str, interpreter: bool = False) -> AbstractContextManager[ServiceProcess]:
    """A balancer on a free port, ended with the block.

    Args:
        flags: Of its command line.
        interpreter: Whether it gets a Python of its own in any case.
    """
    return running_service("services.balancer", *flags, spawn=spawn if interpreter else fork)
