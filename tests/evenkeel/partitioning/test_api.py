import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from evenkeel.partitioning import (
    ImpossiblePartitionError,
    PartitionError,
    PartitionNotFoundError,
    partition,
    strategies,
)
from evenkeel.partitioning.problem import MAX_RANKS

STRATEGIES = ("karmarkar_karp", "lpt", "minimal_move", "plain")


@st.composite
def calls(draw: st.DrawFn, most_samples: int = 40, most_ranks: int = 7) -> dict[str, Any]:
    """Arguments of every kind: integer and float costs, homes anywhere, with and without each option."""
    num_ranks = draw(st.integers(1, most_ranks))
    n = draw(st.integers(0, most_samples))
    as_float = draw(st.booleans())
    value = st.one_of(st.integers(0, 3), st.integers(0, 10**6))
    costs = np.array(draw(st.lists(value, min_size=n, max_size=n)), np.int64)
    if draw(st.booleans()):
        homes = np.arange(n) * num_ranks // max(n, 1)
    else:
        homes = np.array(draw(st.lists(st.integers(0, num_ranks - 1), min_size=n, max_size=n)), np.int64)
    call: dict[str, Any] = {
        "costs": costs * 0.37 if as_float else costs,
        "homes": homes.astype(np.int32),
        "num_ranks": num_ranks,
        "counts": draw(st.sampled_from(["equal", "free"])),
        "strategy": draw(st.sampled_from(STRATEGIES)),
    }
    if draw(st.booleans()):
        call["sizes"] = np.array(draw(st.lists(st.integers(0, 100), min_size=n, max_size=n)), np.int64)
    if draw(st.booleans()):
        call["speeds"] = draw(st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=num_ranks, max_size=num_ranks))
    if draw(st.booleans()):
        call["nodes"] = draw(st.lists(st.integers(0, 2), min_size=num_ranks, max_size=num_ranks))
    if draw(st.booleans()):
        call["tolerance"] = draw(st.sampled_from([0.0, 0.1]))
    return call


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
        ({"memory": [1, 2, 3]}, ["memory", "memory_caps", "both"]),
        ({"memory_caps": [1, 2]}, ["memory", "memory_caps", "both"]),
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
