"""Which bytes a rank copies for one exchange, from its slice of the plan, in two compiled passes.

The send and receive buffers hold one block per peer, in rank order; a block holds one segment per field, in field
order. Segments begin at multiples of 16 bytes, so that they can be read in words of any dtype. Sender and receiver
compute the same layout, the one from its lengths, the other from the totals of its slice: no sizes are exchanged.

The host's time counts: a training step launches the redistribution between its own kernels. So all arithmetic on
samples, fields and peers is in these two functions, and Python only allocates what they ask for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.compile import kernel
from evenkeel.partitioning.slices import Slice
from trainer_client.redistribution.fields import FieldTable

ALIGNMENT = 16
WHOLE = 1 << 62  # no range is cut
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """How much a rank sends, keeps and receives.

    Attributes:
        order: (n,) own samples sorted by (destination, index).
        begin: (ranks + 1,) where each destination's samples begin in `order`.
        sent_totals: (ranks, num_jagged) values per jagged column for each destination.
        sent_bytes: (ranks,) bytes for each destination, padding included; 0 for the rank itself.
        received_bytes: (ranks,) bytes from each source; 0 for the rank itself.
        kept_bytes: Bytes of the samples that stay.
        totals: (num_jagged,) values per jagged column of all samples that the rank trains.
        num_samples: Their number.
    """

    order: Ints
    begin: Ints
    sent_totals: Ints
    sent_bytes: Ints
    received_bytes: Ints
    kept_bytes: int
    totals: Ints
    num_samples: int


def measure(piece: Slice, lengths: Ints, fields: FieldTable, num_ranks: int) -> Amounts:
    """The sizes of all buffers.

    Raises:
        ValueError: If the slice's samples that stay are not those that it announces as the rank's own.
    """
    order, begin, sent_totals, sent, received, kept, totals, num_samples, staying = _measure(
        piece.destinations, int(piece.rank), num_ranks, piece.sources, piece.source_counts, piece.source_totals,
        lengths, fields.column, fields.rows, fields.row_bytes,
    )  # fmt: skip
    own = int(begin[piece.rank + 1] - begin[piece.rank])
    if staying != own:
        raise ValueError(f"the slice keeps {own} samples on rank {piece.rank}, but announces {staying} from it")
    return Amounts(
        order=order, begin=begin, sent_totals=sent_totals, sent_bytes=sent, received_bytes=received,
        kept_bytes=kept, totals=totals, num_samples=num_samples,
    )  # fmt: skip


def room(amounts: Amounts, fields: FieldTable, most: int) -> int:
    """64-bit words in which `describe` finds room: three a range, whatever it can merge."""
    num_bytes = int(amounts.sent_bytes.sum() + amounts.received_bytes.sum()) + amounts.kept_bytes
    ranges = (amounts.order.size + amounts.begin.size) * fields.column.size + num_bytes // most
    return 3 * (ranges + 6)


def describe(
    words: Ints,
    amounts: Amounts,
    piece: Slice,
    lengths: Ints,
    fields: FieldTable,
    totals: Ints,
    here: Ints,
    there: Ints,
    sent: int,
    received: int,
    *,
    most: int,
    join: bool,
) -> list[tuple[int, int]]:
    """Writes three lists of copies: from own samples to `sent`, to where they stay, and from `received`.

    A list is a table (3, k): addresses to copy from, addresses to copy to, bytes; it begins at a multiple of 16 bytes.

    Args:
        words: Where to write, at least `room` long.
        amounts: What `measure` found.
        piece: The slice.
        lengths: (n, num_jagged) of the rank's own samples.
        fields: The fields.
        totals: (num_jagged,) values that the rank holds per jagged column.
        here: (leaves,) addresses of its tensors.
        there: (leaves,) addresses of the tensors of the result.
        sent: Address of the send buffer.
        received: Address of the receive buffer.
        most: Bytes above which a range is cut.
        join: Copy what stays together with what is sent; the second list is empty then.

    Returns:
        For each list the word at which it begins, and k.
    """
    ends = _describe(
        words, amounts.order, amounts.begin, amounts.sent_totals, int(piece.rank), piece.sources, piece.source_counts,
        piece.source_totals, lengths, fields.column, fields.rows, fields.row_bytes,
        fields.leaf_index, fields.before_begin, fields.before_columns, totals, amounts.totals, here, there, sent,
        received, most, join,
    )  # fmt: skip
    return [(int(begin), int(count)) for begin, count in ends]


@kernel
def _measure(
    destinations: NDArray[np.int32],
    rank: int,
    num_ranks: int,
    sources: NDArray[np.int32],
    source_counts: NDArray[np.int32],
    source_totals: Ints,
    lengths: Ints,
    column: Ints,
    rows: Ints,
    row_bytes: Ints,
) -> tuple[Ints, Ints, Ints, Ints, Ints, int, Ints, int, int]:
    num_own, num_jagged = lengths.shape
    begin = np.zeros(num_ranks + 1, np.int64)
    sent_totals = np.zeros((num_ranks, num_jagged), np.int64)
    for i in range(num_own):
        peer = destinations[i]
        begin[peer + 1] += 1
        for jagged in range(num_jagged):
            sent_totals[peer, jagged] += lengths[i, jagged]
    for peer in range(num_ranks):
        begin[peer + 1] += begin[peer]
    place = begin[:-1].copy()
    order = np.empty(num_own, np.int64)
    for i in range(num_own):
        peer = destinations[i]
        order[place[peer]] = i
        place[peer] += 1

    sent = np.zeros(num_ranks, np.int64)
    received = np.zeros(num_ranks, np.int64)
    kept = 0
    for peer in range(num_ranks):
        count = begin[peer + 1] - begin[peer]
        if count:
            for field in range(column.size):
                jagged = column[field]
                many = sent_totals[peer, jagged] if jagged >= 0 else count * rows[field]
                sent[peer] += (many * row_bytes[field] + 15) & -16
    kept, sent[rank] = sent[rank], 0
    totals = np.zeros(num_jagged, np.int64)
    num_samples = 0
    staying = 0
    for k in range(sources.size):
        num_samples += source_counts[k]
        for jagged in range(num_jagged):
            totals[jagged] += source_totals[k, jagged]
        if sources[k] == rank:
            staying += source_counts[k]
            continue
        for field in range(column.size):
            jagged = column[field]
            many = source_totals[k, jagged] if jagged >= 0 else source_counts[k] * rows[field]
            received[sources[k]] += (many * row_bytes[field] + 15) & -16
    return order, begin, sent_totals, sent, received, kept, totals, num_samples, staying


@kernel
def _add(words: Ints, first: int, stride: int, count: int, source: int, target: int, size: int, most: int) -> int:
    """Appends a range, cut into pieces, to a table whose rows lie `stride` apart; returns the new number."""
    done = 0
    while done < size:
        words[first + count] = source + done
        words[first + stride + count] = target + done
        words[first + 2 * stride + count] = min(most, size - done)
        done += most
        count += 1
    return count


@kernel
def _close(words: Ints, first: int, stride: int, count: int) -> int:
    """Moves the rows of a table together; returns where the next one begins."""
    for row in range(1, 3):
        for i in range(count):
            words[first + row * count + i] = words[first + row * stride + i]
    return (first + 3 * count + 1) & -2


@kernel
def _describe(
    words: Ints,
    order: Ints,
    begin: Ints,
    sent_totals: Ints,
    rank: int,
    sources: NDArray[np.int32],
    source_counts: NDArray[np.int32],
    source_totals: Ints,
    lengths: Ints,
    column: Ints,
    rows: Ints,
    row_bytes: Ints,
    leaf: Ints,
    before_begin: Ints,
    before_columns: Ints,
    own_totals: Ints,
    new_totals: Ints,
    here: Ints,
    there: Ints,
    sent: int,
    received: int,
    most: int,
    join: bool,
) -> Ints:
    num_own, num_fields, num_ranks = order.size, column.size, begin.size - 1
    ends = np.zeros((3, 2), np.int64)
    source_of, landing = np.empty(num_fields, np.int64), np.empty(num_fields, np.int64)
    for field in range(num_fields):
        own_rows, new_rows = np.int64(0), np.int64(0)
        for k in range(before_begin[field], before_begin[field + 1]):
            own_rows += own_totals[before_columns[k]]
            new_rows += new_totals[before_columns[k]]
        source_of[field] = here[leaf[field]] + own_rows * row_bytes[field]
        landing[field] = there[leaf[field]] + new_rows * row_bytes[field]

    # Where the samples that stay land, and the segments that arrive; sources come in order of their ranks.
    staying = landing.copy()
    cursor = received
    num_arriving = 0
    arriving = np.empty((3, sources.size * num_fields), np.int64)
    for k in range(sources.size):
        for field in range(num_fields):
            jagged = column[field]
            many = source_totals[k, jagged] if jagged >= 0 else source_counts[k] * rows[field]
            size = many * row_bytes[field]
            if sources[k] == rank:
                staying[field] = landing[field]
            else:
                if size:
                    arriving[0, num_arriving] = cursor
                    arriving[1, num_arriving] = landing[field]
                    arriving[2, num_arriving] = size
                    num_arriving += 1
                cursor += (size + 15) & -16
            landing[field] += size

    starts = np.empty(num_own + 1, np.int64)
    starts[0] = 0
    first, count = 0, 0
    stride = words.size // 3
    for step in range(1 if join else 2):
        cursors = np.zeros(num_ranks, np.int64)
        cursor = sent
        for peer in range(num_ranks):
            cursors[peer] = cursor
            if peer == rank or begin[peer] == begin[peer + 1]:
                continue
            for field in range(num_fields):
                jagged = column[field]
                samples = begin[peer + 1] - begin[peer]
                many = sent_totals[peer, jagged] if jagged >= 0 else samples * rows[field]
                cursor += (many * row_bytes[field] + 15) & -16
        for field in range(num_fields):
            width, jagged = row_bytes[field], column[field]
            if width == 0:
                continue
            for i in range(num_own):
                length = lengths[i, jagged] if jagged >= 0 else rows[field]
                starts[i + 1] = starts[i] + length * width
            for peer in range(num_ranks):
                if begin[peer] == begin[peer + 1] or (not join and (peer == rank) != (step == 1)):
                    continue
                target = staying[field] if peer == rank else cursors[peer]
                since, until = 0, 0  # samples that are neighbours here and there are one range
                for sample in order[begin[peer] : begin[peer + 1]]:
                    if starts[sample] != until:
                        count = _add(words, first, stride, count, source_of[field] + since, target, until - since, most)
                        target += until - since
                        since = starts[sample]
                    until = starts[sample + 1]
                count = _add(words, first, stride, count, source_of[field] + since, target, until - since, most)
                target += until - since
                if peer != rank:
                    cursors[peer] += (target - cursors[peer] + 15) & -16
        ends[step, 0], ends[step, 1] = first, count
        first = _close(words, first, stride, count)
        count, stride = 0, (words.size - first) // 3
    if join:
        ends[1, 0] = first
    for k in range(num_arriving):
        count = _add(words, first, stride, count, arriving[0, k], arriving[1, k], arriving[2, k], most)
    ends[2, 0], ends[2, 1] = first, count
    _close(words, first, stride, count)
    return ends
