"""Windows: every sample exactly once, no batch's bound worse, nothing changed where nothing is gained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenkeel.partitioning import PartitionError, partition
from evenkeel.partitioning.rounds import RoundPlan
from evenkeel.partitioning.stages import plan_round
from evenkeel.partitioning.windows import regroup, step_bounds
from tests.evenkeel.partitioning.rounds import round_of


@st.composite
def windows(draw: st.DrawFn) -> dict[str, Any]:
    """Windows of a few batches with a few giants, of uneven and empty batches, integer or floating costs."""
    num_ranks, num_steps = draw(st.integers(1, 5)), draw(st.integers(2, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    counts = rng.integers(0, draw(st.integers(1, 9)), (num_ranks, num_steps))
    n = int(counts.sum())
    costs: NDArray[Any] = rng.integers(0, 50, n)
    costs[rng.random(n) < draw(st.floats(0, 0.4))] = draw(st.integers(100, 100_000))
    if draw(st.booleans()):
        costs = costs * 0.37
    call: dict[str, Any] = {
        "costs": costs,
        "homes": np.repeat(np.arange(num_ranks), counts.sum(axis=1)),
        "steps": np.concatenate([np.repeat(np.arange(num_steps), row) for row in counts]),
        "num_ranks": num_ranks,
        "num_steps": num_steps,
        "counts": draw(st.sampled_from(["equal", "free"])),
        "strategy": draw(st.sampled_from(["minimal_move", "lpt", "karmarkar_karp"])),
    }
    if draw(st.booleans()):
        call["speeds"] = rng.uniform(0.5, 2.0, num_ranks)
    return call


def plan_of(call: dict[str, Any]) -> RoundPlan:
    return plan_round(*round_of(**call))


def alone(call: dict[str, Any], step: int) -> float:
    """The largest load over speed of a batch that is balanced by itself."""
    rest = {name: call[name] for name in ("counts", "strategy", "speeds") if name in call}
    mine = call["steps"] == step
    part = partition(call["costs"][mine], call["homes"][mine], call["num_ranks"], **rest)
    return float((part.loads / np.asarray(call.get("speeds", np.ones(call["num_ranks"])))).max())


@settings(max_examples=150, deadline=None)
@given(windows())
def test_every_sample_is_used_once_and_the_sum_of_steps_is_no_longer(call: dict[str, Any]) -> None:
    plan = plan_of(call)
    assert plan.steps is not None
    before, after = (np.bincount(steps, minlength=call["num_steps"]) for steps in (call["steps"], plan.steps))
    assert (before == after).all()  # each batch keeps its number of samples
    speeds = np.asarray(call.get("speeds", np.ones(call["num_ranks"])))
    changed = bool((plan.steps != call["steps"]).any())
    for step, figures in enumerate(plan.batches):
        mine = np.flatnonzero(plan.steps == step)
        loads = np.bincount(plan.destinations[mine], call["costs"][mine], call["num_ranks"])
        assert np.allclose(loads, plan.loads_after[step])
        loaded = call["steps"] == step
        at_home = np.bincount(call["homes"][loaded], call["costs"][loaded], call["num_ranks"])
        assert np.allclose(at_home, plan.loads_before[step])
        assert figures.max_load_after == pytest.approx((loads / speeds).max())
        counts = np.bincount(plan.destinations[mine], minlength=call["num_ranks"])
        assert call["counts"] == "free" or not changed or counts.max() - counts.min() <= 1
    total = sum(figures.max_load_after for figures in plan.batches)
    assert total <= sum(alone(call, step) for step in range(call["num_steps"])) * (1 + 1e-9)
    again = plan_of(call)
    assert (again.steps == plan.steps).all()
    assert (again.destinations == plan.destinations).all()


@settings(max_examples=150, deadline=None)
@given(windows(), st.floats(0.5, 1.0))
def test_no_batchs_bound_rises(call: dict[str, Any], fill: float) -> None:
    speeds = np.asarray(call.get("speeds", np.ones(call["num_ranks"])))
    steps, equal = call["steps"].astype(np.int32), call["counts"] == "equal"
    moved = regroup(call["costs"], steps, call["num_steps"], speeds, equal=equal, fill=fill)
    mean, bound = step_bounds(call["costs"], steps, call["num_steps"], speeds, equal=equal)
    mean_after, bound_after = step_bounds(call["costs"], moved, call["num_steps"], speeds, equal=equal)
    assert (bound_after <= bound * (1 + 1e-9)).all()
    assert mean_after.sum() == pytest.approx(mean.sum())


def giants(num_ranks: int, num_steps: int, samples: int) -> dict[str, Any]:
    """One sample in each batch that outweighs a rank's share of it by far."""
    steps = np.tile(np.repeat(np.arange(num_steps), samples), num_ranks)
    homes = np.repeat(np.arange(num_ranks), samples * num_steps)
    costs = np.full(steps.size, 10)
    for step in range(num_steps):
        costs[np.flatnonzero((steps == step) & (homes == step % num_ranks))[0]] = 10_000
    return {"costs": costs, "homes": homes, "steps": steps, "num_ranks": num_ranks, "num_steps": num_steps}


def test_giants_of_all_batches_meet_in_one() -> None:
    call = giants(num_ranks=4, num_steps=4, samples=8)
    plan, heavy = plan_of(call), call["costs"] == 10_000
    assert plan.steps is not None
    assert len(set(plan.steps[heavy].tolist())) == 1
    assert sorted(plan.destinations[heavy].tolist()) == [0, 1, 2, 3]
    assert plan.loads_after.max(axis=1).sum() == 10_000 + 70 + 3 * 80  # and without meeting 4 * 10_070
    assert np.count_nonzero(plan.steps != call["steps"]) == 6  # three giants and what made room for them
    stays = plan_of(call | {"stay": True})
    assert (stays.steps == call["steps"]).all()


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
