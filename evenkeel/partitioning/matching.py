"""Which rank trains which set, so that as much size as possible stays home."""

from __future__ import annotations

import numpy as np

from evenkeel.partitioning.compile import kernel
from evenkeel.partitioning.local_search import ACROSS
from evenkeel.partitioning.problem import Floats, Integers, Problem, Ranks, ascending_order

EXACT = 96  # ranks up to which the best matching is found; beyond, a greedy one


@kernel
def heaviest_assignment(weights: Floats) -> Ranks:
    """(n,) int32 column of each row of the (n, n) `weights`, so that their sum is greatest.

    Shortest augmenting paths with dual prices (Kuhn 1955, Jonker and Volgenant 1987), O(n^3).
    SciPy's would make the balancer's image much larger.
    """
    n = weights.shape[0]
    row_price, column_price = np.zeros(n + 1), np.zeros(n + 1)
    row_of = np.zeros(n + 1, np.int64)  # of each column, counted from 1; 0 is free
    before = np.zeros(n + 1, np.int64)
    for row in range(1, n + 1):
        row_of[0] = row
        column = 0
        distance = np.full(n + 1, np.inf)
        done = np.zeros(n + 1, np.bool_)
        while row_of[column] != 0:
            done[column] = True
            current, nearest, next_column = row_of[column], np.inf, 0
            for j in range(1, n + 1):
                if not done[j]:
                    reduced = -weights[current - 1, j - 1] - row_price[current] - column_price[j]
                    if reduced < distance[j]:
                        distance[j] = reduced
                        before[j] = column
                    if distance[j] < nearest:
                        nearest = distance[j]
                        next_column = j
            for j in range(n + 1):
                if done[j]:
                    row_price[row_of[j]] += nearest
                    column_price[j] -= nearest
                else:
                    distance[j] -= nearest
            column = next_column
        while column != 0:
            row_of[column] = row_of[before[column]]
            column = before[column]
    columns = np.empty(n, np.int32)
    for j in range(1, n + 1):
        columns[row_of[j] - 1] = j - 1
    return columns


@kernel
def match_greedily(
    sets: Ranks, places: Integers, sizes: Floats, set_kinds: Ranks, place_kinds: Ranks, room: Integers
) -> Ranks:
    """(num_sets,) int32 place of each set, of its kind and with `room`, the pair that shares most size first."""
    pairs, room, chosen = np.empty(sets.size, np.int64), room.copy(), np.full(set_kinds.size, -1, np.int32)
    for i in range(sets.size):
        pairs[i] = np.int64(sets[i]) * place_kinds.size + places[i]
    samples, shared, count, last = np.empty(sets.size, np.int32), np.zeros(sets.size), 0, np.int64(-1)
    for i in ascending_order(pairs):
        if pairs[i] != last:
            samples[count], last = i, pairs[i]  # one of the pair's
            count += 1
        shared[count - 1] += sizes[i]
    by_size = ascending_order(shared[:count].view(np.int64))
    for x in range(count - 1, -1, -1):
        s, place = sets[samples[by_size[x]]], places[samples[by_size[x]]]
        if chosen[s] < 0 and room[place] > 0 and place_kinds[place] == set_kinds[s]:
            chosen[s] = place
            room[place] -= 1
    # What shares nothing with an open place takes the first open one of its kind.
    by_kind = np.argsort(place_kinds, kind="mergesort")
    at = 0
    for s in np.argsort(set_kinds, kind="mergesort"):
        if chosen[s] < 0:
            while place_kinds[by_kind[at]] < set_kinds[s] or room[by_kind[at]] == 0:
                at += 1
            chosen[s] = by_kind[at]
            room[chosen[s]] -= 1
    return chosen


def _saved(problem: Problem, sets: Ranks, kinds: Ranks, set_kinds: Ranks) -> Floats:
    """(num_ranks, num_ranks) what does not move if a set goes to a rank; far below 0 where it may not."""
    arrays, num_ranks = problem.arrays, problem.num_ranks
    pairs = sets.astype(np.int64) * num_ranks + arrays.homes
    saved = np.bincount(pairs, arrays.sizes, num_ranks * num_ranks).astype(np.float64).reshape(num_ranks, num_ranks)
    barred = -ACROSS * (num_ranks + 1.0) * (1.0 + float(np.cumsum(saved)[-1]))
    if problem.num_nodes > 1:
        of_node = np.zeros((num_ranks, problem.num_nodes))
        for rank, node in enumerate(arrays.nodes.tolist()):  # in the order of the ranks: sums that are alike everywhere
            of_node[:, node] += (ACROSS - 1.0) * saved[:, rank]
        saved = saved + of_node[:, arrays.nodes]
    saved[set_kinds[:, None] != kinds[None, :]] = barred
    return np.ascontiguousarray(saved)


def kinds_of_ranks(problem: Problem) -> Ranks:
    """(num_ranks,) equal numbers for ranks that can exchange their whole sets."""
    arrays = problem.arrays
    columns = np.stack([arrays.most.astype(np.float64), arrays.speeds, *([arrays.caps] if arrays.caps.size else [])])
    if (columns == columns[:, :1]).all():  # what follows would find the same, and takes longer
        return np.zeros(problem.num_ranks, np.int32)
    return np.unique(columns, axis=1, return_inverse=True)[1].reshape(-1).astype(np.int32)


def match_home(problem: Problem, sets: Ranks, kinds: Ranks, set_kinds: Ranks) -> Ranks:
    """(n,) int32 rank of each sample, if sets go to ranks of their kind where most stays home, or in its node."""
    arrays, num_ranks = problem.arrays, problem.num_ranks
    if num_ranks <= EXACT:
        return heaviest_assignment(_saved(problem, sets, kinds, set_kinds))[sets]
    if problem.num_nodes > 1:  # first the node: its ranks of a kind are one place
        own, num_kinds = arrays.nodes.astype(np.int64), int(kinds.max()) + 1
        distinct, places, room = np.unique(own * num_kinds + kinds, return_inverse=True, return_counts=True)
        wanted = own[arrays.homes] * num_kinds + set_kinds[sets]
        near = np.minimum(np.searchsorted(distinct, wanted), distinct.size - 1)
        sizes = np.where(distinct[near] == wanted, arrays.sizes, 0.0)
        set_kinds = match_greedily(sets, near, sizes, set_kinds, (distinct % num_kinds).astype(np.int32), room)
        kinds = places.astype(np.int32)
    homes = arrays.homes.astype(np.int64)
    return match_greedily(sets, homes, arrays.sizes, set_kinds, kinds, np.ones(num_ranks, np.int64))[sets]
