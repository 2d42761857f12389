"""Longest first: samples in descending order of cost, each onto the least loaded rank that has room for it."""

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.compile import ZERO, kernel, step


@step
def _sink(keys: NDArray[np.int64], heap: NDArray[np.int32], size: int, i: int, key: int, rank: int) -> None:
    """Put (`key`, `rank`) at or below place `i`; smaller keys, then smaller ranks are higher."""
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and (
            keys[child + 1] < keys[child] or (keys[child + 1] == keys[child] and heap[child + 1] < heap[child])
        ):
            child += 1
        if key < keys[child] or (key == keys[child] and rank < heap[child]):
            break
        keys[i], heap[i] = keys[child], heap[child]
        i = child
    keys[i], heap[i] = key, rank


@step
def _rise(keys: NDArray[np.int64], heap: NDArray[np.int32], i: int, key: int, rank: int) -> None:
    while i > 0:
        parent = (i - 1) // 2
        if keys[parent] < key or (keys[parent] == key and heap[parent] < rank):
            break
        keys[i], heap[i] = keys[parent], heap[parent]
        i = parent
    keys[i], heap[i] = key, rank


@step
def _key(load: int, speed: float) -> int:
    """An integer that orders as load over speed does: bits of doubles that are not negative."""
    return int(np.float64(load / speed).view(np.int64))


@kernel
def place_longest_first(
    items: NDArray[np.int32],
    item_begin: NDArray[np.int64],
    ranks: NDArray[np.int64],
    rank_begin: NDArray[np.int64],
    costs: NDArray[np.int64],
    memory: NDArray[np.int64],
    speeds: NDArray[np.float64],
    loads: NDArray[np.int64],
    used: NDArray[np.int64],
    caps: NDArray[np.int64],
    counts: NDArray[np.int64],
    most: NDArray[np.int64],
    num_fuller: int,
    destinations: NDArray[np.int32],
) -> None:
    """Place each group's items onto its ranks, which already carry `loads`, `used` and `counts`.

    Group g has `items[item_begin[g]:item_begin[g + 1]]`, ascending by cost and taken from the end, and the ranks
    `ranks[rank_begin[g]:rank_begin[g + 1]]`. A rank takes up to `most` samples, but only `num_fuller` ranks take that
    many and the others one less (negative: any number of them). A sample that fits under no rank's memory cap goes
    where it overflows least, for later repair. Least loaded is by load over speed, of equally loaded ranks the faster;
    empty `speeds` stand for equal ones and let loads be compared as they are.
    """
    with_memory = memory.size > 0
    most_ranks = 0
    for group in range(rank_begin.size - 1):
        most_ranks = max(most_ranks, rank_begin[group + 1] - rank_begin[group])
    own = np.empty(most_ranks, np.int64)
    heap = np.empty(most_ranks, np.int32)  # of positions in `own`
    keys = np.empty(most_ranks, np.int64)
    aside = np.empty(most_ranks, np.int32)
    for group in range(rank_begin.size - 1):
        num_own = rank_begin[group + 1] - rank_begin[group]
        for x in range(num_own):
            rank = ranks[rank_begin[group] + x]
            y = x
            if speeds.size > 0:
                while y > 0 and speeds[own[y - 1]] < speeds[rank]:
                    own[y] = own[y - 1]
                    y -= 1
            own[y] = rank
        size = ZERO
        num_aside = 0
        for position in range(num_own):
            rank = own[position]
            if counts[rank] < most[rank] and not (num_fuller == 0 and counts[rank] >= most[rank] - 1):
                aside[num_aside] = position
                num_aside += 1
        for i in range(item_begin[group + 1] - 1, item_begin[group] - 2, -1):
            for x in range(num_aside):
                rank = own[aside[x]]
                key = _key(loads[rank], speeds[rank]) if speeds.size > 0 else loads[rank]
                _rise(keys, heap, size, key, aside[x])
                size += 1
            if i < item_begin[group]:
                break
            item = items[i]
            num_aside = 0
            rank = own[0]
            while size > 0:
                rank = own[heap[0]]
                full = counts[rank] >= most[rank] or (num_fuller == 0 and counts[rank] >= most[rank] - 1)
                if not full and (not with_memory or used[rank] + memory[item] <= caps[rank]):
                    break
                if not full:
                    aside[num_aside] = heap[0]
                    num_aside += 1
                size -= 1
                _sink(keys, heap, size, 0, keys[size], heap[size])
            if size == 0:
                rank = own[aside[0]]
                for x in range(1, num_aside):
                    other = own[aside[x]]
                    if caps[other] - used[other] > caps[rank] - used[rank]:
                        rank = other
            destinations[item] = rank
            loads[rank] += costs[item]
            counts[rank] += 1
            if with_memory:
                used[rank] += memory[item]
            if num_fuller > 0 and counts[rank] == most[rank]:
                num_fuller -= 1
            if size > 0:
                key = _key(loads[rank], speeds[rank]) if speeds.size > 0 else loads[rank]
                _sink(keys, heap, size, 0, key, heap[0])
