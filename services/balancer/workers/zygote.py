"""What the balancer's zygote prepares, and what the workers forked from it do.

Forked from the balancer's own process before that has threads; where it has some already, as where BLAS starts its own
or when a zygote has died, it is a Python of its own: `python -m services.balancer.workers.zygote FD`.
"""

from __future__ import annotations

import socket
import sys
import time
from typing import NoReturn

from evenkeel import partitioning
from evenkeel.partitioning.registry import BUILT_IN, strategy_named
from services.balancer.workers.arena import Arena
from services.balancer.workers.worker import run_worker
from services.operations import zygote
from services.operations.children import ends_with_parent

REFERENCE_SECONDS = 5.0e-4
"""What `reference_seconds` is on the machine that estimates were fitted on."""


def _prepare() -> tuple[float, dict[str, str]]:
    partitioning.warm_up()
    broken = _load_strategies()
    return REFERENCE_SECONDS / reference_seconds(), broken


def _work(fds: list[int], memory_bytes: int) -> None:
    end, rounds, plans = fds
    run_worker(socket.socket(fileno=end), Arena(rounds), Arena(plans), memory_bytes=memory_bytes)


TRADE = zygote.Trade(prepare=_prepare, work=_work)


def run(control: socket.socket) -> NoReturn:
    """The zygote as all that a process does."""
    zygote.run(control, TRADE)


def _load_strategies() -> dict[str, str]:
    """Imports what installed packages add, which would take a worker's time later; returns what failed, and why."""
    broken = {}
    for name in partitioning.strategies():
        if name not in BUILT_IN:
            try:
                strategy_named(name)
            except Exception as error:
                broken[name] = f"{type(error).__name__}: {error}"
    return broken


def reference_seconds() -> float:
    """Processor time of a small plan, which tells how fast a machine is."""
    costs = [(7 * i * i + 13 * i) % 8191 + 1 for i in range(4096)]
    homes = [i // 64 for i in range(4096)]

    def once() -> float:
        began = time.thread_time()
        partitioning.partition(costs, homes, 64)
        return time.thread_time() - began

    return min(once() for _ in range(5))


if __name__ == "__main__":
    ends_with_parent(int(sys.argv[2]), "evenkeel-zygote")
    run(socket.socket(fileno=int(sys.argv[1])))
