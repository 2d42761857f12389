import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.partitioning import plan_digest, slice_plan


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=6),
    st.integers(0, 4),
    st.sampled_from([np.int64, np.int32, np.uint32]),
    st.integers(0, 10**6),
)
def test_slices_say_what_each_rank_sends_and_receives(counts: list[int], fields: int, dtype: type, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, num_ranks = sum(counts), len(counts)
    destinations = rng.integers(0, num_ranks, n).astype(np.int32)
    lengths = rng.integers(0, 2**31, (n, fields)).astype(dtype)
    homes = np.repeat(np.arange(num_ranks), counts)
    slices = slice_plan(destinations, counts, lengths)
    assert len(slices) == num_ranks
    assert [part.rank for part in slices] == list(range(num_ranks))
    for rank, part in enumerate(slices):
        assert part.destinations.tolist() == destinations[homes == rank].tolist()
        received = destinations == rank
        assert part.sources.tolist() == sorted(set(homes[received].tolist()))
        assert part.source_totals.shape == (part.sources.size, fields)
        for source, count, totals in zip(part.sources, part.source_counts, part.source_totals, strict=True):
            pair = received & (homes == source)
            assert count == pair.sum()
            assert totals.tolist() == lengths[pair].astype(np.int64).sum(axis=0).tolist()
    assert slices[-1].rank == num_ranks - 1
    with pytest.raises(IndexError):
        slices[num_ranks]


def test_slices_are_views() -> None:
    slices = slice_plan([0, 1, 1], [1, 2], [[5], [6], [7]])
    assert np.shares_memory(slices[1].source_totals, slices[1].source_totals)
    assert slices[0].destinations.base is not None
    # 3 destinations, 3 + 3 offsets, 2 pairs of (source, count, one total)
    assert slices.nbytes == 3 * 4 + 6 * 8 + 2 * (4 + 4 + 8)


def test_the_digest_is_of_the_whole_plan_and_of_no_dtype() -> None:
    digest = plan_digest([0, 1, 1], [1, 2], np.array([[5], [6], [7]], np.int64))
    assert len(digest) == 16
    assert digest == plan_digest(np.array([0, 1, 1], np.int64), [1, 2], np.array([[5], [6], [7]], np.uint32))
    assert digest != plan_digest([0, 1, 0], [1, 2], [[5], [6], [7]])
    assert digest != plan_digest([0, 1, 1], [2, 1], [[5], [6], [7]])
    assert digest != plan_digest([0, 1, 1], [1, 2], [[5], [6], [8]])
    assert plan_digest([], [0, 0], np.zeros((0, 1), np.int64)) != plan_digest([], [0, 0], np.zeros((0, 2), np.int64))
    plain = np.array([3, 2, 1], "<i8").tobytes() + np.array([0, 1, 1], "<i4").tobytes()
    plain += np.array([1, 2], "<i8").tobytes() + np.array([5, 6, 7], "<i8").tobytes()
    assert digest == hashlib.sha256(plain).digest()[:16]


@pytest.mark.parametrize(
    ("destinations", "counts", "lengths", "words"),
    [
        ([0, 2], [1, 1], [[1], [1]], r"destinations\[1\] is 2"),
        ([0, 1], [1, 2], [[1], [1]], "counts_at_home add up to 3"),
        ([0, 1], [3, -1], [[1], [1]], r"counts_at_home\[1\] is -1"),
        ([0, 1], [1, 1], [1, 1], r"lengths has shape \(2,\)"),
    ],
)
def test_wrong_plans_are_refused(destinations: list[int], counts: list[int], lengths: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        slice_plan(destinations, counts, lengths)
