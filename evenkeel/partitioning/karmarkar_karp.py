"""The largest differencing method of Karmarkar and Karp (1982), k-way.

A state holds k disjoint sets. The two states of largest spread (largest minus smallest set) are joined, the largest set
of one with the smallest of the other, until one state is left. Sets are linked lists: joining never copies a member.
Two sets of equal sum and equal number of members are disjoint, so that their first members decide which is greater.
"""

from __future__ import annotations

import heapq

import numpy as np

from evenkeel.partitioning.compile import ZERO, kernel, step
from evenkeel.partitioning.local_search import exchange_from
from evenkeel.partitioning.matching import kinds_of_ranks, match_home
from evenkeel.partitioning.problem import Integers, Problem, Ranks, ascending_order

COUNT = 1 << 32  # a set's tie-breaker is number of members * COUNT + first member, so that one comparison serves both
FEW = 40  # sets up to which they are sorted by insertion


@step
def _greater(sums: Integers, ties: Integers, a: int, b: int) -> bool:
    """Whether the set whose first member is `a` is greater than the one of `b`."""
    return bool(sums[a] > sums[b] or (sums[a] == sums[b] and ties[a] > ties[b]))


@step
def _entry(state: int, sets: Ranks, count: int, k: int, sums: Integers, ties: Integers) -> tuple[int, int, int, int]:
    """A state in the heap of states: on top is that of the largest spread, of equal ones that of the greatest set."""
    head = sets[0]
    smallest = sums[sets[k - 1]] if count == k else ZERO
    return smallest - sums[head], -sums[head], -ties[head], state


@kernel
def _sort_descending(sets: Ranks, sums: Integers, ties: Integers, nearly: bool) -> None:
    """Sorts sets, named by their first members; `nearly` if at most one is out of place."""
    if not nearly and sets.size > FEW:
        keys = np.empty(sets.size, np.int64)
        for x in range(sets.size):
            keys[x] = ~sums[sets[x]]
        sets[:] = sets[ascending_order(keys)]
    for x in range(1, sets.size):
        item, y = sets[x], x
        while y > 0 and _greater(sums, ties, item, sets[y - 1]):
            sets[y] = sets[y - 1]
            y -= 1
        sets[y] = item


@kernel
def difference(costs: Integers, order: Ranks, num_sets: int, equal: bool) -> Ranks:
    """(n,) int32 set of each sample; `order` sorts the costs ascending.

    With `equal`, every set gets floor or ceil of n/k samples: each run of k consecutive samples is a state with one
    sample a set, the lightest run the one that may be short. Else every sample starts as a state of its own.
    """
    n, k = costs.size, num_sets
    result = np.zeros(n, np.int32)
    if n == 0:
        return result
    each = k if equal else 1
    sums, ties = costs.copy(), np.empty(n, np.int64)
    tails, after = np.arange(n).astype(np.int32), np.full(n, -1, np.int32)
    for i in range(n):
        ties[i] = COUNT + np.int64(i)
    # The non-empty sets of each state, named by their first members, greatest first: `counts` entries of an array
    states = [order[max(end - each, 0) : end][::-1].copy() for end in range(n, 0, -each)]
    counts = np.array([sets.size for sets in states])
    heap = [_entry(s, states[s], counts[s], k, sums, ties) for s in range(len(states))]
    heapq.heapify(heap)
    while len(heap) > 1:
        first = heapq.heappop(heap)[3]
        second = heap[0][3]
        a, b, p, q = states[first], states[second], counts[first], counts[second]
        for i in range(max(k - q, 0), p):
            head, other = a[i], b[k - 1 - i]
            after[tails[head]] = other
            tails[head] = tails[other]
            sums[head] += sums[other]
            ties[head] += ties[other] & -COUNT
        total = min(p + q, k)
        if p == 1 and b.size >= total:  # in place
            joined = b
            joined[total - 1] = a[0]
        elif q == 1 and a.size >= total:
            joined = a
            joined[total - 1] = b[0] if p < k else a[k - 1]
        else:
            joined = np.empty(min(2 * total, k), np.int32)
            joined[:p] = a[:p]
            joined[p:total] = b[: total - p]
        _sort_descending(joined[:total], sums, ties, p == 1 or q == 1)
        states[first], states[second], counts[second] = a[:0], joined, total
        heapq.heapreplace(heap, _entry(second, joined, total, k, sums, ties))
    last = heap[0][3]
    for x in range(counts[last]):
        item = states[last][x]
        while item >= 0:
            result[item] = x
            item = after[item]
    return result


def karmarkar_karp(problem: Problem) -> Ranks:
    """The strategy."""
    return evened(problem, problem.fit(problem, differenced(problem)))


def evened(problem: Problem, start: Ranks) -> Ranks:
    """After exchanges that see to what the method does not know: speeds and caps."""
    if problem.same_speeds and problem.arrays.memory.size == 0:
        return start
    return exchange_from(problem, start, effort=1)[0]


def differenced(problem: Problem) -> Ranks:
    """(n,) rank of each sample; of ranks that differ the faster ones get the larger sets."""
    arrays, num_ranks = problem.arrays, problem.num_ranks
    sets = difference(arrays.costs, problem.order, num_ranks, not problem.free)
    kinds = kinds_of_ranks(problem)
    if int(kinds.max()) == 0:
        return match_home(problem, sets, kinds, kinds)
    sums, counts, wanted = np.zeros(num_ranks, np.int64), np.bincount(sets, minlength=num_ranks), arrays.most
    np.add.at(sums, sets, arrays.costs)
    if (arrays.fewest < arrays.most).any():
        counts = wanted = np.zeros(num_ranks, np.int64)
    caps = arrays.caps if arrays.caps.size else np.zeros(num_ranks)
    set_kinds = np.empty(num_ranks, np.int32)
    set_kinds[np.lexsort((-sums, counts))] = kinds[np.lexsort((-caps, -arrays.speeds, wanted))]
    return match_home(problem, sets, kinds, set_kinds)
