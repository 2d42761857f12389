"""How the samples of an exchange lie in memory, on the way and where they arrive: sizes of buffers, and what to copy.

The send and receive buffers hold one block per peer, in rank order; a block holds one segment per field, in field
order. Segments begin at multiples of 16 bytes, so that they can be read in words of any dtype. Sender and receiver
compute the same layout, the one from its lengths, the other from the totals of its slice: no sizes are exchanged.
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
    add_piece,
    add_samples,
    units_of_pieces,
    write_items,
)

PACK, KEEP, UNPACK = range(3)  # the jobs of an exchange


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
    staying: Ints  # (C,) units of each column that the slice announces from the rank itself
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
    kept, announced = amounts.sent_units[piece.rank], amounts.staying
    if (wrong := np.flatnonzero(kept != announced)).size:  # copies would reach beyond the memory made for them
        at = wrong[-1]
        what = "samples" if at == kept.size - 1 else f"values of jagged field {at}"
        raise ValueError(
            f"the slice keeps {kept[at]} {what} on rank {piece.rank}, but announces {announced[at]} from it; "
            "pass the batch for which the plan was made"
        )
    return amounts


def num_words(amounts: Amounts, fields: FieldTable) -> int:
    """Words that the description of an exchange takes at most."""
    groups = amounts.peers.size + len(amounts.source_units)
    return Copies.num_words(fields.column.size, groups, 3, amounts.num_pieces)


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
) -> Copies:
    """Writes into `words` what to copy: to pack what is sent, what stays, and to unpack what is received.

    `addresses` are (F,) those of the batch's fields, (F,) those of the result's, of the send and of the receive buffer.
    With `join`, what stays is copied by the first job, and the second has nothing to do.
    """
    copies = Copies(words, fields.unit_bytes, amounts.peers.size + piece.sources.size, 3)
    count = _describe(
        copies.addresses, copies.item_begin, copies.first_piece, copies.pieces, amounts.order, amounts.begin,
        amounts.peers, amounts.sent_units, amounts.source_units, int(piece.rank), piece.sources, lengths,
        fields.column, fields.unit_bytes, *addresses, most, join,
    )  # fmt: skip
    copies.shorten(count)
    return copies


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
) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints, Ints, int, Ints, int, Ints, int]:
    # The fields of `Amounts`; a plain tuple, since Numba takes 6 µs to hand over one with names.
    num_own, num_jagged = lengths.shape
    num_columns = num_jagged + 1
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
    staying, largest = np.zeros(num_columns, np.int64), ZERO
    for k in range(sources.size):
        for index in range(num_columns):
            amount = int(source_totals[k, index] if index < num_jagged else source_counts[k])
            if not 0 <= amount < MAX_UNITS:  # the sums below could wrap around
                largest = amount
                amount = ZERO
            source_units[k, index] = amount
            units[index] += amount
        if sources[k] == rank:
            staying += source_units[k]

    sent, received = np.zeros(world_size, np.int64), np.zeros(world_size, np.int64)
    for field in range(column.size):
        for peer in range(world_size):
            sent[peer] += _padded(sent_units[peer, column[field]] * unit_bytes[field])
        for k in range(sources.size):
            received[sources[k]] += _padded(source_units[k, column[field]] * unit_bytes[field])
    kept = sent[rank]
    sent[rank] = received[rank] = 0

    cuts = units_of_pieces(column, unit_bytes, num_columns, most)
    num_pieces, is_wrong = 0, largest != 0
    for index in range(num_columns):
        total = sent_units[:, index].sum()
        if cuts[index]:
            num_pieces += num_own + peers.size + sources.size + (units[index] + total) // cuts[index]
        if not is_wrong:
            largest = max(largest, units[index], total)
    return order, begin, peers, sent_units, source_units, sent, received, kept, units, num_pieces, staying, largest


@kernel
def _padded(size: int) -> int:
    return (size + 15) & -16


@kernel
def _describe(
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
    here: Ints,
    there: Ints,
    sent: int,
    received: int,
    most: int,
    join: bool,
) -> int:
    # A group for what goes to each peer, then one for what comes from each source; returns the number of pieces.
    num_fields, num_columns, num_peers = column.size, sent_units.shape[1], peers.size
    cuts = units_of_pieces(column, unit_bytes, num_columns, most)
    landing = np.zeros(num_columns, np.int64)
    staying = np.zeros(num_fields, np.int64)  # where what stays goes, between what comes from ranks before and behind
    for k in range(sources.size):
        for field in range(num_fields):
            target = there[field] + landing[column[field]] * unit_bytes[field]
            addresses[num_peers + k, 0, field], addresses[num_peers + k, 1, field] = received, target
            if sources[k] == rank:
                staying[field] = target
            else:
                received += _padded(source_units[k, column[field]] * unit_bytes[field])
        landing += source_units[k]
    for group in range(num_peers):
        for field in range(num_fields):
            addresses[group, 0, field] = here[field]
            addresses[group, 1, field] = staying[field] if peers[group] == rank else sent
            if peers[group] != rank:
                sent += _padded(sent_units[peers[group], column[field]] * unit_bytes[field])

    piece_begin = np.zeros(num_columns + 1, np.int64)
    count = ZERO
    for job in (PACK, KEEP):
        parts = np.full(num_peers, -1)
        for group in range(num_peers):
            if job == (KEEP if peers[group] == rank and not join else PACK):
                parts[group] = peers[group]
        count = add_samples(pieces, count, order, begin, parts, lengths, cuts, piece_begin)
        write_items(column, unit_bytes, piece_begin, item_begin[job], first_piece[job])
    for index in range(num_columns):
        piece_begin[index] = count
        for k in range(sources.size):
            if cuts[index] and sources[k] != rank:
                count = add_piece(pieces, count, ZERO, ZERO, source_units[k, index], num_peers + k, cuts[index])
    piece_begin[num_columns] = count
    write_items(column, unit_bytes, piece_begin, item_begin[UNPACK], first_piece[UNPACK])
    return count
