"""What is copied where: picked samples against plain indexing, and slices that cannot be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.references.redistribution import gather_samples
from evenkeel.partitioning.slices import Slice
from tests.trainer_client.random_batches import Case, assert_same, cases
from trainer_client.balancing.batches import BatchError, flatten
from trainer_client.balancing.redistribution import gathering, pick
from trainer_client.balancing.redistribution.copies import WHOLE, FieldTable
from trainer_client.balancing.redistribution.gathering import Samples, describe_samples
from trainer_client.balancing.redistribution.layout import measure

ONE_FIELD = np.array([0])
FOUR_BYTES = FieldTable(column=ONE_FIELD, unit_bytes=np.array([4]), leaf=ONE_FIELD, in_memory=ONE_FIELD)
NOWHERE = np.zeros((1, 1), np.int64)


@settings(max_examples=100, deadline=None)
@given(case=cases(), seed=st.integers(0, 2**32), most=st.one_of(st.integers(1, 40), st.just(WHOLE)))
def test_picked_samples_are_those_of_plain_indexing(case: Case, seed: int, most: int) -> None:
    """Whole and in small pieces; a batch that is wanted whole and alone is not copied."""
    rng = np.random.default_rng(seed)
    chosen = [np.flatnonzero(rng.random(batch.num_samples) < 0.5) for batch in case.batches]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "piece_bytes", lambda _: most)
        found = pick(case.batches, chosen)
    wanted = [(index, int(sample)) for index, samples in enumerate(chosen) for sample in samples]
    assert_same(found, gather_samples(case.batches, wanted))
    whole = case.batches[seed % len(case.batches)]
    if whole.num_samples:
        every = [np.arange(batch.num_samples if batch is whole else 0) for batch in case.batches]
        assert pick(case.batches, every) is whole


def test_a_batch_on_several_devices_is_refused() -> None:
    flat = flatten({"a": torch.zeros(4), "b": torch.zeros(4)})
    spread = flat.rebuild([flat.tensors[0], flat.tensors[1].to("meta")], flat.lengths)
    with pytest.raises(BatchError, match=r"on several devices: 'a' on cpu, 'b' on meta; move it to one"):
        pick([spread, spread], [np.array([0]), np.array([1])])


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=20), seed=st.integers(0, 99), most=st.integers(1, 200))
def test_pieces_are_as_few_as_neighbours_and_their_size_allow(lengths: list[int], seed: int, most: int) -> None:
    rng, table = np.random.default_rng(seed), np.array(lengths, np.int64)[:, None]
    chosen = np.flatnonzero(rng.random(len(lengths)) < 0.7)
    copies = describe_samples([Samples((), table, table.sum(0), chosen)], FOUR_BYTES, NOWHERE, NOWHERE[0], most)
    whole = [table[run].sum() for run in np.split(chosen, np.flatnonzero(np.diff(chosen) > 1) + 1)]
    units = copies.pieces[: copies.item_begin[0, -1], 2]
    assert (units <= max(most // 4, 1)).all()
    assert units.sum() == table[chosen].sum()
    assert len(units) <= sum(-(-int(run) // max(most // 4, 1)) for run in whole)


@pytest.mark.parametrize(
    ("counts", "totals", "destinations", "words"),
    [
        ([1, 1], [2**62, 2**62], [], f"has {2**62} values"),  # whose sum times four bytes wraps around to nothing
        ([1, 1], [2**40, -(2**40)], [], "has .* values|negative"),
        ([1, 1], [2**31, 0], [], "has 2147483648 values on one rank; a batch may have 2147483647 at most"),
        ([1, -1], [3, 3], [], "negative number"),
        ([1, 1], [3, 3], [0, 1], "keeps 1 samples on rank 0, but announces 0"),
    ],
)
def test_a_slice_that_announces_what_cannot_be_is_refused(
    counts: list[int], totals: list[int], destinations: list[int], words: str
) -> None:
    piece = Slice(
        rank=0, destinations=np.array(destinations, np.int32), sources=np.array([1, 2], np.int32),
        source_counts=np.array(counts, np.int32), source_totals=np.array(totals).reshape(2, 1),
    )  # fmt: skip
    with pytest.raises(ValueError, match=words):
        measure(piece, np.zeros((len(destinations), 1), np.int64), FOUR_BYTES, 3, 64)


def test_more_values_than_pieces_can_count_are_refused() -> None:
    table = np.array([[2**31 - 1], [1]])
    with pytest.raises(ValueError, match=f"has {2**31} values"):
        describe_samples([Samples((), table, table.sum(0), NOWHERE[0])], FOUR_BYTES, NOWHERE, NOWHERE[0], WHOLE)
