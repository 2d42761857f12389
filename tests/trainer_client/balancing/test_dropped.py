"""Balancers that were dropped without being closed."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from typing import Any

import pytest

from benchmarks.harness.balancer_process import ServiceProcess
from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.balancing.jobs import SPEC, balancer_of, cost_of, make_batch
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


@pytest.mark.parametrize("leave", [False, True])
@pytest.mark.parametrize("mode", ["embedded", "service"])
def test_a_dropped_balancer_leaves_nothing_behind_and_its_successor_takes_its_place(
    balancer: ServiceProcess, mode: str, leave: bool
) -> None:
    address = balancer.address if mode == "service" else None
    for modes, pairs, left in run_ranks(2, one_after_the_other, address, leave):
        assert {each for loop in modes for each in loop} == {mode}
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


@pytest.mark.parametrize("error", [False, True])
def test_a_dropped_balancer_does_not_wait_for_the_collector_of_cycles(error: bool) -> None:
    assert run_ranks(2, ends_of, error) == [[], []]
