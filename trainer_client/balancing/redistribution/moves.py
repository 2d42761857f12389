"""What a rank copies for one exchange, from its slice of the plan, in two compiled passes.

The send and receive buffers hold one block per peer, in rank order; a block holds one segment per field, in field
order. Segments begin at multiples of 16 bytes, so that they can be read in words of any dtype. Sender and receiver
compute the same layout, the one from its lengths, the other from the totals of its slice: no sizes are exchanged.

The host's time counts: a training step launches the redistribution between its own kernels. So all arithmetic on
samples, fields and peers is in these two functions, and Python only allocates what they ask for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.compile import ZERO, kernel
from evenkeel.partitioning.slices import Slice
from trainer_client.balancing.redistribution.copies import (
    MAX_UNITS,
    FieldTable,
    Ints,
    Job,
    add_piece,
    add_samples,
    columns_of,
    units_of_pieces,
    write_items,
    write_starts,
)


class Amounts(NamedTuple):
    """How much a rank sends, keeps and receives; C counts the jagged columns and, last, the samples.

    Attributes:
        order: (n,) own samples sorted by (destination, index).
        begin: (ranks + 1,) where each destination's samples begin in `order`.
        sent_units: (ranks, C) units of each column for each destination.
        source_units: (sources, C) units of each column from each source.
        sent_bytes: (ranks,) bytes for each destination, padding included; 0 for the rank itself.
        received_bytes: (ranks,) bytes from each source; 0 for the rank itself.
        kept_bytes: Bytes of the samples that stay.
        units: (C,) units of each column of all samples that the rank trains.
        num_words: Words that the description takes at most.
        staying: Samples that the slice announces from the rank itself.
        largest: The largest number of units in a column, or what is out of bounds.
    """

    order: Ints
    begin: Ints
    sent_units: Ints
    source_units: Ints
    sent_bytes: Ints
    received_bytes: Ints
    kept_bytes: int
    units: Ints
    num_words: int
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


class Moves(NamedTuple):
    """The copies of an exchange, described in one array.

    Attributes:
        pack: From own samples to the send buffer.
        keep: From own samples to where they stay.
        unpack: From the receive buffer.
        num_words: Words that the description took.
    """

    pack: Job
    keep: Job
    unpack: Job
    num_words: int


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
    own = int(amounts.begin[piece.rank + 1] - amounts.begin[piece.rank])
    if amounts.staying != own:
        raise ValueError(f"the slice keeps {own} samples on rank {piece.rank}, but announces {amounts.staying} from it")
    return amounts


def describe(
    words: Ints,
    amounts: Amounts,
    piece: Slice,
    lengths: Ints,
    fields: FieldTable,
    here: Ints,
    there: Ints,
    sent: int,
    received: int,
    *,
    most: int,
    join: bool,
) -> Moves:
    """Describes what to copy.

    Args:
        words: Where to write, of `amounts.num_words`.
        amounts: What `measure` found, with the same `most`.
        piece: The slice.
        lengths: (n, num_jagged) of the rank's own samples.
        fields: The fields.
        here: (F,) addresses of its fields.
        there: (F,) addresses of the fields of the result.
        sent: Address of the send buffer.
        received: Address of the receive buffer.
        most: Bytes above which a piece is cut.
        join: Copy what stays together with what is sent; `keep` is empty then.
    """
    jobs, num_words = _describe(
        words, amounts.order, amounts.begin, amounts.sent_units, amounts.source_units, int(piece.rank), piece.sources,
        lengths, fields.column, fields.unit_bytes, here, there, sent, received, most, join,
    )  # fmt: skip
    pack, keep, unpack = (Job(*job) for job in jobs.tolist())
    return Moves(pack, keep, unpack, num_words)


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
) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints, int, Ints, int, int, int]:
    # The fields of `Amounts`; a plain tuple, since Numba takes 6 µs to hand over one with names.
    num_own, num_jagged = lengths.shape
    num_fields, num_columns = column.size, num_jagged + 1
    columns = columns_of(column, num_jagged)
    begin = np.zeros(world_size + 1, np.int64)
    sent_units = np.zeros((world_size, num_columns), np.int64)
    for i in range(num_own):
        peer = destinations[i]
        begin[peer + 1] += 1
        for jagged in range(num_jagged):
            sent_units[peer, jagged] += lengths[i, jagged]
    num_groups = 0
    for peer in range(world_size):
        sent_units[peer, num_jagged] = begin[peer + 1]
        num_groups += begin[peer + 1] > 0
        begin[peer + 1] += begin[peer]
    place = begin[:-1].copy()
    order = np.empty(num_own, np.int64)
    for i in range(num_own):
        peer = destinations[i]
        order[place[peer]] = i
        place[peer] += 1

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
            sent[peer] += (sent_units[peer, columns[field]] * unit_bytes[field] + 15) & -16
        for k in range(sources.size):
            received[sources[k]] += (source_units[k, columns[field]] * unit_bytes[field] + 15) & -16
    kept = sent[rank]
    sent[rank] = received[rank] = 0

    cuts = units_of_pieces(columns, unit_bytes, num_columns, most)
    num_pieces = 0
    for index in range(num_columns):
        if cuts[index]:
            copied = units[index]
            for peer in range(world_size):
                copied += sent_units[peer, index]
            num_pieces += num_own + num_groups + sources.size + copied // cuts[index]
    num_words = num_fields * (9 + num_groups + sources.size) + 4 + 2 * num_pieces
    if largest == 0:
        for index in range(num_columns):
            total = ZERO
            for peer in range(world_size):
                total += sent_units[peer, index]
            largest = max(largest, units[index], total)
    return order, begin, sent_units, source_units, sent, received, kept, units, num_words, staying, largest


@kernel
def _describe(
    words: Ints,
    order: Ints,
    begin: Ints,
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
) -> tuple[Ints, int]:
    num_fields, num_columns, num_sources = column.size, sent_units.shape[1], sources.size
    columns = columns_of(column, num_columns - 1)
    cuts = units_of_pieces(columns, unit_bytes, num_columns, most)
    num_groups = 0
    for peer in range(begin.size - 1):
        num_groups += begin[peer + 1] > begin[peer]
    peers = np.empty(num_groups, np.int64)
    num_groups = 0
    for peer in range(begin.size - 1):
        if begin[peer + 1] > begin[peer]:
            peers[num_groups] = peer
            num_groups += 1
    size_of_items = 2 * num_fields + 1
    at_unit = 3 * size_of_items
    at_here, at_landing = at_unit + num_fields, at_unit + 2 * num_fields
    at_sent = at_landing + num_fields
    at_received = at_sent + peers.size * num_fields
    at_pieces = (at_received + num_sources * num_fields + 1) & -2
    for field in range(num_fields):
        words[at_unit + field] = unit_bytes[field]

    # Where each field is, and where it comes to be; sources come in order of their ranks.
    for field in range(num_fields):
        words[at_here + field], words[at_landing + field] = here[field], there[field]
    staying = np.zeros(num_columns, np.int64)
    cursor = received
    for k in range(num_sources):
        if sources[k] < rank:
            for index in range(num_columns):
                staying[index] += source_units[k, index]
        if sources[k] != rank:
            for field in range(num_fields):
                words[at_received + k * num_fields + field] = cursor
                cursor += (source_units[k, columns[field]] * unit_bytes[field] + 15) & -16
    cursor = sent
    for group in range(peers.size):
        peer = peers[group]
        for field in range(num_fields):
            units = staying[columns[field]] if peer == rank else sent_units[peer, columns[field]]
            place = at_sent + group * num_fields + field
            if peer == rank:
                words[place] = words[at_landing + field] + units * unit_bytes[field]
            else:
                words[place] = cursor
                cursor += (units * unit_bytes[field] + 15) & -16

    pieces = words.view(np.int32)[2 * at_pieces :]
    piece_begin = np.zeros((3, num_columns + 1), np.int64)
    count, landing = ZERO, ZERO
    starts = np.empty((num_columns, order.size + 1), np.int64)
    for step in range(2):
        for index in range(num_columns):
            piece_begin[step, index] = count
            if not cuts[index] or (join and step == 1):
                continue
            if step == 0:
                write_starts(lengths, index, starts[index])
            for group in range(peers.size):
                peer = peers[group]
                if join or (peer == rank) == (step == 1):
                    own = order[begin[peer] : begin[peer + 1]]
                    count, _ = add_samples(pieces, count, own, starts[index], ZERO, group, cuts[index])
        piece_begin[step, num_columns] = count
    for index in range(num_columns):
        piece_begin[2, index] = count
        landing = ZERO
        for k in range(num_sources):
            units = source_units[k, index]
            if cuts[index] and sources[k] != rank:
                count = add_piece(pieces, count, ZERO, landing, units, k, cuts[index])
            landing += units
    piece_begin[2, num_columns] = count

    jobs = np.zeros((3, 10), np.int64)
    for step in range(3):
        at_items = step * size_of_items
        jobs[step, 0] = write_items(words, at_items, columns, unit_bytes, piece_begin[step])
        jobs[step, 1] = num_fields
        jobs[step, 2], jobs[step, 3], jobs[step, 4] = at_items, at_items + num_fields + 1, at_unit
        jobs[step, 5], jobs[step, 6] = (at_here, 0) if step < 2 else (at_received, num_fields)
        jobs[step, 7], jobs[step, 8] = (at_sent, num_fields) if step < 2 else (at_landing, 0)
        jobs[step, 9] = at_pieces
    return jobs, at_pieces + 2 * count
