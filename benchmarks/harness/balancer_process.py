"""A real balancer in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.harness import zygote
from services.operations.launch import Process, ServiceProcess, running_service, spawn

__all__ = ["ServiceProcess", "fork", "running_balancer"]


def fork(module: str, arguments: tuple[str, ...], log: Path, environment: Mapping[str, str]) -> Process:
    """A process without the start of an interpreter, where there is one to fork that has imported everything."""
    if not zygote.is_warm():
        return spawn(module, arguments, log, environment)
    return zygote.Program(module, *arguments, output=log, errors=None, **environment)


def running_balancer(*flags: str, interpreter: bool = False) -> AbstractContextManager[ServiceProcess]:
    """A balancer on a free port, ended with the block.

    Args:
        flags: Of its command line.
        interpreter: Whether it gets a Python of its own in any case.
    """
    return running_service("services.balancer", *flags, spawn=spawn if interpreter else fork)
