"""Amounts and options at the ends of what they may be."""

from typing import Any

import numpy as np
import pytest

from evenkeel.partitioning import PartitionNotFoundError, partition, slice_plan
from evenkeel.partitioning.lpt import kept_at_home
from evenkeel.partitioning.nodes import between_nodes
from evenkeel.partitioning.problem import MAX_RANKS, MAX_SUM, Problem, make_problem, with_crowding
from tests.evenkeel.partitioning.reference import allowed_counts

STRATEGIES = ("karmarkar_karp", "lpt", "minimal_move")
ONE_SLOW = [0.1] + [1.0] * 7
EIGHT_NODES = np.arange(64) // 8


def problem(costs: Any, homes: Any, num_ranks: int, **options: Any) -> Problem:
    given: dict[str, Any] = {
        "counts": "equal",
        "tolerance": 1e-3,
        "move_price": 0.01,
        "sizes": None,
        "speeds": None,
        "nodes": None,
    }
    return make_problem(costs, homes, num_ranks, **(given | options))


EXTREMES = [
    ([7.3e8], [0], 8, {"speeds": ONE_SLOW}),
    ([7.3e8, 1e-9], [0, 7], 8, {"speeds": ONE_SLOW[::-1]}),
    ([5e-324], [3], 8, {"speeds": [1e6, 1e-6, 1, 1e-6, 1, 1, 1, 1e6]}),
    ([MAX_SUM], [1], 2, {"speeds": [1e6, 1e-6], "tolerance": 1.0}),
    ([1e9], [5], 64, {"nodes": EIGHT_NODES}),
    ([1e9, 3.0], [5, 63], 64, {"nodes": EIGHT_NODES}),
    ([2**62 - 1], [0], 4, {"speeds": [1e-6, 1, 1, 1], "tolerance": 1.0}),
    ([2**60, 2**60, 0, 0, 2**61 - 1], [0] * 5, 3, {"speeds": [1e-6, 1e6, 1], "nodes": [0, 1, 1], "tolerance": 1.0}),
    ([1.0, 1.0], [0, 1], 3, {"tolerance": 1.0, "nodes": [7, 7, 1]}),
    ([0.0], [2], 8, {"speeds": ONE_SLOW}),
]


@pytest.mark.parametrize(("costs", "homes", "num_ranks", "options"), EXTREMES)
@pytest.mark.parametrize("counts", ["equal", "free"])
def test_limits_are_loads_that_a_rank_can_have(
    costs: list[float], homes: list[int], num_ranks: int, options: dict[str, Any], counts: str
) -> None:
    """Beyond int64 a limit would wrap around to a negative one, which even a rank without samples exceeds."""
    whole = problem(costs, homes, num_ranks, counts=counts, **options)
    made = [whole, with_crowding(whole)]
    if whole.num_nodes > 1:
        made.append(between_nodes(whole, kept_at_home(whole)[0]))
    for each in made:
        assert (each.arrays.limits >= 0).all()
        assert (each.arrays.limits <= each.arrays.costs.sum()).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("costs", "homes", "num_ranks", "options"), EXTREMES)
@pytest.mark.parametrize("counts", ["equal", "free"])
def test_extreme_amounts_are_partitioned(
    costs: list[float], homes: list[int], num_ranks: int, options: dict[str, Any], counts: str, strategy: str
) -> None:
    for _ in range(20):  # what a kernel reads beyond its arrays differs from call to call
        found = partition(costs, homes, num_ranks, counts=counts, strategy=strategy, **options)
        held = np.bincount(found.destinations, minlength=num_ranks)
        assert all(n in allowed for n, allowed in zip(held, allowed_counts(homes, num_ranks, counts), strict=True))
        assert np.isfinite(found.imbalance)
        assert np.isfinite(found.lower_bound)


@pytest.mark.parametrize(
    ("costs", "options", "words"),
    [
        ([1.0], {"tolerance": 1.5}, "tolerance is 1.5; pass a share of the lower bound, 0 to 1"),
        ([1.0], {"tolerance": float("inf")}, "tolerance is inf"),
        ([1.0], {"speeds": [1, 1e-7]}, r"speeds\[1\] is 1e-07; pass numbers from 1e-06 to 1e\+06"),
        ([1.0], {"speeds": [float("inf"), 1]}, r"speeds\[0\] is inf"),
        ([1.0], {"speeds": [1, float("nan")]}, r"speeds\[1\] is nan"),
        ([1e300, 1e300], {}, r"costs add up to 2e\+300; scale them"),
        ([1e308, 1e308], {}, "costs add up to inf; scale them"),
        ([1.0, 1.0], {"sizes": [1e300, 9e299]}, r"sizes add up to 1.9e\+300"),
        ([1.0, 1.0], {"memory": [1e308, 1], "memory_caps": [np.inf, 1]}, r"memory add up to 1e\+308"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(costs: list[float], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        partition(costs, [0] * len(costs), 2, **options)


def test_more_ranks_than_anyone_has_are_refused_before_memory_is_asked_for() -> None:
    with pytest.raises(ValueError, match=f"positive integer up to {MAX_RANKS}"):
        partition([1], [0], 10**12)


def test_memory_caps_hold_to_the_last_unit() -> None:
    """While their sum is one that a float64 keeps: the cheapest exchange here exceeds the second cap by a little."""
    big = 2**50
    memory, caps = [big + 8, big, big, big], [4 * big, 2 * big]
    found = partition([10, 10, 1, 1], [0, 0, 1, 1], 2, sizes=[1, 100, 1, 100], memory=memory, memory_caps=caps)
    assert found.loads.tolist() == [11, 11]
    assert sum(memory[i] for i in range(4) if found.destinations[i] == 1) <= caps[1]


@pytest.mark.parametrize(
    ("destinations", "counts", "words"),
    [
        ([0, 1], [2**62, 2**62, 2**62, 2**62, 2], "counts_at_home.0. is 4611686018427387904; it must be 0 to 2"),
        ([0, 2**32], [1, 1], "destinations.1. is 4294967296; it must be 0 to 1"),
        ([0, 1], np.array([2**64 - 1, 3], np.uint64), "counts_at_home.0. is 18446744073709551615; it must be 0 to 2"),
        ([0.0, 1.5], [1, 1], "destinations has dtype float64"),
    ],
)
def test_plans_whose_numbers_would_wrap_around_are_refused(destinations: Any, counts: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        slice_plan(destinations, counts, np.ones((2, 1), np.int64))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("memory", "caps", "counts"),
    [
        ([0.1, 0.2, 0.3], [np.inf, 0.0], "free"),
        ([1 / 3] * 7, [np.inf, 0.1], "free"),
        ([2.6e-235, 9.4e18], [1.2e23, 0.0], "free"),
        ([0.1] * 3, [0.2, 0.1], "equal"),
        ([0.7, 0.1, 0.2], [0.8, 0.2], "equal"),
    ],
)
def test_fractions_of_memory_that_fit_are_not_called_impossible(
    memory: list[float], caps: list[float], counts: str, strategy: str
) -> None:
    """Nothing exceeds an infinite cap, whatever the sum of all units is rounded to."""
    homes = np.sort(np.arange(len(memory)) % 2)
    found = partition(np.ones(len(memory)), homes, 2, strategy=strategy, counts=counts, memory=memory, memory_caps=caps)
    used = np.bincount(found.destinations, weights=memory, minlength=2)
    assert (used <= np.array(caps) * (1 + 1e-12)).all()


def test_what_misses_a_cap_by_less_than_a_unit_is_not_called_impossible() -> None:
    with pytest.raises(PartitionNotFoundError):
        partition([1, 1], [0, 1], 2, memory=[1e-20, 1.0], memory_caps=[1e-20, 1.0])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_far_below_the_others_counts_where_a_rank_may_hold_none(strategy: str) -> None:
    options: dict[str, Any] = {"counts": "free", "memory": [1e-300, 1e290], "memory_caps": [0.0, float("inf")]}
    assert partition([1, 1], [0, 1], 2, strategy=strategy, **options).destinations.tolist() == [1, 1]
