"""What a rank copies for one exchange, from its slice of the plan, in two compiled passes.

The send and receive buffers hold one block per peer, in rank order; a block holds one segment per field, in field
order. Segments begin at multiples of 16 bytes, so that they can be read in words of any dtype. Sender and receiver
compute the same layout, the one from its lengths, the other from the totals of its slice: no sizes are exchanged.

A training step launches the redistribution between its own kernels, so the host's time counts: all arithmetic on
samples, fields and peers is compiled.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.compile import ZERO, kernel
from evenkeel.partitioning.slices import Slice
from trainer_client.balancing.redistribution.copies import (
    MAX_UNITS,
    Copies,
    FieldTable,
    Ints,
    Job,
    add_piece,
    add_samples,
    units_of_pieces,
    write_items,
)


class Amounts(NamedTuple):
    """How much a rank sends, keeps and receives; C counts the jagged columns and, last, the samples.

    Attributes:
        order: (n,) own samples sorted by (destination, index).
        begin: (ranks + 1,) where each destination's samples begin in `order`.
        peers: Destinations that get samples, ascending.
        sent_units: (ranks, C) units of each column for each destination.
        source_units: (sources, C) units of each column from each source.
        sent_bytes: (ranks,) bytes for each destination, padding included; 0 for the rank itself.
        received_bytes: (ranks,) bytes from each source; 0 for the rank itself.
        kept_bytes: Bytes of the samples that stay.
        units: (C,) units of each column of all samples that the rank trains.
        num_pieces: Pieces of all copies at most.
        staying: Samples that the slice announces from the rank itself.
        largest: The largest number of units in a column, or what is out of bounds.
    """

    order: Ints
    begin: Ints
    peers: Ints
    sent_units: Ints
    source_units: Ints
    sent_bytes: Ints
    received_bytes: Ints
    kept_bytes: int
    units: Ints
    num_pieces: int
    staying: int
    largest: int

    @property
    def num_samples(self) -> int:
        """Samples that the rank trains."""
        return int(self.units[-1])

    @property
    def totals(self) -> Ints:
        """(num_jagged,) values per jagged column that the rank trains."""
        return self.units[:-1]


def measure(piece: Slice, lengths: Ints, fields: FieldTable, world_size: int, most: int) -> Amounts:
    """The sizes of all buffers.

    Args:
        piece: The slice.
        lengths: (n, num_jagged) of the rank's own samples.
        fields: The fields.
        world_size: Number of ranks.
        most: Bytes above which a piece is cut.

    Raises:
        ValueError: If the slice's samples that stay are not those that it announces as the rank's own, an amount is
            negative, or there are more values than pieces can count.
    """
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
    """Describes what to copy.

    Args:
        words: Where to write, of `num_words`.
        amounts: What `measure` gave for the other arguments.
        piece: As for `measure`.
        lengths: As for `measure`.
        fields: As for `measure`.
        addresses: (F,) those of its fields, (F,) those of the result's, of the send buffer, and of the receive buffer.
        most: As for `measure`.
        join: Copy what stays together with what is sent.

    Returns:
        What to copy, and the jobs from own samples to the send buffer, from own samples to where they stay (nothing
        with `join`), and from the receive buffer.
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
