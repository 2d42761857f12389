"""Windows: every sample exactly once, no batch's bound worse, nothing changed where nothing is gained."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenkeel.partitioning import PartitionError, partition
from evenkeel.partitioning.slices import plan_digest, slice_plan
from evenkeel.partitioning.windows import WindowPartition, partition_window, regroup, step_bounds


@st.composite
def windows(draw: st.DrawFn) -> dict[str, Any]:
    """Windows of a few batches with a few giants, of uneven and empty batches, integer or floating costs."""
    num_ranks, num_steps = draw(st.integers(1, 5)), draw(st.integers(1, 5))
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


def unwindowed(call: dict[str, Any]) -> float:
    """Sum over the batches of the largest load over speed when each is balanced for itself."""
    rest = {name: call[name] for name in ("counts", "strategy", "speeds") if name in call}
    speeds, total = np.asarray(call.get("speeds", np.ones(call["num_ranks"]))), 0.0
    for step in range(call["num_steps"]):
        mine = call["steps"] == step
        part = partition(call["costs"][mine], call["homes"][mine], call["num_ranks"], **rest)
        total += float((part.loads / speeds).max())
    return total


@settings(max_examples=150, deadline=None)
@given(windows())
def test_every_sample_is_used_once_and_the_sum_of_steps_is_no_longer(call: dict[str, Any]) -> None:
    plan = partition_window(**call)
    before, after = (np.bincount(steps, minlength=call["num_steps"]) for steps in (call["steps"], plan.steps))
    assert (before == after).all()  # each batch keeps its number of samples
    speeds = np.asarray(call.get("speeds", np.ones(call["num_ranks"])))
    for step, part in enumerate(plan.partitions):
        mine = np.flatnonzero(plan.steps == step)
        assert (plan.destinations[mine] == part.destinations).all()
        loads = np.bincount(part.destinations, weights=call["costs"][mine], minlength=call["num_ranks"])
        assert np.allclose(loads, part.loads)
        assert plan.largest[step] == pytest.approx((loads / speeds).max())
        counts = np.bincount(part.destinations, minlength=call["num_ranks"])
        if call["counts"] == "equal" and plan.changed:
            assert counts.max() - counts.min() <= 1
    assert plan.changed == np.count_nonzero(plan.steps != call["steps"])
    assert plan.total <= unwindowed(call) * (1 + 1e-9)


@settings(max_examples=150, deadline=None)
@given(windows(), st.floats(0.5, 1.0))
def test_no_batchs_bound_rises(call: dict[str, Any], fill: float) -> None:
    speeds = np.asarray(call.get("speeds", np.ones(call["num_ranks"])))
    steps, equal = call["steps"].astype(np.int32), call["counts"] == "equal"
    moved = regroup(call["costs"], steps, call["num_steps"], speeds, equal=equal, fill=fill)
    before = step_bounds(call["costs"], steps, call["num_steps"], speeds, equal=equal)
    after = step_bounds(call["costs"], moved, call["num_steps"], speeds, equal=equal)
    assert (after.bound <= before.bound * (1 + 1e-9)).all()
    assert after.mean.sum() == pytest.approx(before.mean.sum())


@settings(max_examples=50, deadline=None)
@given(windows())
def test_the_same_window_gives_the_same_plan(call: dict[str, Any]) -> None:
    plans = [partition_window(**call), partition_window(**{**call, "homes": call["homes"].astype(np.int64)})]
    assert (plans[0].steps == plans[1].steps).all()
    assert (plans[0].destinations == plans[1].destinations).all()


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
    plan = partition_window(**call)
    heavy = call["costs"] == 10_000
    assert len(set(plan.steps[heavy].tolist())) == 1
    assert sorted(plan.destinations[heavy].tolist()) == [0, 1, 2, 3]
    assert plan.total == 10_000 + 70 + 3 * 80  # and without meeting 4 * 10_070
    assert plan.changed == 6  # three giants and what made room for them


def test_batches_that_balance_by_themselves_stay_as_they_are() -> None:
    rng = np.random.default_rng(1)
    steps, homes = np.tile(np.repeat(np.arange(4), 32), 8), np.repeat(np.arange(8), 128)
    costs = rng.integers(100, 200, steps.size)
    plan = partition_window(costs, homes, steps, 8, 4)
    assert plan.changed == 0
    for step, part in enumerate(plan.partitions):
        mine = steps == step
        assert (part.destinations == partition(costs[mine], homes[mine], 8).destinations).all()


def test_memory_caps_hold_in_each_batch() -> None:
    call = giants(num_ranks=4, num_steps=4, samples=8)
    memory = np.where(call["costs"] > 10, 50.0, 1.0)
    plan = partition_window(**call, memory=memory, memory_caps=[60.0] * 4)
    for step in range(4):
        for rank in range(4):
            assert memory[(plan.steps == step) & (plan.destinations == rank)].sum() <= 60.0
    with pytest.raises(PartitionError):
        partition_window(**call, memory=memory, memory_caps=[40.0] * 4)


@settings(max_examples=60, deadline=None)
@given(windows(), st.integers(0, 3))
def test_slices_fit_together(call: dict[str, Any], fields: int) -> None:
    plan = partition_window(**call)
    n, num_ranks = call["costs"].size, call["num_ranks"]
    lengths = np.random.default_rng(n).integers(0, 9, (n, fields))
    counts = np.bincount(call["homes"], minlength=num_ranks)
    slices = slice_plan(plan.destinations, counts, lengths, plan.steps, call["num_steps"])
    assert slices.num_batches == call["num_steps"]
    begins = np.cumsum(counts) - counts
    for rank in range(num_ranks):
        own = slice(begins[rank], begins[rank] + counts[rank])
        assert (slices.steps_of(rank) == plan.steps[own]).all()
        for step, piece in enumerate(slices.batches_of(rank)):
            assert (piece.destinations == plan.destinations[own][plan.steps[own] == step]).all()
            arriving = (plan.steps == step) & (plan.destinations == rank)
            homes = call["homes"][arriving]
            assert piece.sources.tolist() == sorted(set(homes.tolist()))
            for source, count, totals in zip(piece.sources, piece.source_counts, piece.source_totals, strict=True):
                assert count == (homes == source).sum()
                assert (totals == lengths[arriving][homes == source].sum(axis=0)).all()


def test_the_digest_names_the_batches_too() -> None:
    call = giants(num_ranks=4, num_steps=4, samples=8)
    plan = partition_window(**call)
    counts, lengths = np.full(4, 32), np.ones((128, 1), np.int64)
    steps, light = plan.steps.copy(), np.flatnonzero((call["costs"] == 10) & (plan.destinations == 0))
    a, b = light[0], light[np.flatnonzero(plan.steps[light] != plan.steps[light[0]])[0]]
    steps[[a, b]] = steps[[b, a]]  # the same ranks in other batches

    def digest(one: WindowPartition) -> bytes:
        return plan_digest(one.destinations, counts, lengths, one.steps, 4)

    assert digest(plan) == digest(partition_window(**call))
    assert digest(plan) != digest(replace(plan, steps=steps))
    assert digest(plan) != plan_digest(plan.destinations, counts, lengths)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": np.zeros(3, int)}, "one integer for each of 128 samples"),
        ({"steps": np.full(128, 4)}, r"steps\[0\] is 4"),
        ({"num_steps": 0}, "num_steps is 0"),
        ({"steps": None}, "num_steps is 4, but steps is None"),
        ({"costs": np.full(128, np.nan)}, "nan"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition_window(**{**giants(4, 4, 8), **change})
