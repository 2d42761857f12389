"""What is copied where: picked samples against plain indexing, and the amounts of an exchange."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.references.redistribution import gather_samples
from evenkeel.partitioning.slices import Slice, slice_plan
from tests.trainer_client.random_batches import Case, assert_same, cases
from trainer_client.balancing.batches import BatchError, flatten
from trainer_client.balancing.redistribution import copying
from trainer_client.balancing.redistribution.copies import WHOLE, Amounts, FieldTable, describe_samples, measure
from trainer_client.balancing.redistribution.copying import pick


def field_table(column: list[int], unit_bytes: list[int]) -> FieldTable:
    """Fields in tensors of their own."""
    each = np.arange(len(column))
    return FieldTable(column=np.array(column), unit_bytes=np.array(unit_bytes), leaf=each, position=each)


@settings(max_examples=150, deadline=None)
@given(case=cases(), seed=st.integers(0, 2**32), most=st.one_of(st.integers(1, 40), st.just(WHOLE)))
def test_picked_samples_are_those_of_plain_indexing(case: Case, seed: int, most: int) -> None:
    """Whole and in small pieces."""
    rng = np.random.default_rng(seed)
    chosen = [np.flatnonzero(rng.random(batch.num_samples) < 0.5) for batch in case.batches]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "piece_bytes", lambda _: most)
        found = pick(case.batches, chosen)
    wanted = [(index, int(sample)) for index, samples in enumerate(chosen) for sample in samples]
    assert_same(found, gather_samples(case.batches, wanted))


def test_a_batch_on_several_devices_is_refused() -> None:
    flat = flatten({"a": torch.zeros(4), "b": torch.zeros(4)})
    spread = flat.rebuild(
        [flat.tensors[0], flat.tensors[1].to("meta")], num_samples=4, totals=flat.totals, lengths=flat.lengths
    )
    with pytest.raises(BatchError, match=r"on several devices: 'a' on cpu, 'b' on meta; move it to one"):
        pick([spread, spread], [np.array([0]), np.array([1])])


@settings(max_examples=20, deadline=None)
@given(case=cases())
def test_a_batch_that_is_wanted_whole_is_not_copied(case: Case) -> None:
    chosen = [np.zeros(0, np.int64) for _ in case.batches]
    for index, batch in enumerate(case.batches):
        if batch.num_samples:
            chosen[index] = np.arange(batch.num_samples)
            assert pick(case.batches, chosen) is batch
            return


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=20), seed=st.integers(0, 99), most=st.integers(1, 200))
def test_pieces_are_as_few_as_neighbours_and_their_size_allow(lengths: list[int], seed: int, most: int) -> None:
    rng, table = np.random.default_rng(seed), np.array(lengths, np.int64)[:, None]
    chosen = np.flatnonzero(rng.random(len(lengths)) < 0.7)
    ends, one = np.array([0, len(lengths)]), np.zeros((1, 1), np.int64)
    copies, job = describe_samples(
        chosen, np.array([0, len(chosen)]), table, ends, field_table([0], [4]), one, one[0], table[chosen].sum(axis=0),
        most=most,
    )  # fmt: skip
    whole = [table[run].sum() for run in np.split(chosen, np.flatnonzero(np.diff(chosen) > 1) + 1)]
    units = copies.pieces[: job.items, 2]
    assert (units <= max(most // 4, 1)).all()
    assert units.sum() == table[chosen].sum()
    assert job.items <= sum(-(-int(run) // max(most // 4, 1)) for run in whole)


def slices_of(case: Case) -> list[Slice]:
    lengths = np.concatenate([batch.lengths for batch in case.batches])
    return list(slice_plan(case.destinations, case.counts, lengths))


def amounts_of(case: Case, rank: int, piece: Slice) -> Amounts:
    batch = case.batches[rank]
    fields = FieldTable.of(batch.structure.leaves, 4 * batch.num_jagged)
    return measure(piece, batch.lengths, fields, len(case.batches), WHOLE)


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_senders_and_receivers_agree_on_every_block(case: Case) -> None:
    slices = slices_of(case)
    amounts = [amounts_of(case, rank, piece) for rank, piece in enumerate(slices)]
    sent = np.stack([each.sent_bytes for each in amounts])
    received = np.stack([each.received_bytes for each in amounts], axis=1)
    np.testing.assert_array_equal(sent, received)
    assert not np.diag(sent).any()
    assert not (sent % 16).any()
    for rank, (own, piece, batch) in enumerate(zip(amounts, slices, case.batches, strict=True)):
        np.testing.assert_array_equal(own.order, np.argsort(piece.destinations, kind="stable"))
        for peer in range(len(case.batches)):
            chosen = own.order[own.begin[peer] : own.begin[peer + 1]]
            np.testing.assert_array_equal(chosen, np.flatnonzero(piece.destinations == peer))
            np.testing.assert_array_equal(own.sent_units[peer], [*batch.lengths[chosen].sum(axis=0), chosen.size])
        assert own.num_samples == int((case.destinations == rank).sum())
        np.testing.assert_array_equal(own.totals, piece.source_totals.sum(axis=0))


@pytest.mark.parametrize(
    ("counts", "totals", "words"),
    [
        ([1, 1], [2**62, 2**62], f"has {2**62} values"),  # whose sum times four bytes wraps around to nothing
        ([1, 1], [2**40, -(2**40)], "has .* values|negative"),
        ([1, 1], [2**31, 0], "has 2147483648 values on one rank; a batch may have 2147483647 at most"),
        ([1, -1], [3, 3], "negative number"),
    ],
)
def test_a_slice_that_announces_what_cannot_be_is_refused(counts: list[int], totals: list[int], words: str) -> None:
    piece = Slice(
        rank=0, destinations=np.zeros(0, np.int32), sources=np.array([1, 2], np.int32),
        source_counts=np.array(counts, np.int32), source_totals=np.array(totals).reshape(2, 1),
    )  # fmt: skip
    with pytest.raises(ValueError, match=words):
        measure(piece, np.zeros((0, 1), np.int64), field_table([0], [4]), 3, 64)


def test_a_slice_that_keeps_more_than_it_announces_is_refused() -> None:
    piece = Slice(
        rank=0, destinations=np.array([0, 1], np.int32), sources=np.zeros(0, np.int32),
        source_counts=np.zeros(0, np.int32), source_totals=np.zeros((0, 0), np.int64),
    )  # fmt: skip
    with pytest.raises(ValueError, match="keeps 1 samples on rank 0, but announces 0"):
        measure(piece, np.zeros((2, 0), np.int64), FieldTable.of(()), 2, WHOLE)


def test_more_values_than_pieces_can_count_are_refused() -> None:
    two, one = np.arange(2), np.zeros((1, 1), np.int64)
    with pytest.raises(ValueError, match=f"has {2**31} values"):
        describe_samples(
            two, np.array([0, 2]), np.array([[2**31 - 1], [1]]), np.array([0, 2]), field_table([0], [1]),
            one, one[0], one[0], most=WHOLE,
        )  # fmt: skip
