"""Users whose samples are dealt out over all ranks come together again; what holds of every plan is in test_fuzz."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from evenkeel.partitioning.refinements import plan_round
from evenkeel.partitioning.rounds import RoundPlan
from evenkeel.partitioning.splits import Divisible, SpanCosts, SplitOptions
from tests.evenkeel.partitioning.instances import round_of
from tests.evenkeel.partitioning.reference import rows_of


def plan_of(call: dict[str, Any]) -> RoundPlan:
    return plan_round(*round_of(**call))


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
    divisible = Divisible.with_spans(spans.take([heavy]), np.array([heavy]), np.zeros(1))
    call = {
        "costs": spans.whole, "homes": np.repeat(np.arange(4), 10 * num_steps), "steps": steps, "num_ranks": 4,
        "num_steps": num_steps, "sizes": spans.positions, "divisible": divisible.table, "split": SplitOptions(),
        "counts": "free",
    }  # fmt: skip
    users = np.arange(steps.size) // 4 * 7 % 5
    without, plan = plan_of(call), plan_of({**call, "users": users})
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


@pytest.mark.parametrize("num_steps", [2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_every_batch_of_a_round_is_planned_by_its_own_users(num_steps: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 12, (4, num_steps))
    homes, steps = (
        np.repeat(np.arange(4), counts.sum(axis=1)),
        np.concatenate([np.repeat(np.arange(num_steps), row) for row in counts]),
    )
    costs = np.array([40, 90, 30])[rng.integers(0, 3, homes.size)]
    call = {
        "costs": costs,
        "homes": homes,
        "steps": steps,
        "num_ranks": 4,
        "num_steps": num_steps,
        "speeds": np.ones(4),
    }
    users = rng.integers(0, 6, homes.size)
    plan, without = plan_of({**call, "users": users}), plan_of(call)
    told = steps if plan.steps is None else plan.steps
    assert (told == (steps if without.steps is None else without.steps)).all()
    for step, (figures, before) in enumerate(zip(plan.batches, without.batches, strict=True)):
        own = told == step
        loads = np.bincount(plan.destinations[own], costs[own], 4)
        assert np.allclose(plan.loads_after[step], loads, atol=0)
        assert figures.max_load_after == loads.max() <= before.max_load_after
        assert (
            np.bincount(plan.destinations[own], minlength=4) == np.bincount(without.destinations[own], minlength=4)
        ).all()
        assert rows_of(users[own], costs[own], plan.destinations[own]) <= rows_of(
            users[own], costs[own], without.destinations[own]
        )
