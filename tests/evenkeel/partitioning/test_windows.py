"""Windows: giants of all batches meet in one, and nothing changes where nothing is gained; the rest is in test_fuzz."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from evenkeel.partitioning import PartitionError, partition
from evenkeel.partitioning.refinements import plan_round
from evenkeel.partitioning.rounds import RoundPlan
from tests.evenkeel.partitioning.instances import round_of


def plan_of(call: dict[str, Any]) -> RoundPlan:
    return plan_round(*round_of(**call))


def giants(num_ranks: int, num_steps: int, samples: int, cost: int = 10_000) -> dict[str, Any]:
    """One sample in each batch that outweighs a rank's share of it by far."""
    steps = np.tile(np.repeat(np.arange(num_steps), samples), num_ranks)
    homes = np.repeat(np.arange(num_ranks), samples * num_steps)
    costs = np.full(steps.size, 10)
    for step in range(num_steps):
        costs[np.flatnonzero((steps == step) & (homes == step % num_ranks))[0]] = cost
    return {"costs": costs, "homes": homes, "steps": steps, "num_ranks": num_ranks, "num_steps": num_steps}


@pytest.mark.parametrize("num_steps", [2, 4])
def test_giants_of_all_batches_meet_in_one(num_steps: int) -> None:
    call = giants(num_ranks=4, num_steps=num_steps, samples=8)
    plan, heavy = plan_of(call), call["costs"] == 10_000
    assert len(set(plan.steps[heavy].tolist())) == 1
    assert len(set(plan.destinations[heavy].tolist())) == num_steps
    assert plan.loads_after.max(axis=1).sum() == 10_070 + (num_steps - 1) * 80  # and without meeting as often 10_070
    assert np.count_nonzero(plan.steps != call["steps"]) == 2 * (num_steps - 1)  # giants and what made room for them
    stays = plan_of(call | {"stay": True})
    assert (stays.steps == call["steps"]).all()


def test_giants_that_stand_out_a_little_meet_too() -> None:
    plan = plan_of(giants(num_ranks=4, num_steps=4, samples=8, cost=60))
    assert plan.loads_after.max(axis=1).sum() <= 380  # 130 in one batch and 80 in three; by themselves 4 * 130


def test_batches_that_balance_by_themselves_stay_as_they_are() -> None:
    rng = np.random.default_rng(1)
    steps, homes = np.tile(np.repeat(np.arange(4), 32), 8), np.repeat(np.arange(8), 128)
    costs = rng.integers(100, 200, steps.size)
    plan = plan_round(*round_of(costs, homes, 8, steps=steps, num_steps=4))
    assert (plan.steps == steps).all()
    for step in range(4):
        mine = steps == step
        assert (plan.destinations[mine] == partition(costs[mine], homes[mine], 8).destinations).all()


def test_memory_caps_hold_in_each_batch() -> None:
    call = giants(num_ranks=4, num_steps=4, samples=8)
    memory = np.where(call["costs"] > 10, 50.0, 1.0)
    plan = plan_of(call | {"memory": memory, "memory_caps": [60.0] * 4})
    for step in range(4):
        for rank in range(4):
            assert memory[(plan.steps == step) & (plan.destinations == rank)].sum() <= 60.0
    with pytest.raises(PartitionError):
        plan_of(call | {"memory": memory, "memory_caps": [40.0] * 4})


KNOWN = {(4, 2, 8, 1.5): 1.09987, (4, 4, 8, 1.5): 1.03185, (8, 3, 6, 2.0): 1.72356, (16, 4, 4, 1.0): 1.0972}
"""By ranks, steps, samples of each batch, and spread of costs: times of all steps, in multiples of an even division."""


@pytest.mark.parametrize("shape", KNOWN)
def test_steps_together_take_no_longer_than_they_did(shape: tuple[int, int, int, float]) -> None:
    (num_ranks, num_steps, samples, spread), times = shape, []
    for seed in range(20):
        costs = np.random.default_rng(seed).lognormal(6, spread, num_ranks * num_steps * samples).astype(np.int64)
        steps = np.tile(np.repeat(np.arange(num_steps), samples), num_ranks)
        homes = np.repeat(np.arange(num_ranks), samples * num_steps)
        plan = plan_round(*round_of(costs, homes, num_ranks, steps=steps, num_steps=num_steps))
        times.append(plan.loads_after.max(axis=1).sum() * num_ranks / costs.sum())
    assert np.mean(times) <= KNOWN[shape] * (1 + 1e-4)
