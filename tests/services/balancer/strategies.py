"""Strategies that end, hold up or fill the process that they run in, and a zygote whose workers know them."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import zygote
from evenkeel.partitioning import registry
from evenkeel.partitioning.lpt import lpt
from evenkeel.partitioning.problem import Problem
from services.balancer.workers import zygote as zygotes
from services.balancer.workers.staff import Zygote

FOLDER = "EVENKEEL_TEST_FOLDER"
"""Variable: the folder in which `hold` says who holds, until `release` is there."""


def segfault(problem: Problem) -> NDArray[np.int32]:
    """Reads from where no memory is, as a broken kernel would."""
    ctypes.string_at(0)
    return lpt(problem)


def hang(problem: Problem) -> NDArray[np.int32]:
    while True:
        time.sleep(1)


def spin(problem: Problem) -> NDArray[np.int32]:
    while True:
        pass


def hold(problem: Problem) -> NDArray[np.int32]:
    folder = Path(os.environ[FOLDER])
    (folder / f"held-{os.getpid()}").touch()
    while not (folder / "release").exists():
        time.sleep(0.005)
    return lpt(problem)


def fail(problem: Problem) -> NDArray[np.int32]:
    raise RuntimeError("injected")


def gorge(problem: Problem) -> NDArray[np.int32]:
    """Takes memory as long as there is some."""
    kept = []
    while True:
        kept.append(np.ones(1 << 20))


INSTALLED = {
    function.__name__: EntryPoint(function.__name__, f"{__name__}:{function.__name__}", "evenkeel.strategies")
    for function in (segfault, hang, spin, hold, fail, gorge)
}
"""As if a package were installed that adds them."""


def start_zygote() -> Zygote:
    """A zygote forked from the tests' own, which has compiled everything; its workers know `INSTALLED`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        zygote.process(_serve, theirs)
    return Zygote(ours)


def _serve(control: socket.socket) -> None:
    registry.STRATEGIES.installed = INSTALLED
    zygotes.run(control)
