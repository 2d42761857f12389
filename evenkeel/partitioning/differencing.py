"""The largest differencing method of Karmarkar and Karp (1982), k-way.

A state holds k disjoint sets. The two states of largest spread (largest minus smallest set) are joined, the largest set
of one with the smallest of the other, until one state is left. Sets are linked lists: joining never copies a member.
Two sets of equal sum and equal number of members are disjoint, so that their first members decide which is greater.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.compile import NONE, ZERO, kernel, step
from evenkeel.partitioning.sorting import sort_by_key

COUNT = 1 << 32  # a set's tie-breaker is number of members * COUNT + first member, so that one comparison serves both


@step
def sort_sets_descending(
    sums: NDArray[np.int64],
    ties: NDArray[np.int64],
    order: NDArray[np.int32],
    spare: NDArray[np.int32],
    keys: NDArray[np.uint64],
    spare_keys: NDArray[np.uint64],
    histogram: NDArray[np.int64],
    n: int,
) -> None:
    """Write to `order` the positions of the first `n` sets, greatest first."""
    if n <= 40:
        for i in range(n):
            j = i
            while j > 0:
                other = order[j - 1]
                if sums[other] > sums[i] or (sums[other] == sums[i] and ties[other] > ties[i]):
                    break
                order[j] = other
                j -= 1
            order[j] = i
        return
    bits = sums.view(np.uint64)
    for i in range(n):
        keys[i] = ~bits[i]
        order[i] = i
    sort_by_key(keys, order, spare_keys, spare, histogram, n)
    start = 0
    while start < n:
        end = start + 1
        while end < n and sums[order[end]] == sums[order[start]]:
            end += 1
        if end - start > 1:
            for i in range(start, end):
                keys[i] = ~np.uint64(ties[order[i]])
            if end - start <= 40:
                for i in range(start + 1, end):
                    key, item = keys[i], order[i]
                    j = i
                    while j > start and keys[j - 1] > key:
                        keys[j], order[j] = keys[j - 1], order[j - 1]
                        j -= 1
                    keys[j], order[j] = key, item
            else:
                sort_by_key(
                    keys[start:end], order[start:end], spare_keys[start:end], spare[start:end], histogram, end - start
                )
        start = end


@step
def _goes_first(spreads: NDArray[np.int64], sums: NDArray[np.int64], ties: NDArray[np.int64], a: int, b: int) -> bool:
    """Whether state `a` is joined before state `b`; `sums` and `ties` are of their largest sets."""
    if spreads[a] != spreads[b]:
        return bool(spreads[a] > spreads[b])
    if sums[a] != sums[b]:
        return bool(sums[a] > sums[b])
    return bool(ties[a] > ties[b])


@step
def _sift_down(
    heap: NDArray[np.int32], size: int, spreads: NDArray[np.int64], sums: NDArray[np.int64], ties: NDArray[np.int64]
) -> None:
    state = heap[0]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and _goes_first(spreads, sums, ties, heap[child + 1], heap[child]):
            child += 1
        if _goes_first(spreads, sums, ties, state, heap[child]):
            break
        heap[i] = heap[child]
        i = child
    heap[i] = state


@step
def _rise(
    heap: NDArray[np.int32], i: int, spreads: NDArray[np.int64], sums: NDArray[np.int64], ties: NDArray[np.int64]
) -> None:
    state = heap[i]
    while i > 0:
        parent = (i - 1) // 2
        if not _goes_first(spreads, sums, ties, state, heap[parent]):
            break
        heap[i] = heap[parent]
        i = parent
    heap[i] = state


@kernel
def difference_equal_counts(costs: NDArray[np.int64], order: NDArray[np.int32], num_sets: int) -> NDArray[np.int32]:
    """(n,) int32 set of each sample; every set gets floor or ceil of n/num_sets samples.

    `order` sorts `costs` ascending. Each run of `num_sets` consecutive samples is one state with one sample per set;
    the lightest run is the one that may be short.
    """
    n, k = costs.size, num_sets
    sets = np.zeros(n, np.int32)
    if n == 0 or k == 1:
        return sets
    num_states = (n + k - 1) // k
    missing = num_states * k - n
    sums = np.zeros((num_states, k), np.int64)
    ties = np.full((num_states, k), -1, np.int64)
    tails = np.full((num_states, k), -1, np.int32)
    after = np.full(n, -1, np.int32)
    for state in range(num_states):
        for i in range(k):
            position = state * k + k - 1 - i - missing
            if position >= 0:
                item = order[position]
                sums[state, i] = costs[item]
                ties[state, i] = COUNT + np.int64(item)
                tails[state, i] = item
    spreads = np.empty(num_states, np.int64)
    largest_sum = sums[:, 0].copy()
    largest_tie = ties[:, 0].copy()
    for state in range(num_states):
        spreads[state] = sums[state, 0] - sums[state, k - 1]
    heap = np.empty(num_states, np.int32)
    for i in range(num_states):
        heap[i] = i
        _rise(heap, i, spreads, largest_sum, largest_tie)

    new_sums, new_ties, new_tails = np.empty(k, np.int64), np.empty(k, np.int64), np.empty(k, np.int32)
    rank, spare = np.empty(k, np.int32), np.empty(k, np.int32)
    keys, spare_keys = np.empty(k, np.uint64), np.empty(k, np.uint64)
    histogram = np.empty(256, np.int64)
    size = num_states
    while size > 1:
        first = heap[0]
        size -= 1
        heap[0] = heap[size]
        _sift_down(heap, size, spreads, largest_sum, largest_tie)
        second = heap[0]
        for i in range(k):
            j = k - 1 - i
            new_sums[i] = sums[first, i] + sums[second, j]
            tie_a, tie_b = ties[first, i], ties[second, j]
            if tie_a < 0:
                new_ties[i] = tie_b
                new_tails[i] = tails[second, j]
            elif tie_b < 0:
                new_ties[i] = tie_a
                new_tails[i] = tails[first, i]
            else:
                after[tails[first, i]] = tie_b & (COUNT - 1)
                new_ties[i] = tie_a + (tie_b & -COUNT)
                new_tails[i] = tails[second, j]
        sort_sets_descending(new_sums, new_ties, rank, spare, keys, spare_keys, histogram, k)
        for i in range(k):
            position = rank[i]
            sums[second, i] = new_sums[position]
            ties[second, i] = new_ties[position]
            tails[second, i] = new_tails[position]
        spreads[second] = sums[second, 0] - sums[second, k - 1]
        largest_sum[second] = sums[second, 0]
        largest_tie[second] = ties[second, 0]
        _sift_down(heap, size, spreads, largest_sum, largest_tie)
    last = heap[0]
    for i in range(k):
        if ties[last, i] >= 0:
            item = np.int32(ties[last, i] & (COUNT - 1))
            while item >= 0:
                sets[item] = i
                item = after[item]
    return sets


@step
def _greater(sums: NDArray[np.int64], ties: NDArray[np.int64], a: int, b: int) -> bool:
    return bool(sums[a] > sums[b] or (sums[a] == sums[b] and ties[a] > ties[b]))


@kernel
def _longer(lists: NDArray[np.int32], used: int, needed: int) -> NDArray[np.int32]:
    larger = np.empty(2 * lists.size + needed, np.int32)
    for x in range(used):
        larger[x] = lists[x]
    return larger


@kernel
def difference_free_counts(costs: NDArray[np.int64], order: NDArray[np.int32], num_sets: int) -> NDArray[np.int32]:
    """(n,) int32 set of each sample, any number per set: every sample starts as a state of its own.

    `order` sorts `costs` ascending. A state lists its non-empty sets, named by their first samples, greatest first.
    Samples that are alone wait in `order`; the heap holds what has been joined.
    """
    n, k = costs.size, num_sets
    sets = np.zeros(n, np.int32)
    if n == 0 or k == 1:
        return sets
    sums = costs.copy()
    ties = np.empty(n, np.int64)
    tails, after = np.arange(n).astype(np.int32), np.full(n, -1, np.int32)
    lists = np.empty(4 * n + 2 * k, np.int32)
    start, size, room = np.empty(n, np.int64), np.ones(n, np.int64), np.ones(n, np.int64)
    heap = np.empty(n // 2 + 1, np.int32)
    for i in range(n):
        item = order[n - 1 - i]
        ties[item] = COUNT + np.int64(item)
        start[item] = i
        lists[i] = item
    used = n
    spreads, largest_sum, largest_tie = costs.copy(), costs.copy(), ties.copy()
    merged = np.empty(k, np.int32)
    joined, ranked, spare = np.empty(k, np.int32), np.empty(k, np.int32), np.empty(k, np.int32)
    joined_sums, joined_ties = np.empty(k, np.int64), np.empty(k, np.int64)
    keys, spare_keys = np.empty(k, np.uint64), np.empty(k, np.uint64)
    histogram = np.empty(256, np.int64)
    num_merged, next_sample = (
        ZERO,
        n - 1,
    )  # states in the heap; place in `order` of the heaviest that is still alone
    first = second = order[n - 1]
    for _ in range(n - 1):
        for x in range(2):
            if num_merged > 0 and (
                next_sample < 0 or _goes_first(spreads, largest_sum, largest_tie, heap[0], order[next_sample])
            ):
                state = heap[0]
                num_merged -= 1
                heap[0] = heap[num_merged]
                _sift_down(heap, num_merged, spreads, largest_sum, largest_tie)
            else:
                state = order[next_sample]
                next_sample -= 1
            if x == 0:
                first = state
            else:
                second = state
        p, q = size[first], size[second]
        a, b = start[first], start[second]
        overlap = max(0, p + q - k)
        for x in range(overlap):
            i = p - 1 - x
            j = k - 1 - i
            head, other = lists[a + i], lists[b + j]
            after[tails[head]] = other
            tails[head] = tails[other]
            sums[head] += sums[other]
            ties[head] += ties[other] & -COUNT
            joined[x] = head
        keep = second
        if overlap <= 1 and (p == 1 or q == 1):  # one sample joins a state: a set of its own, or in the smallest set
            keep, alone = (second, first) if p == 1 else (first, second)
            held = size[keep]
            if overlap == 0:
                head = lists[start[alone]]
                if room[keep] == held:
                    needed = min(2 * held, k)
                    if used + needed > lists.size:
                        lists = _longer(lists, used, needed)
                    for x in range(held):
                        lists[used + x] = lists[start[keep] + x]
                    start[keep], room[keep] = used, needed
                    used += needed
                size[keep] += 1
            else:
                head = joined[0]
                held -= 1
            base = start[keep]
            low, high = 0, held  # its place
            if held > 0 and _greater(sums, ties, int(lists[base + held - 1]), int(head)):
                low = held
            while low < high:
                middle = (low + high) // 2
                if _greater(sums, ties, int(head), int(lists[base + middle])):
                    high = middle
                else:
                    low = middle + 1
            for place in range(base + held, base + low, -1):
                lists[place] = lists[place - 1]
            lists[base + low] = head
        else:
            for x in range(overlap):
                joined_sums[x] = sums[joined[x]]
                joined_ties[x] = ties[joined[x]]
            sort_sets_descending(joined_sums, joined_ties, ranked, spare, keys, spare_keys, histogram, overlap)
            i = j = x = total = 0
            end_a, end_b = p - overlap, q - overlap
            while i < end_a or j < end_b or x < overlap:
                best, source = NONE, 0
                if i < end_a:
                    best, source = int(lists[a + i]), 0
                if j < end_b and (best < 0 or _greater(sums, ties, int(lists[b + j]), best)):
                    best, source = int(lists[b + j]), 1
                if x < overlap and (best < 0 or _greater(sums, ties, int(joined[ranked[x]]), best)):
                    best, source = int(joined[ranked[x]]), 2
                merged[total] = best
                total += 1
                if source == 0:
                    i += 1
                elif source == 1:
                    j += 1
                else:
                    x += 1
            if room[first] >= total:
                keep = first
            elif room[second] < total:
                needed = 1
                while needed < total:
                    needed *= 2
                needed = min(needed, k)
                if used + needed > lists.size:
                    lists = _longer(lists, used, needed)
                start[keep], room[keep] = used, needed
                used += needed
            base = start[keep]
            for x in range(total):
                lists[base + x] = merged[x]
            size[keep] = total
        base = start[keep]
        largest_sum[keep], largest_tie[keep] = sums[lists[base]], ties[lists[base]]
        spreads[keep] = largest_sum[keep]
        if size[keep] == k:
            spreads[keep] -= sums[lists[base + k - 1]]
        heap[num_merged] = keep
        _rise(heap, num_merged, spreads, largest_sum, largest_tie)
        num_merged += 1
    last = heap[0] if num_merged > 0 else first
    for i in range(size[last]):
        item = lists[start[last] + i]
        while item >= 0:
            sets[item] = i
            item = after[item]
    return sets
