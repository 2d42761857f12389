"""Ranks get as many samples as asked for, where there are as many and the caps have room."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.partitioning import partition, strategies
from evenkeel.partitioning.stages import plan_round
from tests.evenkeel.partitioning.rounds import round_of


def counts_of(destinations: np.ndarray, num_ranks: int) -> list[int]:
    return np.bincount(destinations, minlength=num_ranks).tolist()


def test_the_lightest_are_taken_and_nothing_else_moves() -> None:
    costs, homes = np.array([5, 1, 7, 2]), np.zeros(4, np.int32)
    found = partition(costs, homes, 3, counts="free", min_samples=1, stay=True)
    assert found.destinations.tolist() == [0, 1, 0, 2]
    assert found.loads.tolist() == [12, 1, 2]


def test_memory_caps_come_first() -> None:
    memory = np.array([4.0, 4.0, 4.0])
    found = partition(
        np.ones(3), np.zeros(3, np.int32), 3, counts="free", memory=memory, memory_caps=[12.0, 4.0, 1.0], min_samples=1
    )
    assert counts_of(found.destinations, 3) == [2, 1, 0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3)), max_size=12),
    st.integers(0, 3),
    st.sampled_from(["equal", "free"]),
    st.booleans(),
    st.sampled_from(strategies()),
)
def test_every_batch_of_any_size(
    samples: list[tuple[int, int]], at_least: int, counts: str, stay: bool, strategy: str
) -> None:
    costs, homes = np.array([c for c, _ in samples], np.int64), np.array([h for _, h in samples], np.int32)
    counts = "free" if stay else counts
    found = partition(costs, homes, 4, strategy=strategy, counts=counts, min_samples=at_least, stay=stay)
    assert min(counts_of(found.destinations, 4)) >= min(at_least, len(samples) // 4)
    steps = np.arange(len(samples)) % 2
    order = np.lexsort((steps, homes))
    costs, homes, steps = costs[order], homes[order], steps[order]
    call = {"steps": steps, "num_steps": 2, "counts": counts, "min_samples": at_least, "stay": stay}
    plan = plan_round(*round_of(costs, homes, 4, **call))
    assert plan.steps is not None
    for step in range(2):
        mine = plan.steps == step
        assert min(counts_of(plan.destinations[mine], 4)) >= min(at_least, int(mine.sum()) // 4)
    assert not stay or (plan.steps == steps).all()
