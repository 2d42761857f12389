"""What `partition` refuses, by name, and how it keeps memory caps, down to the last unit."""

import pickle
from typing import Any

import numpy as np
import pytest

from evenkeel.partitioning import ImpossiblePartitionError, PartitionError, PartitionNotFoundError, partition
from evenkeel.partitioning.problem import MAX_RANKS
from evenkeel.partitioning.rounds import Figures


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"costs": [1.0, np.nan, 2.0]}, ["costs[1]", "nan", "0 to 1e+300"]),
        ({"costs": [1, -2, 3]}, ["costs[1]", "-2", "0 to"]),
        ({"costs": ["a", "b", "c"]}, ["costs", "dtype"]),
        ({"costs": [[1, 2, 3]]}, ["costs", "(1, 3)", "one-dimensional"]),
        ({"costs": [2**61, 2**61, 0]}, ["costs add up to", "4.61169e+18"]),
        ({"homes": [0, 1]}, ["homes", "2 entries", "3"]),
        ({"homes": [0, 1, 2]}, ["homes[2]", "2", "0 to 1"]),
        ({"homes": [0.0, 1.0, 1.0]}, ["homes", "dtype"]),
        ({"costs": np.broadcast_to(1, 2**31)}, ["costs has 2147483648 entries; pass at most 2147483647"]),
        ({"num_ranks": np.array([4.0])}, ["num_ranks is array([4.])", "positive"]),
        ({"sizes": [1, -1, 2]}, ["sizes[1]"]),
        ({"counts": "some"}, ["counts", "'some'", "'equal'", "'free'"]),
        ({"tolerance": -1.0}, ["tolerance", "-1.0"]),
        ({"speeds": [1.0]}, ["speeds", "1 entries", "2"]),
        ({"memory": [1, 2, 3]}, ["memory is given without memory_caps", "both"]),
        ({"memory_caps": [1, 2]}, ["memory_caps is given without memory;", "both"]),
        ({"memory": [1, 2, np.nan], "memory_caps": [9, 9]}, ["memory[2]"]),
        ({"nodes": [0, -1]}, ["nodes[1]"]),
        ({"strategy": "best"}, ["strategy", "'best'", "karmarkar_karp, lpt, minimal_move, plain"]),
        ({"min_samples": -1}, ["min_samples is -1", "0 or more"]),
        ({"num_ranks": 10**12}, ["num_ranks is 1000000000000", f"positive integer up to {MAX_RANKS}"]),
        ({"speeds": [1, 1e-7]}, ["speeds[1] is 1e-07; pass numbers from 1e-06 to 1e+06"]),
        ({"costs": [1e300, 1e300, 0]}, ["costs add up to 2e+300; scale them"]),
        ({"sizes": [1e300, 9e299, 0]}, ["sizes add up to 1.9e+300"]),
    ],
)
def test_wrong_arguments_are_named_with_their_remedy(change: dict[str, Any], words: list[str]) -> None:
    call: dict[str, Any] = {"costs": [1, 2, 3], "homes": [0, 1, 1], "num_ranks": 2, **change}
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words are checked below
        partition(call.pop("costs"), call.pop("homes"), call.pop("num_ranks"), **call)
    for word in words:
        assert word in str(error.value)


def test_what_cannot_fit_is_told_with_the_shortfall() -> None:
    with pytest.raises(ImpossiblePartitionError, match="12 short") as error:
        partition([1, 1, 1], [0, 0, 1], 2, memory=[10, 10, 12], memory_caps=[10, 10])
    assert error.value.shortfall == 12
    with pytest.raises(ImpossiblePartitionError, match=r"memory\[1\] is 12") as error:
        partition([1, 1], [0, 1], 2, memory=[1, 12], memory_caps=[10, 10])
    assert error.value.shortfall == 2
    assert pickle.loads(pickle.dumps(error.value)).shortfall == 2
    assert issubclass(PartitionNotFoundError, PartitionError)
    assert issubclass(PartitionError, ValueError)


def test_the_lightest_are_taken_for_ranks_with_too_few_and_nothing_else_moves() -> None:
    found = partition([5, 1, 7, 2], [0] * 4, 3, counts="free", min_samples=1, stay=True)
    assert found.destinations.tolist() == [0, 1, 0, 2]
    assert found.loads.tolist() == [12, 1, 2]
    capped = {"memory": [4.0] * 6, "memory_caps": [24.0, 4.0, 1.0]}  # which come first
    found = partition(np.ones(6), [0] * 6, 3, counts="free", min_samples=2, stay=True, **capped)
    assert np.bincount(found.destinations, minlength=3).tolist() == [5, 1, 0]


def test_memory_caps_hold_to_the_last_unit() -> None:
    """While their sum is one that a float64 keeps: the cheapest exchange here exceeds the second cap by a little."""
    big = 2**50
    memory, caps = [big + 8, big, big, big], [4 * big, 2 * big]
    found = partition([10, 10, 1, 1], [0, 0, 1, 1], 2, sizes=[1, 100, 1, 100], memory=memory, memory_caps=caps)
    assert found.loads.tolist() == [11, 11]
    assert sum(memory[i] for i in range(4) if found.destinations[i] == 1) <= caps[1]


def test_what_misses_a_cap_by_less_than_a_unit_is_not_called_impossible() -> None:
    with pytest.raises(PartitionNotFoundError):
        partition([1, 1], [0, 1], 2, memory=[1e-20, 1.0], memory_caps=[1e-20, 1.0])


def test_imbalance_at_the_bound_is_less_by_as_much_as_the_load() -> None:
    counted = dict.fromkeys(("samples", "moved_samples", "size", "moved_size", "moved_size_between_nodes"), 0)
    for loads, bound, expected in (([10.0, 2.0, 8.0], 8.0, 1.2), ([0.0, 0.0], 0.0, 1.0)):
        figures = Figures.of(np.array(loads), np.array(loads), None, lower_bound=bound, **counted)
        assert figures.imbalance_bound == pytest.approx(expected)
