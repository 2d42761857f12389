"""Which bytes to copy where: the fields of a batch, pieces of their columns, and what a rank copies for one exchange.

Fields of one jagged column are cut at the same samples, so what to copy is written once for all of them, in units: rows
of a jagged field, samples of a dense one. The last column, after the jagged ones, has one unit a sample.

The send and receive buffers hold one block per peer, in rank order; a block holds one segment per field, in field
order. Segments begin at multiples of 16 bytes, so that they can be read in words of any dtype. Sender and receiver
compute the same layout, the one from its lengths, the other from the totals of its slice: no sizes are exchanged.

A training step launches the redistribution between its own kernels, so the host's time counts: all arithmetic on
samples, fields and peers is compiled. Host and device read the same arrays, in `copying`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from evenkeel.partitioning.compile import ZERO, kernel
from evenkeel.partitioning.slices import Slice
from trainer_client.balancing.batches.kinds import Leaf

Ints = NDArray[np.int64]
WHOLE = 1 << 62  # bytes: no piece is cut
MAX_UNITS = 1 << 31  # of a column: pieces count in 32 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldTable:
    """F fields sorted by path, so that all ranks of one schema agree on the order; (F,) int64 each."""

    column: Ints  # its jagged column; -1, the last one, if rows are fixed
    unit_bytes: Ints  # bytes of one row if jagged, of one sample if rows are fixed
    leaf: Ints  # the tensor in which a field lies
    position: Ints  # among the fields in the order in which they lie in memory

    @staticmethod
    @lru_cache(maxsize=64)
    def of(leaves: tuple[Leaf, ...], table_bytes: int = 0) -> FieldTable:
        """The fields of a batch with these leaves.

        With `table_bytes` a table with so many bytes for each sample travels as the last field, and lies in a tensor
        after the leaves.
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
        begins = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
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
    """What one launch copies: of each field, all pieces of its column."""

    number: int  # its row in `Copies.item_begin` and `Copies.first_piece`
    items: int  # pieces, counted once for each field
    source: int  # the row of `Copies.addresses` where the first group's fields are copied from
    source_step: int  # 1 if each group has a row of its own, 0 if all have the same
    target: int  # the row where the first group's fields are copied to
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
    """Gathers (m,) samples of several batches, one after the other, in pieces of at most `most` bytes.

    A sample is an index into its batch; batch b has `samples[begin[b] : begin[b + 1]]`, and of all batches' (n,
    num_jagged) lengths `lengths[first[b] : first[b + 1]]`. (batches, F) `source` and (F,) `target` are addresses of the
    fields' first rows, (num_jagged,) `totals` the values of the chosen samples.
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

    Part k is `samples[begin[k] : begin[k + 1]]`, rows of `lengths`; `parts` are those copied, each the group of its
    number here (-1: none); `first` the row of `lengths` whose units come first in the memory of each part. With
    `restart` each group has a target of its own, else one follows the other.
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


# ---------------------------------------------------------------------------------- of an exchange


class Amounts(NamedTuple):
    """How much a rank sends, keeps and receives; C counts the jagged columns and, last, the samples."""

    order: Ints  # (n,) own samples sorted by (destination, index)
    begin: Ints  # (ranks + 1,) where each destination's samples begin in `order`
    peers: Ints  # destinations that get samples, ascending
    sent_units: Ints  # (ranks, C) units of each column for each destination
    source_units: Ints  # (sources, C) units of each column from each source
    sent_bytes: Ints  # (ranks,) for each destination, padding included; 0 for the rank itself
    received_bytes: Ints  # (ranks,) from each source; 0 for the rank itself
    kept_bytes: int  # of the samples that stay
    units: Ints  # (C,) units of each column of all samples that the rank trains
    num_pieces: int  # of all copies at most
    staying: int  # samples that the slice announces from the rank itself
    largest: int  # number of units in a column, or what is out of bounds

    @property
    def num_samples(self) -> int:
        """Samples that the rank trains."""
        return int(self.units[-1])

    @property
    def totals(self) -> Ints:
        """(num_jagged,) values per jagged column that the rank trains."""
        return self.units[:-1]


def measure(piece: Slice, lengths: Ints, fields: FieldTable, world_size: int, most: int) -> Amounts:
    """The sizes of all buffers, of a rank whose own samples have (n, num_jagged) `lengths`; refuses wrong slices."""
    amounts = Amounts(*_measure(
        piece.destinations, int(piece.rank), world_size, piece.sources, piece.source_counts, piece.source_totals,
        lengths, fields.column, fields.unit_bytes, most,
    ))  # fmt: skip
    if amounts.largest < 0:
        raise ValueError("the slice announces a negative number of samples or values")
    if amounts.largest >= MAX_UNITS:
        raise ValueError(
            f"a jagged field has {amounts.largest} values on one rank; a batch may have {MAX_UNITS - 1} at most"
        )
    kept = int(amounts.begin[piece.rank + 1] - amounts.begin[piece.rank])
    if amounts.staying != kept:
        raise ValueError(
            f"the slice keeps {kept} samples on rank {piece.rank}, but announces {amounts.staying} from it"
        )
    return amounts


def num_words(amounts: Amounts, fields: FieldTable) -> int:
    """Words that the description of an exchange takes at most."""
    rows = 2 + amounts.peers.size + len(amounts.source_units)
    return Copies.num_words(fields.column.size, rows, 3, amounts.num_pieces)


def describe(
    words: Ints,
    amounts: Amounts,
    piece: Slice,
    lengths: Ints,
    fields: FieldTable,
    addresses: tuple[Ints, Ints, int, int],
    *,
    most: int,
    join: bool,
) -> tuple[Copies, Job, Job, Job]:
    """Writes into `words` what to copy: jobs that pack what is sent, copy what stays, and unpack what is received.

    `addresses` are (F,) those of the batch's fields, (F,) those of the result's, of the send and of the receive buffer.
    With `join`, what stays is copied by the first job, and the second has nothing to do.
    """
    # the rows of addresses: here, there, of what goes to each peer, of what comes from each source
    here, there, sent, received = addresses
    num_peers, num_sources = amounts.peers.size, piece.sources.size
    copies = Copies(words, fields.column.size, 2 + num_peers + num_sources, 3)
    copies.addresses[0], copies.addresses[1] = here, there
    items, count = _describe(
        copies.unit_bytes, copies.addresses, copies.item_begin, copies.first_piece, copies.pieces, amounts.order,
        amounts.begin, amounts.peers, amounts.sent_units, amounts.source_units, int(piece.rank), piece.sources, lengths,
        fields.column, fields.unit_bytes, sent, received, most, join,
    )  # fmt: skip
    copies.shorten(count)
    pack, keep, unpack = items.tolist()
    return copies, Job(0, pack, 0, 0, 2, 1), Job(1, keep, 0, 0, 2, 1), Job(2, unpack, 2 + num_peers, 1, 1, 0)


@kernel
def _measure(
    destinations: NDArray[np.int32],
    rank: int,
    world_size: int,
    sources: NDArray[np.int32],
    source_counts: NDArray[np.int32],
    source_totals: Ints,
    lengths: Ints,
    column: Ints,
    unit_bytes: Ints,
    most: int,
) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints, Ints, int, Ints, int, int, int]:
    # The fields of `Amounts`; a plain tuple, since Numba takes 6 µs to hand over one with names.
    num_own, num_jagged = lengths.shape
    num_fields, num_columns = column.size, num_jagged + 1
    begin = np.zeros(world_size + 1, np.int64)
    sent_units = np.zeros((world_size, num_columns), np.int64)
    for i in range(num_own):
        peer = destinations[i]
        begin[peer + 1] += 1
        for jagged in range(num_jagged):
            sent_units[peer, jagged] += lengths[i, jagged]
    peers = np.flatnonzero(begin[1:])
    for peer in range(world_size):
        sent_units[peer, num_jagged] = begin[peer + 1]
        begin[peer + 1] += begin[peer]
    position = begin[:-1].copy()
    order = np.empty(num_own, np.int64)
    for i in range(num_own):
        peer = destinations[i]
        order[position[peer]] = i
        position[peer] += 1

    source_units = np.empty((sources.size, num_columns), np.int64)
    units = np.zeros(num_columns, np.int64)
    staying, largest = 0, ZERO
    for k in range(sources.size):
        for index in range(num_columns):
            amount = int(source_totals[k, index] if index < num_jagged else source_counts[k])
            if not 0 <= amount < MAX_UNITS:  # the sums below could wrap around
                largest = amount
                amount = ZERO
            source_units[k, index] = amount
            units[index] += amount
        staying += source_counts[k] if sources[k] == rank else 0

    sent, received = np.zeros(world_size, np.int64), np.zeros(world_size, np.int64)
    for field in range(num_fields):
        for peer in range(world_size):
            sent[peer] += (sent_units[peer, column[field]] * unit_bytes[field] + 15) & -16
        for k in range(sources.size):
            received[sources[k]] += (source_units[k, column[field]] * unit_bytes[field] + 15) & -16
    kept = sent[rank]
    sent[rank] = received[rank] = 0

    cuts = units_of_pieces(column, unit_bytes, num_columns, most)
    num_pieces = 0
    for index in range(num_columns):
        if cuts[index]:
            copied = units[index]
            for peer in range(world_size):
                copied += sent_units[peer, index]
            num_pieces += num_own + peers.size + sources.size + copied // cuts[index]
    if largest == 0:
        for index in range(num_columns):
            total = ZERO
            for peer in range(world_size):
                total += sent_units[peer, index]
            largest = max(largest, units[index], total)
    return order, begin, peers, sent_units, source_units, sent, received, kept, units, num_pieces, staying, largest


@kernel
def _describe(
    copied_bytes: Ints,
    addresses: Ints,
    item_begin: Ints,
    first_piece: Ints,
    pieces: NDArray[np.int32],
    order: Ints,
    begin: Ints,
    peers: Ints,
    sent_units: Ints,
    source_units: Ints,
    rank: int,
    sources: NDArray[np.int32],
    lengths: Ints,
    column: Ints,
    unit_bytes: Ints,
    sent: int,
    received: int,
    most: int,
    join: bool,
) -> tuple[Ints, int]:
    num_fields, num_columns = column.size, sent_units.shape[1]
    cuts = units_of_pieces(column, unit_bytes, num_columns, most)
    copied_bytes[:] = unit_bytes

    # Where each segment is; what stays lies between what comes from ranks before and behind this one.
    staying = np.zeros(num_columns, np.int64)
    cursor = received
    for k in range(sources.size):
        if sources[k] < rank:
            staying += source_units[k]
        elif sources[k] == rank:
            continue
        for field in range(num_fields):
            addresses[2 + peers.size + k, field] = cursor
            cursor += (source_units[k, column[field]] * unit_bytes[field] + 15) & -16
    cursor = sent
    for group in range(peers.size):
        for field in range(num_fields):
            if peers[group] == rank:
                addresses[2 + group, field] = addresses[1, field] + staying[column[field]] * unit_bytes[field]
            else:
                addresses[2 + group, field] = cursor
                cursor += (sent_units[peers[group], column[field]] * unit_bytes[field] + 15) & -16

    items = np.zeros(3, np.int64)
    piece_begin = np.zeros(num_columns + 1, np.int64)
    first = np.zeros(begin.size, np.int64)
    count = ZERO
    for step in range(2):  # what is sent, with what stays if that is joined; then what stays alone
        groups = np.full(peers.size, -1)
        for group in range(peers.size):
            if join or (peers[group] == rank) == (step == 1):
                groups[group] = peers[group]
        if join and step == 1:
            groups[:] = -1
        count = add_samples(pieces, count, order, begin, groups, lengths, first, cuts, piece_begin, True)
        items[step] = write_items(column, unit_bytes, piece_begin, item_begin[step], first_piece[step])
    for index in range(num_columns):
        piece_begin[index] = count
        landing = ZERO
        for k in range(sources.size):
            if cuts[index] and sources[k] != rank:
                count = add_piece(pieces, count, ZERO, landing, source_units[k, index], k, cuts[index])
            landing += source_units[k, index]
    piece_begin[num_columns] = count
    items[2] = write_items(column, unit_bytes, piece_begin, item_begin[2], first_piece[2])
    return items, count
