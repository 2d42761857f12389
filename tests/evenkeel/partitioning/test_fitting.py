import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.partitioning import ImpossiblePartitionError, PartitionNotFoundError, partition
from evenkeel.partitioning.memory import least_overflow
from tests.evenkeel.partitioning.reference import assignments


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 12), min_size=2, max_size=7),
    st.integers(2, 3),
    st.sampled_from(["equal", "free"]),
    st.sampled_from([1.0, 1.05, 1.2]),
    st.sampled_from(["karmarkar_karp", "lpt", "minimal_move"]),
)
def test_small_instances_are_always_decided(
    memory: list[int], num_ranks: int, counts: str, room: float, strategy: str
) -> None:
    homes = [i * num_ranks // len(memory) for i in range(len(memory))]
    caps = np.floor(sum(memory) / num_ranks * room) + np.arange(num_ranks) % 2
    overflows = [
        np.maximum(np.bincount(ranks, weights=memory, minlength=num_ranks) - caps, 0).sum()
        for ranks in assignments(homes, num_ranks, counts)
    ]
    costs = np.arange(len(memory)) + 1
    call = {"strategy": strategy, "counts": counts, "memory": memory, "memory_caps": caps}
    if min(overflows) == 0:
        result = partition(costs, homes, num_ranks, **call)
        assert (np.bincount(result.destinations, weights=memory, minlength=num_ranks) <= caps).all()
    else:
        with pytest.raises(ImpossiblePartitionError, match="raise") as error:
            partition(costs, homes, num_ranks, **call)
        assert 0 < error.value.shortfall <= min(overflows) + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(1, 3), st.integers(0, 12))
def test_least_overflow_matches_brute_force(memory: list[int], num_ranks: int, cap: int) -> None:
    values = np.sort(np.array(memory, np.int64))[::-1].copy()
    caps = np.full(num_ranks, cap)
    ranks = np.full(values.size, -1, np.int32)
    least, proven = least_overflow(
        values, caps, np.zeros(num_ranks, np.int64), np.full(num_ranks, values.size), 10**6, 2**60, ranks
    )
    assert proven
    best = min(
        np.maximum(np.bincount(choice, weights=values, minlength=num_ranks) - caps, 0).sum()
        for choice in assignments([0] * values.size, num_ranks, "free")
    )
    if best == 0:
        assert least == 0
    else:
        assert least == best
    assert np.maximum(np.bincount(ranks, weights=values, minlength=num_ranks) - caps, 0).sum() == least


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


def test_infinite_caps_bind_nobody() -> None:
    result = partition([1, 2, 3, 4], [0, 0, 1, 1], 2, memory=[5, 5, 5, 5], memory_caps=[np.inf, 15.0], counts="free")
    assert result.loads.sum() == 10


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


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0, 1e9).map(lambda x: x * 10.0 ** (-(int(x) % 19))), min_size=1, max_size=7),
    st.integers(1, 3),
    st.floats(1.0, 1.5),
)
def test_what_is_called_impossible_is_and_what_is_returned_fits(
    memory: list[float], num_ranks: int, room: float
) -> None:
    caps = np.full(num_ranks, max(sum(memory) / num_ranks * room, 1e-300))
    held = [
        np.bincount(ranks, weights=memory, minlength=num_ranks)
        for ranks in assignments([0] * len(memory), num_ranks, "free")
    ]
    try:
        result = partition(
            np.ones(len(memory)), [0] * len(memory), num_ranks, counts="free", memory=memory, memory_caps=caps
        )
    except ImpossiblePartitionError:
        assert not any((each <= caps).all() for each in held)
    except PartitionNotFoundError:
        pass
    else:
        assert (np.bincount(result.destinations, weights=memory, minlength=num_ranks) <= caps * (1 + 1e-9)).all()
