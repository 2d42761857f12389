"""Which bytes to copy where: the one form of work that the copy kernels of both devices understand."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.compile import kernel


class Ranges(NamedTuple):
    """(k,) int64 each: addresses to copy from, addresses to copy to, and bytes; no two overlap."""

    source: NDArray[np.int64]
    target: NDArray[np.int64]
    size: NDArray[np.int64]


@kernel
def sample_ranges(
    order: NDArray[np.int64],
    begin: NDArray[np.int64],
    lengths: NDArray[np.int64],
    base: NDArray[np.int64],
    column: NDArray[np.int64],
    rows: NDArray[np.int64],
    row_bytes: NDArray[np.int64],
    target: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Ranges that gather samples of each field into segments; neighbours that stay neighbours are one range.

    Args:
        order: (m,) samples to copy, group after group.
        begin: (groups + 1,) where each group begins in `order`.
        lengths: (n, num_jagged) lengths of all samples at the source.
        base: (F,) address of each field's first row.
        column: (F,) jagged column, -1 if rows are fixed.
        rows: (F,) rows per sample if fixed.
        row_bytes: (F,) bytes of a row.
        target: (groups, F) address where each group's segment of each field begins.

    Returns:
        Source addresses, target addresses, bytes.
    """
    num_samples, num_fields = lengths.shape[0], base.size
    capacity = order.size * num_fields
    sources = np.empty(capacity, np.int64)
    targets = np.empty(capacity, np.int64)
    sizes = np.empty(capacity, np.int64)
    starts = np.empty(num_samples + 1, np.int64)
    count = 0
    for field in range(num_fields):
        width, jagged = row_bytes[field], column[field]
        if width == 0:
            continue
        starts[0] = 0
        for i in range(num_samples):
            length = lengths[i, jagged] if jagged >= 0 else rows[field]
            starts[i + 1] = starts[i] + length * width
        for group in range(begin.size - 1):
            cursor = target[group, field]
            end_of_last = np.int64(-1)
            for j in range(begin[group], begin[group + 1]):
                sample = order[j]
                size = starts[sample + 1] - starts[sample]
                if size == 0:
                    continue
                if starts[sample] == end_of_last:
                    sizes[count - 1] += size
                else:
                    sources[count] = base[field] + starts[sample]
                    targets[count] = cursor
                    sizes[count] = size
                    count += 1
                end_of_last = starts[sample + 1]
                cursor += size
    return sources[:count], targets[:count], sizes[:count]


@kernel
def cut(source: NDArray[np.int64], target: NDArray[np.int64], size: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """(3, k) int64: the same copies in pieces of at most `most` bytes, for a device that copies pieces in parallel."""
    count = 0
    for i in range(size.size):
        count += (size[i] + most - 1) // most
    pieces = np.empty((3, count), np.int64)
    place = 0
    for i in range(size.size):
        done = np.int64(0)
        while done < size[i]:
            pieces[0, place] = source[i] + done
            pieces[1, place] = target[i] + done
            pieces[2, place] = min(np.int64(most), size[i] - done)
            done += most
            place += 1
    return pieces
