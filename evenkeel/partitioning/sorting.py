"""A stable radix sort: the same order on every machine, without comparisons."""

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.compile import kernel


@kernel
def ascending_order(values: NDArray[np.int64]) -> NDArray[np.int32]:
    """(n,) int32 indices that sort the values ascending, read as unsigned numbers, equal ones by index."""
    n = values.size
    keys, order = np.empty(n, np.uint64), np.empty(n, np.int32)
    spare_keys, spare_order = np.empty(n, np.uint64), np.empty(n, np.int32)
    varying = np.uint64(0)
    for i in range(n):
        keys[i] = values[i]
        order[i] = i
        varying |= keys[i] ^ keys[0]
    width = np.uint64(11 if n >= 8192 else 8)
    radix = 1 << width
    mask, shift = np.uint64(radix - 1), np.uint64(0)
    begin = np.empty(radix, np.int64)
    while shift < np.uint64(64) and (varying >> shift) != np.uint64(0):
        if (varying >> shift) & mask != np.uint64(0):  # digits that all keys share are skipped
            begin[:] = 0
            for i in range(n):
                begin[(keys[i] >> shift) & mask] += 1
            place = 0
            for digit in range(radix):
                count = begin[digit]
                begin[digit] = place
                place += count
            for i in range(n):
                digit_of_i = (keys[i] >> shift) & mask
                place = begin[digit_of_i]
                begin[digit_of_i] = place + 1
                spare_keys[place] = keys[i]
                spare_order[place] = order[i]
            keys, spare_keys = spare_keys, keys
            order, spare_order = spare_order, order
        shift += width
    return order
