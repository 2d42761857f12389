from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from evenkeel.partitioning.slices import Slice, slice_plan
from tests.trainer_client.random_batches import Case, cases
from trainer_client.balancing.redistribution.copies import WHOLE, Amounts, FieldTable, measure

ALIGNMENT = 16


def slices_of(case: Case) -> list[Slice]:
    lengths = np.concatenate([batch.lengths for batch in case.batches])
    return list(slice_plan(case.destinations, case.counts, lengths))


def amounts_of(case: Case, rank: int, piece: Slice) -> Amounts:
    batch = case.batches[rank]
    fields = FieldTable.of(batch.structure.leaves, 4 * batch.num_jagged)
    return measure(piece, batch.lengths, fields, len(case.batches), WHOLE)


@settings(max_examples=50, deadline=None)
@given(case=cases())
def test_senders_and_receivers_agree_on_every_block(case: Case) -> None:
    amounts = [amounts_of(case, rank, piece) for rank, piece in enumerate(slices_of(case))]
    sent = np.stack([each.sent_bytes for each in amounts])
    received = np.stack([each.received_bytes for each in amounts], axis=1)
    np.testing.assert_array_equal(sent, received)
    assert not np.diag(sent).any()
    assert not (sent % ALIGNMENT).any()


@settings(max_examples=50, deadline=None)
@given(case=cases())
def test_samples_are_sorted_by_destination_and_counted(case: Case) -> None:
    for rank, (piece, batch) in enumerate(zip(slices_of(case), case.batches, strict=True)):
        amounts = amounts_of(case, rank, piece)
        np.testing.assert_array_equal(amounts.order, np.argsort(piece.destinations, kind="stable"))
        for peer in range(len(case.batches)):
            chosen = amounts.order[amounts.begin[peer] : amounts.begin[peer + 1]]
            np.testing.assert_array_equal(chosen, np.flatnonzero(piece.destinations == peer))
            np.testing.assert_array_equal(amounts.sent_units[peer], [*batch.lengths[chosen].sum(axis=0), chosen.size])
        assert amounts.num_samples == int((case.destinations == rank).sum())
        np.testing.assert_array_equal(amounts.totals, piece.source_totals.sum(axis=0))


def test_slices_that_cannot_be_are_refused() -> None:
    piece = Slice(
        rank=0, destinations=np.array([0, 1], np.int32), sources=np.zeros(0, np.int32),
        source_counts=np.zeros(0, np.int32), source_totals=np.zeros((0, 0), np.int64),
    )  # fmt: skip
    many = Slice(
        rank=0, destinations=np.zeros(0, np.int32), sources=np.ones(1, np.int32), source_counts=np.ones(1, np.int32),
        source_totals=np.array([[2**31]]),
    )  # fmt: skip
    with pytest.raises(ValueError, match="has 2147483648 values on one rank; a batch may have 2147483647 at most"):
        measure(many, np.zeros((0, 1), np.int64), FieldTable.of(()), 2, WHOLE)
    with pytest.raises(ValueError, match="keeps 1 samples on rank 0, but announces 0"):
        measure(piece, np.zeros((2, 0), np.int64), FieldTable.of(()), 2, WHOLE)
