from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.partitioning.slices import Slice
from trainer_client.balancing.redistribution.copies import WHOLE, FieldTable, describe_samples, measure
from trainer_client.balancing.redistribution.copying import copy


def field_table(column: list[int], unit_bytes: list[int]) -> FieldTable:
    """Fields in tensors of their own."""
    return FieldTable(
        column=np.array(column), unit_bytes=np.array(unit_bytes), leaf=np.arange(len(column)),
        position=np.arange(len(column)),
    )  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=12),
    seed=st.integers(0, 10**6),
    widths=st.tuples(st.integers(0, 5), st.integers(1, 8), st.integers(1, 3), st.integers(1, 3)),
    most=st.one_of(st.integers(1, 40), st.just(WHOLE)),
)
def test_copies_gather_samples_of_two_batches_field_by_field(
    lengths: list[tuple[int, int]], seed: int, widths: tuple[int, int, int, int], most: int
) -> None:
    """Three jagged fields, two of them of one column, and a dense one, whole and in small pieces."""
    rng = np.random.default_rng(seed)
    table = np.array(lengths, dtype=np.int64).reshape(-1, 2)
    first = np.array([0, rng.integers(0, len(table) + 1), len(table)])
    fields = field_table([0, 1, -1, 0], list(widths))
    units = np.column_stack([table, np.ones(len(table), np.int64)])[:, fields.column] * fields.unit_bytes
    data = [[rng.integers(0, 256, int(units[a:b, f].sum())).astype(np.uint8) for f in range(4)]
            for a, b in pairwise(first)]  # fmt: skip
    chosen = [rng.permutation(n)[: rng.integers(0, n + 1)] for n in np.diff(first)]
    expected = []
    for f in range(4):
        for batch, samples in enumerate(chosen):
            own = units[first[batch] : first[batch + 1], f]
            starts = np.cumsum(own) - own
            expected.append([data[batch][f][starts[i] : starts[i] + own[i]] for i in samples])
    flat = np.concatenate([np.zeros(0, np.uint8), *(part for parts in expected for part in parts)])
    sizes = np.array([sum(part.size for parts in expected[2 * f : 2 * f + 2] for part in parts) for f in range(4)])
    target = np.full(flat.size, 77, dtype=np.uint8)
    copies, job = describe_samples(
        np.concatenate(chosen), np.cumsum([0, *map(len, chosen)]), table, first, fields,
        np.array([[part.ctypes.data for part in parts] for parts in data]),
        target.ctypes.data + np.cumsum(sizes) - sizes,
        table[np.repeat(first[:-1], list(map(len, chosen))) + np.concatenate(chosen)].sum(axis=0), most=most,
    )  # fmt: skip
    copy(copies, job, None)
    np.testing.assert_array_equal(target, flat)
    for f in range(4):
        begin, count = copies.first_piece[0, f], np.diff(copies.item_begin[0])[f]
        own = copies.pieces[begin : begin + count]
        assert (own[:, 2] * widths[f] <= max(most, *widths)).all()
        assert (own[:, 2] * widths[f]).sum() == sizes[f]


def test_samples_that_stay_together_are_one_piece() -> None:
    lengths = np.full((100, 1), 3, dtype=np.int64)
    begin = np.array([0, 100])
    order = np.concatenate([np.arange(20, 60), np.arange(70, 100)])
    copies, job = describe_samples(
        order, np.array([0, 70]), lengths, begin, field_table([0, 0], [8, 4]), np.zeros((1, 2), np.int64),
        np.zeros(2, np.int64), np.array([210]), most=WHOLE,
    )  # fmt: skip
    assert job.items == 4
    assert copies.pieces[:2].tolist() == [[60, 0, 120, 0], [210, 120, 90, 0]]


@pytest.mark.parametrize(
    ("counts", "totals", "words"),
    [
        ([1, 1], [2**62, 2**62], f"has {2**62} values"),  # whose sum times four bytes wraps around to nothing
        ([1, 1], [2**40, -(2**40)], "has .* values|negative"),
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


def test_more_values_than_pieces_can_count_are_refused() -> None:
    two, one = np.arange(2), np.zeros((1, 1), np.int64)
    with pytest.raises(ValueError, match=f"has {2**31} values"):
        describe_samples(
            two, np.array([0, 2]), np.array([[2**31 - 1], [1]]), np.array([0, 2]), field_table([0], [1]),
            one, one[0], one[0], most=WHOLE,
        )  # fmt: skip
