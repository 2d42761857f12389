import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.partitioning import (
    ImpossiblePartitionError,
    PartitionError,
    PartitionNotFoundError,
    partition,
    strategies,
)
from evenkeel.partitioning.problem import BITS, MAX_RANKS, exponent_for, whole_units

STRATEGIES = ("karmarkar_karp", "lpt", "minimal_move", "plain")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_ordinary_edges(strategy: str, dtype: type) -> None:
    nothing = partition(np.zeros(0, dtype), [], 4, strategy=strategy)
    assert nothing.imbalance == nothing.home_imbalance == 1.0
    assert nothing.loads.tolist() == [0] * 4
    zeros = partition(np.zeros(5, dtype), [0, 0, 1, 3, 3], 4, strategy=strategy)
    assert zeros.imbalance == 1.0
    assert np.bincount(zeros.destinations, minlength=4).max() == 2
    few = partition(np.array([3, 4], dtype), [2, 2], 4, strategy=strategy)
    assert sorted(few.loads.tolist()) == [0, 0, 3, 4]
    alone = partition(np.array([3, 4], dtype), [0, 0], 1, strategy=strategy)
    assert alone.destinations.tolist() == [0, 0]
    assert alone.imbalance == 1.0


def test_integers_stay_exact_beyond_doubles() -> None:
    big = 2**59
    result = partition(np.array([big + 1, big, big, big]), [0, 0, 1, 1], 2, tolerance=0.0)
    assert sorted(result.loads.tolist()) == [2 * big, 2 * big + 1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"costs": [1.0, np.nan, 2.0]}, ["costs[1]", "nan", "0 to 1e+300"]),
        ({"costs": [1.0, np.inf, 2.0]}, ["costs[1]", "inf", "0 to 1e+300"]),
        ({"costs": [1, -2, 3]}, ["costs[1]", "-2", "0 to"]),
        ({"costs": ["a", "b", "c"]}, ["costs", "dtype"]),
        ({"costs": [[1, 2, 3]]}, ["costs", "(1, 3)", "one-dimensional"]),
        ({"costs": [2**62, 2**62, 1]}, ["costs add up to", "4.61169e+18"]),
        ({"homes": [0, 1]}, ["homes", "2 entries", "3"]),
        ({"homes": [0, 1, 2]}, ["homes[2]", "2", "0 to 1"]),
        ({"homes": [0, -1, 1]}, ["homes[1]", "-1"]),
        ({"homes": [0.0, 1.0, 1.0]}, ["homes", "dtype"]),
        ({"costs": np.broadcast_to(1, 2**31)}, ["costs has 2147483648 entries; pass at most 2147483647"]),
        ({"num_ranks": 0}, ["num_ranks", "0", "positive"]),
        ({"num_ranks": np.array([4.0])}, ["num_ranks is array([4.])", "positive"]),
        ({"sizes": [1, -1, 2]}, ["sizes[1]"]),
        ({"counts": "some"}, ["counts", "'some'", "'equal'", "'free'"]),
        ({"tolerance": -1.0}, ["tolerance", "-1.0"]),
        ({"tolerance": float("nan")}, ["tolerance"]),
        ({"speeds": [1.0, 0.0]}, ["speeds[1]", "1e-06 to 1e+06"]),
        ({"speeds": [1.0]}, ["speeds", "1 entries", "2"]),
        ({"memory": [1, 2, 3]}, ["memory is given without memory_caps", "both"]),
        ({"memory_caps": [1, 2]}, ["memory_caps is given without memory;", "both"]),
        ({"memory": [1, 2, np.nan], "memory_caps": [9, 9]}, ["memory[2]"]),
        ({"nodes": [0, -1]}, ["nodes[1]"]),
        ({"strategy": "best"}, ["strategy", "'best'", "karmarkar_karp, lpt, minimal_move, plain"]),
        ({"min_samples": -1}, ["min_samples is -1", "0 or more"]),
        ({"num_ranks": 10**12}, ["num_ranks is 1000000000000", f"positive integer up to {MAX_RANKS}"]),
        ({"tolerance": 1.5}, ["tolerance is 1.5; pass a number from 0 to 1"]),
        ({"speeds": [1, 1e-7]}, ["speeds[1] is 1e-07; pass numbers from 1e-06 to 1e+06"]),
        ({"speeds": [float("inf"), 1]}, ["speeds[0] is inf"]),
        ({"speeds": [1, float("nan")]}, ["speeds[1] is nan"]),
        ({"costs": [1e300, 1e300, 0]}, ["costs add up to 2e+300; scale them"]),
        ({"costs": [1e308, 1e308, 0]}, ["costs[0] is 1e+308"]),
        ({"sizes": [1e300, 9e299, 0]}, ["sizes add up to 1.9e+300"]),
        ({"memory": [1e300, 1e300, 0], "memory_caps": [np.inf, 1]}, ["memory add up to 2e+300"]),
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


def test_strategies_are_listed() -> None:
    assert strategies() == STRATEGIES


def test_the_lightest_are_taken_for_ranks_with_too_few_and_nothing_else_moves() -> None:
    found = partition([5, 1, 7, 2], [0] * 4, 3, counts="free", min_samples=1, stay=True)
    assert found.destinations.tolist() == [0, 1, 0, 2]
    assert found.loads.tolist() == [12, 1, 2]
    capped = {"memory": [4.0] * 3, "memory_caps": [12.0, 4.0, 1.0]}  # which come first
    found = partition(np.ones(3), [0] * 3, 3, counts="free", min_samples=1, **capped)
    assert np.bincount(found.destinations, minlength=3).tolist() == [2, 1, 0]


FLOATS = st.lists(st.one_of(st.sampled_from([0.0, -0.0, 5e-324, 1e308]), st.floats(0, 1e308)), min_size=1, max_size=60)


@settings(max_examples=100)
@given(FLOATS)
def test_units_keep_order_and_nearly_all_of_the_value(values: list[float]) -> None:
    array = np.array(values)
    exponent = exponent_for(float(array.max()), array.size)
    units = whole_units(array, exponent)
    assert sum(units.tolist()) <= 2**BITS
    assert (np.diff(units[np.argsort(array)]) >= 0).all()
    if array.max() > 0:
        assert units.max() >= 2 ** (BITS - 8)
        assert (abs(np.ldexp(units.astype(np.float64), -exponent) - array) <= array.max() * 2.0**-52).all()


@pytest.mark.parametrize("strategy", ["karmarkar_karp", "lpt"])
@pytest.mark.parametrize("unit", [0.5, 2.0**-1000, 2.0**900])
def test_a_power_of_two_changes_nothing(strategy: str, unit: float) -> None:
    for count in range(4, 40):
        costs, homes = np.random.default_rng(count).integers(0, 10**6, count), np.arange(count) % 3
        whole, scaled = (
            partition(each, homes, 3, strategy=strategy, sizes=np.ones(count)) for each in (costs, costs * unit)
        )
        assert scaled.destinations.tolist() == whole.destinations.tolist()
        assert scaled.loads.tolist() == (whole.loads * unit).tolist()
        assert scaled.lower_bound == whole.lower_bound * unit
