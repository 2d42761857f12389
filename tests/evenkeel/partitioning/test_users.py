"""Users: fewer rows are looked up, no rank has more to do, and nothing changes where nobody shares anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenkeel.partitioning import PartitionError
from evenkeel.partitioning.rounds import RoundPlan
from evenkeel.partitioning.splits import Divisible, SpanCosts, SplitOptions
from evenkeel.partitioning.stages import plan_round
from tests.evenkeel.partitioning.rounds import round_of


def rows_of(users: Any, sizes: Any, ranks: Any) -> float:
    """Rows that all ranks look up, where those of a sample are among those of its user's largest on the rank."""
    largest: dict[tuple[int, int], float] = {}
    for user, size, rank in zip(users.tolist(), sizes.tolist(), ranks.tolist(), strict=True):
        largest[user, rank] = max(largest.get((user, rank), 0.0), size)
    return sum(largest.values())


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Rounds of a few batches and users, with and without each option that a plan depends on."""
    num_ranks, num_steps = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    counts = rng.integers(0, draw(st.integers(1, 40)), (num_ranks, num_steps))
    if draw(st.booleans()):
        counts[:] = counts[0]  # as many on each rank
    n, num_users = int(counts.sum()), draw(st.integers(1, 60))
    users = rng.integers(0, num_users, n)
    lengths = (rng.lognormal(4, draw(st.sampled_from([0.2, 1.0, 2.0])), num_users).astype(np.int64) + 1)[users]
    costs: NDArray[Any] = lengths * (50 + lengths) if draw(st.booleans()) else lengths * 0.37
    call: dict[str, Any] = {
        "costs": costs,
        "sizes": lengths,
        "homes": np.repeat(np.arange(num_ranks), counts.sum(axis=1)),
        "steps": np.concatenate([np.repeat(np.arange(num_steps), row) for row in counts]),
        "num_ranks": num_ranks,
        "num_steps": num_steps,
        "users": users,
        "counts": draw(st.sampled_from(["equal", "free"])),
        "min_samples": draw(st.integers(0, 3)),
        "strategy": draw(st.sampled_from(["minimal_move", "minimal_move", "lpt", "karmarkar_karp", "plain"])),
        "tolerance": draw(st.sampled_from([1e-3, 0.05])),
    }
    if draw(st.booleans()):
        call["speeds"] = rng.uniform(0.5, 2.0, num_ranks)
    if draw(st.booleans()):
        call["nodes"] = rng.integers(0, 2, num_ranks)
    if draw(st.booleans()):
        most = np.bincount(call["homes"], lengths, num_ranks).max(initial=1)
        call |= {"memory": lengths, "memory_caps": np.full(num_ranks, most * draw(st.floats(0.7, 1.5)))}
    return call


def plan_of(call: dict[str, Any]) -> RoundPlan | None:
    try:
        return plan_round(*round_of(**call))
    except PartitionError:
        return None


@settings(max_examples=400, deadline=None)
@given(calls())
def test_no_rank_has_more_to_do_and_fewer_rows_are_looked_up(call: dict[str, Any]) -> None:
    without, plan = plan_of({**call, "users": None}), plan_of(call)
    if without is None or plan is None:
        assert plan is without
        return
    users, sizes, ranks = call["users"], call["sizes"], call["num_ranks"]
    speeds, caps = np.asarray(call.get("speeds", np.ones(ranks))), call.get("memory_caps")
    steps = call["steps"] if plan.steps is None else plan.steps
    assert (plan.loads_before == without.loads_before).all()
    for step, (figures, before) in enumerate(zip(plan.batches, without.batches, strict=True)):
        own = np.flatnonzero(steps == step)
        loads = np.zeros(ranks, call["costs"].dtype)
        np.add.at(loads, plan.destinations[own], call["costs"][own])
        assert (loads == plan.loads_after[step]).all()
        assert figures.max_load_after == (loads / speeds).max()
        assert figures.max_load_after <= before.max_load_after
        assert (figures.lower_bound, figures.samples) == (before.lower_bound, before.samples)
        moved = plan.destinations[own] != call["homes"][own]
        assert (figures.moved_samples, figures.moved_size) == (moved.sum(), sizes[own][moved].sum())
        counts, counts_before = (
            np.bincount(each.destinations[own], minlength=ranks).tolist() for each in (plan, without)
        )
        assert counts == counts_before
        if caps is not None:
            assert (np.bincount(plan.destinations[own], sizes[own], ranks) <= caps * (1 + 1e-9)).all()
        rows, rows_before = (rows_of(users[own], sizes[own], each.destinations[own]) for each in (plan, without))
        assert rows < rows_before or (plan.destinations[own] == without.destinations[own]).all()
    again = plan_of(call)
    assert again is not None
    assert (again.destinations == plan.destinations).all()


@settings(max_examples=60, deadline=None)
@given(calls())
def test_users_with_one_sample_each_change_nothing(call: dict[str, Any]) -> None:
    without, plan = plan_of({**call, "users": None}), plan_of({**call, "users": np.arange(len(call["users"]))})
    assert (plan is None) == (without is None)
    assert plan is None or (plan.destinations == without.destinations).all()  # type: ignore[union-attr]


@pytest.mark.parametrize(("ranks", "samples", "share"), [(8, 16, 0.75), (8, 128, 0.25), (64, 128, 0.2)])
def test_users_dealt_out_over_all_ranks_come_together_again(ranks: int, samples: int, share: float) -> None:
    rows, rows_before = 0.0, 0.0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        of_user = np.repeat(np.arange(ranks * samples // 8), rng.integers(4, 30, ranks * samples // 8))
        users = np.sort(of_user[: ranks * samples].reshape(samples, ranks).T, axis=1).ravel()
        lengths = np.clip(rng.lognormal(7.9, 1.07, users.max() + 1), 10, 4096).astype(np.int64)[users]
        call = {
            "costs": lengths * (12_000 + lengths), "sizes": lengths, "homes": np.repeat(np.arange(ranks), samples),
            "num_ranks": ranks, "users": users,
        }  # fmt: skip
        plan, without = plan_of(call), plan_of({**call, "users": None})
        assert plan is not None
        assert without is not None
        rows += rows_of(users, lengths, plan.destinations)
        rows_before += rows_of(users, lengths, without.destinations)
    assert rows < share * rows_before


@pytest.mark.parametrize("num_steps", [1, 2])
def test_batches_with_samples_in_parts_are_planned_as_without_users(num_steps: int) -> None:
    rng = np.random.default_rng(0)
    steps = np.tile(np.repeat(np.arange(num_steps), 10), 4)
    heavy = int(np.flatnonzero(steps == 0)[-1])  # of the first batch; the second, if there is one, has only light ones
    lengths = rng.integers(20, 60, steps.size)
    lengths[heavy] = 3000
    spans = SpanCosts.of(lengths, per_position=1)
    divisible = Divisible(samples=np.array([heavy]), first_items=np.zeros(1), spans=spans.take([heavy]))
    call = {
        "costs": spans.whole, "homes": np.repeat(np.arange(4), 10 * num_steps), "steps": steps, "num_ranks": 4,
        "num_steps": num_steps, "sizes": spans.positions, "divisible": divisible.table, "split": SplitOptions(),
        "counts": "free",
    }  # fmt: skip
    users = np.arange(steps.size) // 4 * 7 % 5
    without, plan = plan_of(call), plan_of({**call, "users": users})
    assert plan is not None
    assert without is not None
    assert plan.parts is not None
    assert without.parts is not None
    assert (plan.parts.pieces == without.parts.pieces).all()
    of = np.cumsum(plan.parts.begins == 0) - 1
    for step, (figures, before) in enumerate(zip(plan.batches, without.batches, strict=True)):
        own = slice(None) if plan.steps is None else np.flatnonzero(plan.steps == step)
        ranks, ranks_before = plan.destinations[own], without.destinations[own]
        assert figures.max_load_after <= before.max_load_after
        assert (ranks == ranks_before).all() == (figures.split_samples > 0)
        if not figures.split_samples:
            rows, rows_before = (rows_of(users[of[own]], lengths[of[own]], each) for each in (ranks, ranks_before))
            assert rows < rows_before
    assert sorted(one.split_samples > 0 for one in plan.batches) == [False, True][-num_steps:]
