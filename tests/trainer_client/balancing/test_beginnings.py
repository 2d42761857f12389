"""Loops whose first batch fails, that are interrupted as they begin, or begin where another one is not over."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.harness.balancer_process import ServiceProcess
from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.balancing.jobs import (
    SPEC,
    STEPS,
    Ledger,
    balancer_of,
    cost_of,
    failing,
    run_in_turn,
    source,
)
from trainer_client import BalancedLoader
from trainer_client.balancing import ProgramOrderError, kernels


class Gone:
    """A dataset that is not there."""

    def __iter__(self) -> Iterator[Any]:
        raise OSError("the disk is gone")


def fail_at_once(
    rank: int, address: str | None, way: str, ranks_that_fail: tuple[int, ...]
) -> tuple[Ledger, list[str]]:
    """The very first batch of some ranks cannot be had; then all ranks train."""
    ledger: Ledger = {}
    raised: list[str] = []
    good: Any = source(rank, 0)

    def bad() -> Any:
        unreadable = [{"id": "no tensor", "count": 3}]
        ways: dict[str, Any] = {"source": failing(good, 0), "loader": Gone(), "batch": unreadable}
        return ways.get(way, good)

    def cost(batch: Any) -> Any:
        if way == "cost" and rank in ranks_that_fail:
            raise OSError("the disk is gone")
        return cost_of(batch)

    def trained(batches: Any, loop: str) -> None:
        for batch in BalancedLoader(batches, balancer, cost=cost, spec=SPEC, name=loop[0]):
            ledger.setdefault(loop, []).append(batch["id"].tolist())

    started = time.monotonic()
    with balancer_of(address) as balancer:
        for loop in ("a first", "b first"):
            try:
                trained(bad() if rank in ranks_that_fail else good, loop)
            except (OSError, ValueError) as error:
                raised.append(str(error))
        way = "none"
        trained(good, "a again")
    assert time.monotonic() - started < 40, "a rank was waited for"
    return ledger, raised


@pytest.mark.parametrize("ranks_that_fail", [(1,), (0, 1, 2)])
def test_a_first_batch_that_fails_ends_the_loops_of_all_ranks(ranks_that_fail: tuple[int, ...]) -> None:
    ways = ("source", "loader", "batch", "cost")
    for results in run_in_turn(3, *((fail_at_once, None, way, ranks_that_fail) for way in ways)):
        for rank, (ledger, raised) in enumerate(results):
            assert len(raised) == (2 if rank in ranks_that_fail else 0)
            assert {"a first", "b first"}.isdisjoint(ledger)
        again = sorted(sample for ledger, _ in results for step in ledger["a again"] for sample in step)
        assert again == sorted(int(one) for rank in range(3) for batch in source(rank, 0) for one in batch["id"])


def submit_ahead_of_the_end(rank: int, address: str) -> list[tuple[str, int]]:
    """Submissions that run ahead of their end, and then a loop whose first round has the number of one of them."""
    batches = source(rank, 0, 3)
    told: list[tuple[str, int]] = []
    with balancer_of(address, depth=1) as balancer:
        for _ in range(2):
            waiting = []
            for step in range(STEPS):
                batch = batches[step] if step < len(batches) else None
                waiting.append((batch, balancer.submit(batch, cost=cost_of, spec=SPEC)))
                if step >= 3:
                    first, ticket = waiting.pop(0)
                    if balancer.redistribute(first, ticket, spec=SPEC) is None:
                        break
                    told.append((ticket.report.mode.value, len(first["id"]) if first else 0))
        loader = BalancedLoader(batches, balancer, cost=cost_of, spec=SPEC)
        told += [(loader.report.mode.value, len(batch["id"])) for batch in loader]
    return told


def test_what_is_submitted_after_the_end_costs_the_next_loop_no_answer(balancer: ServiceProcess) -> None:
    for told in run_ranks(2, submit_ahead_of_the_end, balancer.address):
        assert [mode for mode, _ in told] == ["service"] * 9


def by_hand_after_an_iterator(rank: int, address: str | None) -> Any:
    """An iterator that has read everything and is kept, then a loop by hand over the same stream."""
    batches = source(rank, 0, 3)
    trained: list[list[int]] = []
    with balancer_of(address, depth=5) as balancer:
        kept = iter(BalancedLoader(batches, balancer, cost=cost_of, spec=SPEC))
        next(kept)
        for batch in [*source(rank, 1, 3), None]:
            ticket = balancer.submit(batch, cost=cost_of, spec=SPEC)
            moved = balancer.redistribute(batch, ticket, spec=SPEC)
            trained += [] if moved is None else [moved["id"].tolist()]
        with pytest.raises(ProgramOrderError, match="a newer loop over 'train' has begun"):
            next(kept)
    return trained


def test_a_loop_by_hand_ends_an_iterator_that_is_kept(balancer: ServiceProcess) -> None:
    for results in run_in_turn(2, *((by_hand_after_an_iterator, address) for address in (None, balancer.address))):
        for step in range(3):
            found = sorted(sample for trained in results for sample in trained[step])
            assert found == sorted(int(one) for rank in range(2) for one in source(rank, 1, 3)[step]["id"])


class TooLongError(Exception):
    """What a program raises from a signal."""


def interrupted(rank: int, where: str) -> tuple[int, list[list[int]]]:
    """Rank 0's loop is interrupted twice while its stream opens, for which the other rank or the compiler is waited."""

    def ring(*_: object) -> None:
        raise TooLongError

    compiled = threading.Event()
    if where == "compiling":
        kernels._moves = lambda: SimpleNamespace(ready=False, wait=compiled.wait)  # type: ignore[assignment,return-value]
    attempts, loops = 0, []
    with balancer_of(None) as balancer:
        loader = BalancedLoader(source(rank, 0), balancer, cost=cost_of, spec=SPEC)
        if rank == 0:
            signal.signal(signal.SIGALRM, ring)
            for _ in range(2):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.4)
                    next(iter(loader))
                except TooLongError:
                    attempts += 1
        if where == "others":
            dist.barrier()
        compiled.set()
        for _ in range(2 if rank == 0 else 4):
            loops.append([sample for batch in loader for sample in batch["id"].tolist()])
    return attempts, loops


@pytest.mark.parametrize("where", ["others", "compiling"])
def test_a_loop_that_is_interrupted_while_its_stream_opens_has_been_left(where: str) -> None:
    """Else the loops that a rank begins after it would meet those that others began before theirs."""
    (attempts, first), (_, second) = run_ranks(2, interrupted, where)
    assert attempts == 2
    assert second[:2] == [[], []]  # ended with rank 0's
    second = second[2:]
    everything = sorted(int(one) for rank in range(2) for batch in source(rank, 0) for one in batch["id"])
    assert [sorted(one + other) for one, other in zip(first, second, strict=True)] == [everything] * 2
