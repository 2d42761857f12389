import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.partitioning import (
    ImpossiblePartitionError,
    Partition,
    PartitionError,
    PartitionNotFoundError,
    partition,
    strategies,
)
from tests.evenkeel.partitioning.reference import allowed_counts, assignments

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


def check(result: Partition, call: dict[str, Any]) -> None:
    costs, homes, num_ranks = call["costs"], call["homes"], call["num_ranks"]
    destinations = result.destinations
    assert destinations.dtype == np.int32
    assert destinations.shape == costs.shape
    assert ((destinations >= 0) & (destinations < num_ranks)).all()
    held = np.bincount(destinations, minlength=num_ranks)
    for count, allowed in zip(held, allowed_counts(homes.tolist(), num_ranks, call["counts"]), strict=True):
        assert count in allowed
    for loads, ranks in ((result.loads, destinations), (result.home_loads, homes)):
        assert loads.dtype == costs.dtype
        expected = np.zeros(num_ranks, costs.dtype)
        np.add.at(expected, ranks, costs)
        assert (loads == expected).all()
    times = result.loads / np.asarray(call.get("speeds", np.ones(num_ranks)))
    assert times.max() >= result.lower_bound * (1 - 1e-12)
    assert result.imbalance == (pytest.approx(times.max() / times.mean()) if times.any() else 1.0)
    moved = destinations != homes
    sizes = np.asarray(call.get("sizes", costs), np.float64)
    nodes = np.asarray(call.get("nodes", np.zeros(num_ranks)))
    assert result.moved_samples == moved.sum()
    assert result.moved_size == pytest.approx(sizes[moved].sum())
    crossing = nodes[destinations] != nodes[homes]
    assert result.moved_size_between_nodes == pytest.approx(sizes[crossing].sum())
    assert result.strategy == call["strategy"]


@settings(max_examples=400, deadline=None)
@given(calls())
def test_every_answer_is_an_assignment_within_the_constraints(call: dict[str, Any]) -> None:
    result = partition(**call)
    check(result, call)
    again = partition(**call)
    assert (again.destinations == result.destinations).all()


@settings(max_examples=150, deadline=None)
@given(calls(), st.floats(1.0, 2.5))
def test_memory_caps_are_respected_or_refused(call: dict[str, Any], room: float) -> None:
    rng = np.random.default_rng(len(call["costs"]))
    memory = rng.integers(0, 20, len(call["costs"]))
    caps = np.full(call["num_ranks"], np.ceil(memory.sum() / call["num_ranks"] * room))
    try:
        result = partition(**call, memory=memory, memory_caps=caps)
    except PartitionError:
        return
    check(result, call)
    used = np.bincount(result.destinations, weights=memory, minlength=call["num_ranks"])
    assert (used <= caps).all()


@settings(max_examples=60, deadline=None)
@given(calls(most_samples=6, most_ranks=3), st.sampled_from(STRATEGIES))
def test_the_bound_holds_for_every_assignment(call: dict[str, Any], strategy: str) -> None:
    call["strategy"] = strategy
    result = partition(**call)
    speeds = np.asarray(call.get("speeds", np.ones(call["num_ranks"])))
    best = np.inf
    for ranks in assignments(call["homes"].tolist(), call["num_ranks"], call["counts"]):
        loads = np.bincount(np.array(ranks, int), weights=call["costs"], minlength=call["num_ranks"])
        best = min(best, (loads / speeds).max())
    assert result.lower_bound <= best * (1 + 1e-12)
    assert (result.loads / speeds).max() >= best * (1 - 1e-12)


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
        ({"costs": [1.0, np.nan, 2.0]}, ["costs[1]", "nan", "finite"]),
        ({"costs": [1.0, np.inf, 2.0]}, ["costs[1]", "inf", "finite"]),
        ({"costs": [1, -2, 3]}, ["costs[1]", "-2", "0 or more"]),
        ({"costs": ["a", "b", "c"]}, ["costs", "dtype"]),
        ({"costs": [[1, 2, 3]]}, ["costs", "(1, 3)", "one-dimensional"]),
        ({"costs": [2**62, 2**62, 1]}, ["costs", "2**62", "float64"]),
        ({"homes": [0, 1]}, ["homes", "2 entries", "3"]),
        ({"homes": [0, 1, 2]}, ["homes[2]", "2", "0 to 1"]),
        ({"homes": [0, -1, 1]}, ["homes[1]", "-1"]),
        ({"homes": [0.0, 1.0, 1.0]}, ["homes", "dtype"]),
        ({"num_ranks": 0}, ["num_ranks", "0", "positive"]),
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
