"""Balancers that were dropped without being closed."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from typing import Any

from benchmarks.harness.balancer_process import ServiceProcess
from tests.trainer_client.balancing.jobs import SPEC, balancer_of, cost_of, make_batch, run_in_turn
from trainer_client import BalancedLoader, Balancer


def threads_left() -> list[str]:
    """Threads of the library that do not end."""
    until = time.monotonic() + 20
    while (left := [one.name for one in threading.enumerate() if one.name.startswith("evenkeel")]) and (
        time.monotonic() < until
    ):
        time.sleep(0.02)
    return left


def one_after_the_other(rank: int, address: str | None, leave: bool) -> Any:
    """The modes of five loops and the communicators that they used; then what is left of them all."""
    modes, pairs = [], []
    for _ in range(5):
        balancer = balancer_of(address, f"dropped-{leave}")
        loader = BalancedLoader([make_batch(rank, step, 5) for step in range(6)], balancer, cost=cost_of, spec=SPEC)
        seen = []
        for step, _ in enumerate(loader):
            seen.append(loader.report.mode.value)
            if leave and step == 2 + rank:
                break
        modes.append(seen)
        opened = balancer.stream()._opened
        assert opened is not None
        pairs.append(id(opened.communicators))
        # what a stream remembers of rounds does not grow with them
        assert len(opened.rounds._open) <= balancer.stream().options.depth + 1  # type: ignore[attr-defined]
        del opened
        del balancer, loader  # and nothing else
    gc.collect()
    return modes, pairs, threads_left()


def test_a_dropped_balancer_leaves_nothing_behind_and_its_successor_takes_its_place(balancer: ServiceProcess) -> None:
    ways = [(address, leave) for address in (None, balancer.address) for leave in (False, True)]
    for (address, leave), results in zip(
        ways, run_in_turn(2, *((one_after_the_other, *way) for way in ways)), strict=True
    ):
        for modes, pairs, left in results:
            assert {each for loop in modes for each in loop} == {"embedded" if address is None else "service"}
            assert leave or {len(loop) for loop in modes} == {6}
            assert len(set(pairs)) == 1
            assert left == []


def ends_of(rank: int, error: bool) -> list[str]:
    """Threads that are left where nobody looks for cycles: loops that end, by themselves or by an error of the data."""

    def batches() -> Any:
        for step in range(4):
            if error and step == 2:
                raise OSError("the data end here")
            yield make_batch(rank, step, 5)

    gc.collect()
    gc.disable()
    balancer = Balancer.embedded()
    loader = BalancedLoader(batches(), balancer, cost=cost_of, spec=SPEC)
    with contextlib.suppress(OSError):
        for _ in loader:
            pass
    del balancer, loader
    left = threads_left()
    gc.enable()
    return left


def test_a_dropped_balancer_does_not_wait_for_the_collector_of_cycles() -> None:
    assert run_in_turn(2, (ends_of, False), (ends_of, True)) == [[[], []]] * 2
