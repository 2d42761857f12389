from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.partitioning import slice_plan
from evenkeel.partitioning.slices import Slice, slices_of


@settings(max_examples=150)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=6),
    st.integers(0, 4),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([np.int64, np.int32, np.uint32]),
    st.integers(0, 10**6),
    st.booleans(),
)
def test_slices_say_what_each_rank_sends_and_receives(
    counts: list[int], fields: int, batches: int | None, dtype: type, seed: int, plainly: bool
) -> None:
    rng = np.random.default_rng(seed)
    n, num_ranks = sum(counts), len(counts)
    destinations = rng.integers(0, num_ranks, n).astype(np.int32)
    steps = None if batches is None else rng.integers(0, batches, n).astype(np.int32)
    lengths = rng.integers(0, 2**40 if dtype is np.int64 else 2**31, (n, fields)).astype(dtype)
    homes = np.repeat(np.arange(num_ranks), counts)
    if plainly:
        slices = slices_of(destinations, np.array(counts), lengths, steps, batches or 1, compiled=False)
    else:
        slices = slice_plan(destinations, counts, lengths, steps, batches or 1)
    assert len(slices) == num_ranks
    for rank in range(num_ranks):
        assert len(slices.batches_of(rank)) == slices.num_batches == (batches or 1)
        for batch, part in enumerate(slices.batches_of(rank)):
            trained = np.ones(n, np.bool_) if steps is None else steps == batch
            assert part.rank == rank
            assert part.destinations.tolist() == destinations[trained & (homes == rank)].tolist()
            received = trained & (destinations == rank)
            assert part.sources.tolist() == sorted(set(homes[received].tolist()))
            assert part.source_totals.shape == (part.sources.size, fields)
            for source, count, totals in zip(part.sources, part.source_counts, part.source_totals, strict=True):
                pair = received & (homes == source)
                assert count == pair.sum()
                assert totals.tolist() == lengths[pair].astype(np.int64).sum(axis=0).tolist()
    staying = slice_plan(homes, counts, lengths)
    for rank in range(num_ranks):
        for planned, known in zip(
            astuple(staying[rank]), astuple(Slice.staying(rank, lengths[homes == rank])), strict=True
        ):
            assert np.array_equal(planned, known)
    for rank in (-1, num_ranks):
        with pytest.raises(IndexError):
            staying[rank]


@pytest.mark.parametrize(
    ("destinations", "counts", "lengths", "words"),
    [
        ([0, 2], [1, 1], [[1], [1]], r"destinations\[1\] is 2"),
        ([0, 1], [1, 2], [[1], [1]], "counts_at_home add up to 3"),
        ([0, 1], [2, -1], [[1], [1]], r"counts_at_home\[1\] is -1"),
        ([0, 1], [1, 1], [1, 1], r"lengths has .* shape \(2,\)"),
        ([0, 1], [2**62] * 4 + [2], [[1], [1]], "counts_at_home.0. is 4611686018427387904; pass numbers from 0 to 2"),
        ([0.0, 1.5], [1, 1], [[1], [1]], "destinations has dtype float64"),
    ],
)
def test_wrong_plans_are_refused(destinations: list[float], counts: Any, lengths: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        slice_plan(destinations, counts, lengths)


def test_batches_without_the_batch_of_each_sample_are_refused() -> None:
    for steps, count, words in (
        (None, 2, "num_steps is 2, and steps are none"),
        ([0], 0, "num_steps is 0, and steps are given"),
        ([2], 2, r"steps\[0\] is 2; pass numbers from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=words):
            slice_plan([0], [1], [[1]], steps, count)
