"""Stable radix sorts: the same order on every machine, without comparisons."""

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.compile import kernel, step


@step
def sort_by_key(
    keys: NDArray[np.uint64],
    items: NDArray[np.int32],
    spare_keys: NDArray[np.uint64],
    spare_items: NDArray[np.int32],
    histogram: NDArray[np.int64],
    n: int,
) -> None:
    """Sort the first `n` of `keys` ascending in place, `items` with them; digits that all keys share are skipped.

    `histogram` has a power of two of entries, which sets the digit's width.
    """
    varying = np.uint64(0)
    for i in range(1, n):
        varying |= keys[i] ^ keys[0]
    radix = histogram.size
    width = np.uint64(0)
    while (1 << width) < radix:
        width += np.uint64(1)
    mask = np.uint64(radix - 1)
    flipped = False
    shift = np.uint64(0)
    while shift < np.uint64(64) and (varying >> shift) != np.uint64(0):
        if (varying >> shift) & mask != np.uint64(0):
            source_keys, target_keys = (spare_keys, keys) if flipped else (keys, spare_keys)
            source_items, target_items = (spare_items, items) if flipped else (items, spare_items)
            for digit in range(radix):
                histogram[digit] = 0
            for i in range(n):
                histogram[(source_keys[i] >> shift) & mask] += 1
            position = 0
            for digit in range(radix):
                count = histogram[digit]
                histogram[digit] = position
                position += count
            for i in range(n):
                digit_of_i = (source_keys[i] >> shift) & mask
                place = histogram[digit_of_i]
                histogram[digit_of_i] = place + 1
                target_keys[place] = source_keys[i]
                target_items[place] = source_items[i]
            flipped = not flipped
        shift += width
    if flipped:
        for i in range(n):
            keys[i] = spare_keys[i]
            items[i] = spare_items[i]


@kernel
def ascending_order(values: NDArray[np.int64]) -> NDArray[np.int32]:
    """(n,) int32 indices that sort the non-negative `values` ascending, equal ones by index."""
    n = values.size
    keys, order = np.empty(n, np.uint64), np.empty(n, np.int32)
    for i in range(n):
        keys[i] = values[i]
        order[i] = i
    histogram = np.empty(2048 if n >= 8192 else 256, np.int64)
    sort_by_key(keys, order, np.empty(n, np.uint64), np.empty(n, np.int32), histogram, n)
    return order
