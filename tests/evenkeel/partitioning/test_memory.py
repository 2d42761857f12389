"""Memory caps: kept where that can be, refused by name where it cannot, down to the last unit."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.partitioning import PartitionNotFoundError, partition
from evenkeel.partitioning.memory import least_overflow
from tests.evenkeel.partitioning.reference import assignments

STRATEGIES = ("karmarkar_karp", "lpt", "minimal_move")


@settings(max_examples=60)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(1, 3), st.integers(0, 12))
def test_least_overflow_matches_brute_force(memory: list[int], num_ranks: int, cap: int) -> None:
    values, none = np.sort(np.array(memory))[::-1].copy(), np.zeros(num_ranks, np.int64)
    ranks = np.full(values.size, -1, np.int32)
    least, proven = least_overflow(values, none + cap, none, none + values.size, 10**6, 2**60, ranks)

    def overflow(choice: Any) -> int:
        return int(np.maximum(np.bincount(choice, values, num_ranks) - cap, 0).sum())

    assert proven
    assert least == overflow(ranks) == min(map(overflow, assignments([0] * values.size, num_ranks, "free")))


@pytest.mark.parametrize("strategy", ["karmarkar_karp", "lpt", "minimal_move"])
@pytest.mark.parametrize("seed", range(8))
def test_integers_beyond_those_of_float64_that_fit_exactly_are_not_called_impossible(strategy: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    memory = rng.integers(2**56, 2**59, 6)
    ranks = np.array([0, 0, 0, 1, 1, 1])
    held = [int(sum(memory[ranks == rank].tolist())) for rank in (0, 1)]
    homes = np.roll(ranks, 2)
    found = partition(memory // 2**40, np.sort(homes), 2, strategy=strategy, memory=memory, memory_caps=held)
    assert (np.bincount(found.destinations, minlength=2) == 3).all()
    used = [sum(memory[found.destinations == rank].tolist()) for rank in (0, 1)]
    assert all(one <= cap * (1 + 1e-12) for one, cap in zip(used, held, strict=True))


@pytest.mark.parametrize("ratio", [1.05, 1.1, 1.5])
def test_tight_caps_are_met_and_the_load_is_balanced_within_them(ratio: float) -> None:
    rng = np.random.default_rng(3)
    memory = np.clip(rng.lognormal(6, 1, 16 * 64), 1, 4096).astype(np.int64)
    costs, homes = memory * memory + 1024 * memory, np.repeat(np.arange(16), 64)
    caps = np.full(16, np.floor(ratio * memory.sum() / 16))
    result = partition(costs, homes, 16, memory=memory, memory_caps=caps, sizes=memory)
    assert (np.bincount(result.destinations, weights=memory) <= caps).all()
    assert result.imbalance < 1.01


@pytest.mark.parametrize("unit", [1.0, 0.1])
@pytest.mark.parametrize("seed", range(2))
def test_fractions_that_fit_exactly_are_not_called_impossible(seed: int, unit: float) -> None:
    rng = np.random.default_rng(seed)
    memory = rng.lognormal(0, 2.5, 60_000) * unit
    homes = np.sort(rng.integers(0, 4, memory.size)).astype(np.int32)
    caps = np.bincount(homes, weights=memory)  # as the samples lie now, nobody has any room left
    try:
        result = partition(memory, homes, 4, counts="free", memory=memory, memory_caps=caps, strategy="lpt")
    except PartitionNotFoundError:
        return  # honest; that there is none would not be
    assert (np.bincount(result.destinations, weights=memory) <= caps * (1 + 1e-9)).all()


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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_far_below_the_others_counts_where_a_rank_may_hold_none(strategy: str) -> None:
    options: dict[str, Any] = {"counts": "free", "memory": [1e-300, 1e290], "memory_caps": [0.0, float("inf")]}
    assert partition([1, 1], [0, 1], 2, strategy=strategy, **options).destinations.tolist() == [1, 1]
