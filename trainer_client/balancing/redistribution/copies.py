"""Which bytes to copy where: the fields of a batch, and the one form of work that the copy kernels understand.

A buffer holds one block per peer, in rank order; a block holds one segment per field, in field order. Segments begin
at multiples of 16 bytes, so that a segment can be read in words of any dtype. Sender and receiver compute the same
layout, the one from its lengths, the other from the totals of its slice: no sizes are exchanged.

Fields of one jagged column are cut at the same samples, so what to copy is written once for all of them, in units: rows
of a jagged field, samples of a dense one. The last column, after the jagged ones, has one unit a sample.

A description is an array of 64-bit words; a `Job` says where in it the parts are. The host copies here, a device in
`copying`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from evenkeel.partitioning.compile import ZERO, kernel
from trainer_client.balancing.batches.structure import Leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldTable:
    """F fields sorted by path, so that all ranks of one schema agree on the order.

    Attributes:
        leaf_index: (F,) int64, the tensor in which a field lies.
        before_begin: (F + 1,) int64, where each field's columns begin in `before_columns`.
        before_columns: Int64, field after field, the columns whose values precede it in its tensor.
        column: (F,) int64, its jagged column, -1 if rows are fixed.
        unit_bytes: (F,) int64, bytes of one row if jagged, of one sample if rows are fixed.
    """

    column: NDArray[np.int64]
    unit_bytes: NDArray[np.int64]
    leaf_index: NDArray[np.int64]
    before_begin: NDArray[np.int64]
    before_columns: NDArray[np.int64]

    @staticmethod
    @lru_cache(maxsize=64)
    def of(leaves: tuple[Leaf, ...], table_bytes: int = 0) -> FieldTable:
        """The fields of a batch with these leaves.

        Args:
            leaves: The leaves.
            table_bytes: Bytes of each sample's row in a table that travels as the last field and lies in a tensor after
                the leaves; 0: there is none.
        """
        found: list[tuple[str, int, tuple[int, ...], int, int]] = []
        for index, leaf in enumerate(leaves):
            if leaf.rows:
                found.append((leaf.path, index, (), -1, leaf.rows * leaf.row_bytes))
            else:
                found.extend(
                    (path, index, leaf.columns[:position], leaf.columns[position], leaf.row_bytes)
                    for position, path in enumerate(leaf.field_paths)
                )
        found.sort(key=lambda item: item[0])
        if table_bytes:
            found.append(("", len(leaves), (), -1, table_bytes))
        before = [item[2] for item in found]
        return FieldTable(
            leaf_index=np.array([item[1] for item in found], dtype=np.int64),
            before_begin=np.cumsum([0, *map(len, before)], dtype=np.int64),
            before_columns=np.array([column for columns in before for column in columns], dtype=np.int64),
            column=np.array([item[3] for item in found], dtype=np.int64),
            unit_bytes=np.array([item[4] for item in found], dtype=np.int64),
        )

    def addresses(self, tensors: Sequence[torch.Tensor], totals: NDArray[np.int64]) -> NDArray[np.int64]:
        """(F,) address of each field's first row in contiguous tensors that hold `totals` values per column."""
        return self.first_rows(np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64), totals)

    def first_rows(self, begins: NDArray[np.int64], totals: NDArray[np.int64]) -> NDArray[np.int64]:
        """The same for tensors that begin at these addresses."""
        return _first_rows(begins, totals, self.leaf_index, self.before_begin, self.before_columns, self.unit_bytes)


@kernel
def _first_rows(
    begins: NDArray[np.int64],
    totals: NDArray[np.int64],
    leaf: NDArray[np.int64],
    before_begin: NDArray[np.int64],
    before_columns: NDArray[np.int64],
    unit_bytes: NDArray[np.int64],
) -> NDArray[np.int64]:
    addresses = np.empty(leaf.size, np.int64)
    for field in range(leaf.size):
        rows = np.int64(0)
        for k in range(before_begin[field], before_begin[field + 1]):
            rows += totals[before_columns[k]]
        addresses[field] = begins[leaf[field]] + rows * unit_bytes[field]
    return addresses


Ints = NDArray[np.int64]
WHOLE = 1 << 62  # bytes: no piece is cut
MAX_UNITS = 1 << 31  # of a column: pieces count in 32 bits


class Job(NamedTuple):
    """Copies: of each field, all pieces of its column. Where is counted in words.

    Attributes:
        items: Pieces, counted once for each field.
        fields: Fields F.
        item_begin: Where (F + 1,) first items of the fields are.
        piece_begin: Where (F,) first pieces of the fields are, counted from `pieces`.
        unit_bytes: Where (F,) bytes of a unit are.
        source: Where (groups, F) addresses to copy from are, of the unit that counts as the first.
        source_stride: F, or 0 if all groups have the same.
        target: Where (groups, F) addresses to copy to are.
        target_stride: F, or 0 if all groups have the same.
        pieces: Where the pieces are: (k, 4) int32, unit to copy from, unit to copy to, units, group.
    """

    items: int
    fields: int
    item_begin: int
    piece_begin: int
    unit_bytes: int
    source: int
    source_stride: int
    target: int
    target_stride: int
    pieces: int


def describe_samples(
    samples: Ints,
    begin: Ints,
    lengths: Ints,
    first: Ints,
    fields: FieldTable,
    source: Ints,
    target: Ints,
    *,
    most: int,
) -> tuple[Ints, Job]:
    """Gathers samples of several batches, one after the other.

    Args:
        samples: (m,) samples to copy, batch after batch, each an index into its batch.
        begin: (batches + 1,) where each batch begins in `samples`.
        lengths: (n, num_jagged) lengths of all samples of all batches.
        first: (batches + 1,) where each batch begins in `lengths`.
        fields: The fields.
        source: (batches, F) address of each field's first row in each batch.
        target: (F,) address where each field goes.
        most: Bytes above which a piece is cut.

    Returns:
        The description, and the job in it.

    Raises:
        ValueError: If there are more values than pieces can count.
    """
    largest = int(lengths.sum(axis=0).max(initial=0))
    if largest >= MAX_UNITS:
        raise ValueError(f"a jagged field has {largest} values in these batches; there may be {MAX_UNITS - 1} at most")
    words, job = _describe_samples(
        samples, begin, lengths, first, fields.column, fields.unit_bytes, source, target, most
    )
    return words, Job(*job.tolist())


@kernel
def columns_of(column: Ints, num_jagged: int) -> Ints:
    """(F,) the column in which each field's units are counted: fields whose rows are fixed have the last one."""
    columns = column.copy()
    for field in range(columns.size):
        if columns[field] < 0:
            columns[field] = num_jagged
    return columns


@kernel
def units_of_pieces(columns: Ints, unit_bytes: Ints, num_columns: int, most: int) -> Ints:
    """(num_columns,) units above which a piece of each column is cut; 0 for columns without bytes."""
    units = np.zeros(num_columns, np.int64)
    for field in range(columns.size):
        units[columns[field]] = max(units[columns[field]], unit_bytes[field])
    for index in range(num_columns):
        if units[index]:
            units[index] = max(most // units[index], 1)
    return units


@kernel
def add_piece(pieces: NDArray[np.int32], count: int, source: int, target: int, units: int, group: int, cut: int) -> int:
    """Appends a range of units, in pieces of at most `cut`; returns the new number of pieces."""
    done = 0
    while done < units:
        pieces[4 * count] = source + done
        pieces[4 * count + 1] = target + done
        pieces[4 * count + 2] = min(cut, units - done)
        pieces[4 * count + 3] = group
        done += cut
        count += 1
    return count


@kernel
def add_samples(
    pieces: NDArray[np.int32], count: int, samples: Ints, starts: Ints, target: int, group: int, cut: int
) -> tuple[int, int]:
    """Appends samples of one column, neighbours here and there as one range; returns pieces, and the unit after."""
    since, until = ZERO, ZERO
    for sample in samples:
        if starts[sample] != until:
            count = add_piece(pieces, count, since, target, until - since, group, cut)
            target += until - since
            since = starts[sample]
        until = starts[sample + 1]
    count = add_piece(pieces, count, since, target, until - since, group, cut)
    return count, target + until - since


@kernel
def write_starts(lengths: Ints, index: int, starts: Ints) -> None:
    """Writes the (n + 1,) units of a column before each sample."""
    num_samples, num_jagged = lengths.shape
    starts[0] = 0
    for i in range(num_samples):
        starts[i + 1] = starts[i] + (lengths[i, index] if index < num_jagged else 1)


@kernel
def write_items(words: Ints, at: int, columns: Ints, unit_bytes: Ints, piece_begin: Ints) -> int:
    """Writes the first items (F + 1,) and first pieces (F,) of the fields at `at`; returns the number of items."""
    items = 0
    for field in range(columns.size):
        index = columns[field]
        words[at + field] = items
        words[at + columns.size + 1 + field] = piece_begin[index]
        if unit_bytes[field]:
            items += piece_begin[index + 1] - piece_begin[index]
    words[at + columns.size] = items
    return items


@kernel
def _describe_samples(
    samples: Ints, begin: Ints, lengths: Ints, first: Ints, column: Ints, unit_bytes: Ints, source: Ints, target: Ints,
    most: int,
) -> tuple[Ints, Ints]:  # fmt: skip
    num_fields, num_groups, num_columns = column.size, begin.size - 1, lengths.shape[1] + 1
    columns = columns_of(column, lengths.shape[1])
    cuts = units_of_pieces(columns, unit_bytes, num_columns, most)
    room = 0
    for index in range(num_columns):
        if cuts[index]:
            units = lengths.shape[0]
            if index < num_columns - 1:
                units = 0
                for i in range(lengths.shape[0]):
                    units += lengths[i, index]
            room += samples.size + num_groups + units // cuts[index]
    at_items, at_unit = ZERO, 2 * num_fields + 1
    at_source, at_target = at_unit + num_fields, at_unit + num_fields * (num_groups + 1)
    at_pieces = (at_target + num_fields + 1) & -2
    words = np.empty(at_pieces + 2 * room, np.int64)
    pieces = words[at_pieces:].view(np.int32)
    for field in range(num_fields):
        words[at_unit + field] = unit_bytes[field]
        words[at_target + field] = target[field]
        for group in range(num_groups):
            words[at_source + group * num_fields + field] = source[group, field]

    count = ZERO
    piece_begin = np.zeros(num_columns + 1, np.int64)
    for index in range(num_columns):
        if cuts[index]:
            landing = ZERO
            for group in range(num_groups):
                starts = np.empty(first[group + 1] - first[group] + 1, np.int64)
                write_starts(lengths[first[group] : first[group + 1]], index, starts)
                own = samples[begin[group] : begin[group + 1]]
                count, landing = add_samples(pieces, count, own, starts, landing, group, cuts[index])
        piece_begin[index + 1] = count
    items = write_items(words, at_items, columns, unit_bytes, piece_begin)
    job = np.array([items, num_fields, at_items, at_items + num_fields + 1, at_unit, at_source, num_fields, at_target,
                    0, at_pieces])  # fmt: skip
    return words[: at_pieces + 2 * count], job


@intrinsic
def _copy_bytes(_context: Any, target: Any, source: Any, size: Any) -> Any:  # noqa: ARG001 - read by the signature
    """`memcpy` on plain addresses: index operations of torch cost an order of magnitude more for short rows."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        byte_pointer = ir.IntType(8).as_pointer()
        to, since = (builder.inttoptr(address, byte_pointer) for address in args[:2])
        cgutils.raw_memcpy(builder, to, since, args[2], 1)  # type: ignore[no-untyped-call]
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@kernel
def _copy(words: NDArray[np.int64], halves: NDArray[np.int32], job: NDArray[np.int64]) -> None:
    _, num_fields, item_begin, piece_begin, unit_bytes, source, source_stride, target, target_stride, pieces = job
    for field in range(num_fields):
        unit = words[unit_bytes + field]
        place = 2 * pieces + 4 * words[piece_begin + field]
        for _ in range(words[item_begin + field + 1] - words[item_begin + field]):
            since, to, units, group = halves[place], halves[place + 1], halves[place + 2], halves[place + 3]
            place += 4
            _copy_bytes(  # type: ignore[call-arg]
                words[target + group * target_stride + field] + to * unit,
                words[source + group * source_stride + field] + since * unit,
                units * unit,
            )


def copy_on_host(words: NDArray[np.int64], job: Job) -> None:
    """Copies; the GIL is released meanwhile. The caller keeps the memory of all addresses alive."""
    _copy(words, words.view(np.int32), np.array(job, dtype=np.int64))
