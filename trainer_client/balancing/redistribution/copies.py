"""Which bytes to copy where: the fields of a batch, and pieces of their columns.

Fields of one jagged column are cut at the same samples, so what to copy is written once for all of them, in units: rows
of a jagged field, samples of a dense one. The last column, after the jagged ones, has one unit a sample.

The host copies here, a device in `copying`; both read the same arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from numpy.typing import NDArray

from evenkeel.partitioning.compile import ZERO, kernel
from trainer_client.balancing.batches.structure import Leaf

Ints = NDArray[np.int64]
WHOLE = 1 << 62  # bytes: no piece is cut
MAX_UNITS = 1 << 31  # of a column: pieces count in 32 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldTable:
    """F fields sorted by path, so that all ranks of one schema agree on the order.

    Attributes:
        column: (F,) int64, its jagged column; -1, the last one, if rows are fixed.
        unit_bytes: (F,) int64, bytes of one row if jagged, of one sample if rows are fixed.
        leaf: (F,) int64, the tensor in which a field lies.
        position: (F,) int64, its position among the fields in the order in which they lie in memory.
    """

    column: Ints
    unit_bytes: Ints
    leaf: Ints
    position: Ints

    @staticmethod
    @lru_cache(maxsize=64)
    def of(leaves: tuple[Leaf, ...], table_bytes: int = 0) -> FieldTable:
        """The fields of a batch with these leaves.

        Args:
            leaves: The leaves.
            table_bytes: Bytes of each sample's row in a table that travels as the last field and lies in a tensor after
                the leaves; 0: there is none.
        """
        entries: list[tuple[str, int, int, int]] = []
        for index, leaf in enumerate(leaves):
            if leaf.rows:
                entries.append((leaf.path, -1, leaf.rows * leaf.row_bytes, index))
            for path, column in zip(leaf.field_paths, leaf.columns, strict=False):  # fixed rows have no columns
                entries.append((path, column, leaf.row_bytes, index))
        order = sorted(range(len(entries)), key=lambda position: entries[position][0])
        if table_bytes:
            order.append(len(entries))
            entries.append(("", -1, table_bytes, len(leaves)))
        table = np.array([(*entries[position][1:], position) for position in order], dtype=np.int64).reshape(-1, 4)
        columns: list[Ints] = [np.ascontiguousarray(one) for one in table.T]
        return FieldTable(column=columns[0], unit_bytes=columns[1], leaf=columns[2], position=columns[3])

    def addresses(self, tensors: Sequence[torch.Tensor], totals: Ints) -> Ints:
        """(F,) address of each field's first row in contiguous tensors that hold `totals` values per column."""
        return self.first_rows(np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64), totals)

    def first_rows(self, begins: Ints, totals: Ints) -> Ints:
        """The same for tensors that begin at these addresses."""
        return _first_rows(begins, totals, self.column, self.unit_bytes, self.leaf, self.position)


@kernel
def _first_rows(begins: Ints, totals: Ints, column: Ints, unit_bytes: Ints, leaf: Ints, position: Ints) -> Ints:
    field_at = np.empty(position.size, np.int64)
    for field in range(position.size):
        field_at[position[field]] = field
    addresses = np.empty(position.size, np.int64)
    ends = begins.copy()
    for i in range(position.size):
        field = field_at[i]
        addresses[field] = ends[leaf[field]]
        if column[field] >= 0:
            ends[leaf[field]] += totals[column[field]] * unit_bytes[field]
    return addresses


class Job(NamedTuple):
    """Copies of `Copies`: of each field, all pieces of its column.

    Attributes:
        number: Its row in `Copies.item_begin` and `Copies.first_piece`.
        items: Pieces, counted once for each field.
        source: The row of `Copies.addresses` where the first group's fields are copied from.
        source_step: 1 if each group has a row of its own, 0 if all have the same.
        target: The row where the first group's fields are copied to.
        target_step: As `source_step`.
    """

    number: int
    items: int
    source: int
    source_step: int
    target: int
    target_step: int


class Copies:
    """What some jobs copy, in arrays that lie in one piece of memory, so that one copy brings them to a device.

    Attributes:
        words: The memory, a multiple of 16 bytes.
        unit_bytes: (F,) int64, bytes of a unit of each field.
        addresses: (rows, F) int64, of the unit that counts as the first.
        item_begin: (jobs, F + 1) int64, where each field's items begin.
        first_piece: (jobs, F) int64, the first piece of each field's column.
        pieces: (k, 4) int32, unit to copy from, unit to copy to, units, group.
        begins: Where these arrays begin in `words`, in words of 8 bytes.
    """

    __slots__ = ("addresses", "begins", "first_piece", "item_begin", "pieces", "unit_bytes", "words")

    def __init__(self, words: Ints, fields: int, rows: int, jobs: int) -> None:
        rows_end = fields * (1 + rows)
        items_end = rows_end + jobs * (fields + 1)
        self.words = words
        self.begins = (0, fields, rows_end, items_end, (items_end + jobs * fields + 1) & -2)
        self.unit_bytes = words[:fields]
        self.addresses = words[fields:rows_end].reshape(rows, fields)
        self.item_begin = words[rows_end:items_end].reshape(jobs, fields + 1)
        self.first_piece = words[items_end : items_end + jobs * fields].reshape(jobs, fields)
        self.pieces = words[self.begins[-1] :].view(np.int32).reshape(-1, 4)

    @staticmethod
    def num_words(fields: int, rows: int, jobs: int, pieces: int) -> int:
        """Words that so many pieces take at most."""
        return fields * (1 + rows + 2 * jobs) + jobs + 1 + 2 * pieces & -2

    def shorten(self, pieces: int) -> None:
        """Says that there are only so many pieces, where there was room for more."""
        self.words = self.words[: self.begins[-1] + 2 * pieces]

    def copy_on_host(self, job: Job) -> None:
        """Copies; the GIL is released meanwhile. The caller keeps the memory of all addresses alive."""
        _copy(
            self.unit_bytes, self.addresses, self.item_begin[job.number], self.first_piece[job.number], self.pieces,
            job.source, job.source_step, job.target, job.target_step,
        )  # fmt: skip


# C's memcpy on plain addresses: index operations of torch cost an order of magnitude more for short rows
_memcpy: Any = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))


@kernel
def _copy(
    unit_bytes: Ints, addresses: Ints, item_begin: Ints, first_piece: Ints, pieces: NDArray[np.int32],
    source: int, source_step: int, target: int, target_step: int,
) -> None:  # fmt: skip
    for field in range(unit_bytes.size):
        unit = unit_bytes[field]
        for i in range(item_begin[field + 1] - item_begin[field]):
            piece = pieces[first_piece[field] + i]
            since = addresses[source + piece[3] * source_step, field] + piece[0] * unit
            to = addresses[target + piece[3] * target_step, field] + piece[1] * unit
            _memcpy(to, since, piece[2] * unit)


def describe_samples(
    samples: Ints,
    begin: Ints,
    lengths: Ints,
    first: Ints,
    fields: FieldTable,
    source: Ints,
    target: Ints,
    totals: Ints,
    *,
    most: int,
) -> tuple[Copies, Job]:
    """Gathers samples of several batches, one after the other.

    Args:
        samples: (m,) samples to copy, batch after batch, each an index into its batch.
        begin: (batches + 1,) where each batch begins in `samples`.
        lengths: (n, num_jagged) lengths of all samples of all batches.
        first: (batches + 1,) where each batch begins in `lengths`.
        fields: The fields.
        source: (batches, F) address of each field's first row in each batch.
        target: (F,) address where each field goes.
        totals: (num_jagged,) values of each column in the chosen samples.
        most: Bytes above which a piece is cut.

    Returns:
        What to copy, and the job that does.

    Raises:
        ValueError: If there are more values than pieces can count.
    """
    chosen = samples + np.repeat(first[:-1], np.diff(begin))
    units = np.append(totals, chosen.size)
    if (largest := max(int(units.max()), int(lengths.sum(axis=0).max(initial=0)))) >= MAX_UNITS:
        raise ValueError(f"a jagged field has {largest} values in these batches; there may be {MAX_UNITS - 1} at most")
    num_fields, num_groups = fields.column.size, begin.size - 1
    cuts = units_of_pieces(fields.column, fields.unit_bytes, units.size, most)
    copied = np.flatnonzero(cuts)
    num_pieces = (chosen.size + num_groups) * copied.size + int((units[copied] // cuts[copied]).sum())
    words = np.empty(Copies.num_words(num_fields, num_groups + 1, 1, num_pieces), np.int64)
    copies = Copies(words, num_fields, num_groups + 1, 1)
    copies.unit_bytes[:] = fields.unit_bytes
    copies.addresses[:-1], copies.addresses[-1] = source, target
    piece_begin = np.zeros(units.size + 1, np.int64)
    count = add_samples(
        copies.pieces, ZERO, chosen, begin, np.arange(num_groups), lengths, first[:-1], cuts, piece_begin, False
    )
    copies.shorten(count)
    items = write_items(fields.column, fields.unit_bytes, piece_begin, copies.item_begin[0], copies.first_piece[0])
    return copies, Job(0, items, 0, 1, num_groups, 0)


@kernel
def units_of_pieces(column: Ints, unit_bytes: Ints, num_columns: int, most: int) -> Ints:
    """(num_columns,) units above which a piece of each column is cut; 0 for columns without bytes."""
    units = np.zeros(num_columns, np.int64)
    for field in range(column.size):  # -1 is the last column
        units[column[field]] = max(units[column[field]], unit_bytes[field])
    for index in range(num_columns):
        if units[index]:
            units[index] = max(most // units[index], 1)
    return units


@kernel
def add_piece(pieces: NDArray[np.int32], count: int, source: int, target: int, units: int, group: int, cut: int) -> int:
    """Appends a range of units, in pieces of at most `cut`; returns the new number of pieces."""
    done = 0
    while done < units:
        pieces[count, 0] = source + done
        pieces[count, 1] = target + done
        pieces[count, 2] = min(cut, units - done)
        pieces[count, 3] = group
        done += cut
        count += 1
    return count


@kernel
def add_samples(
    pieces: NDArray[np.int32],
    count: int,
    samples: Ints,
    begin: Ints,
    parts: Ints,
    lengths: Ints,
    first: Ints,
    cuts: Ints,
    piece_begin: Ints,
    restart: bool,
) -> int:
    """Appends samples, of each column neighbours here and there as one range; returns the new number of pieces.

    Args:
        pieces: Where to write.
        count: Pieces so far.
        samples: Rows of `lengths`.
        begin: Part k of them is from begin[k] to begin[k + 1].
        parts: The parts that are copied, each the group of its number here; -1: none.
        lengths: (n, num_jagged).
        first: Row of `lengths` whose units come first in the memory of each part.
        cuts: Units above which a piece of each column is cut; 0: there is nothing to copy.
        piece_begin: (columns + 1,) where the first piece of each column is written.
        restart: Each group has a target of its own; else one follows the other.
    """
    num_samples, num_jagged = lengths.shape
    starts = np.zeros(num_samples + 1, np.int64)
    for index in range(cuts.size):
        piece_begin[index] = count
        if not cuts[index]:
            continue
        for i in range(num_samples):
            starts[i + 1] = starts[i] + (lengths[i, index] if index < num_jagged else 1)
        target = ZERO
        for group in range(parts.size):
            part = parts[group]
            if part < 0:
                continue
            base = starts[first[part]]
            since = until = base
            target = ZERO if restart else target
            for sample in samples[begin[part] : begin[part + 1]]:
                if starts[sample] != until:
                    count = add_piece(pieces, count, since - base, target, until - since, group, cuts[index])
                    target += until - since
                    since = starts[sample]
                until = starts[sample + 1]
            count = add_piece(pieces, count, since - base, target, until - since, group, cuts[index])
            target += until - since
    piece_begin[cuts.size] = count
    return count


@kernel
def write_items(column: Ints, unit_bytes: Ints, piece_begin: Ints, item_begin: Ints, first_piece: Ints) -> int:
    """Writes the first items (F + 1,) and first pieces (F,) of the fields; returns the number of items."""
    items = 0
    for field in range(column.size):
        index = column[field] % (piece_begin.size - 1)
        item_begin[field] = items
        first_piece[field] = piece_begin[index]
        if unit_bytes[field]:
            items += piece_begin[index + 1] - piece_begin[index]
    item_begin[column.size] = items
    return items
