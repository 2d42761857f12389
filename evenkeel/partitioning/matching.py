"""Which rank trains which set, so that much of their size stays home."""

from __future__ import annotations

import numpy as np

from evenkeel.partitioning.compile import kernel
from evenkeel.partitioning.problem import Floats, Integers, Problem, Ranks, ascending_order


@kernel
def match_greedily(
    sets: Ranks, places: Integers, sizes: Floats, set_kinds: Ranks, place_kinds: Ranks, room: Integers
) -> Ranks:
    """(num_sets,) int32 place of each set, of its kind and with `room`, the pair that shares most size first."""
    room, chosen = room.copy(), np.full(set_kinds.size, -1, np.int32)
    latest, pair = np.full(chosen.size, -1, np.int64), np.empty(chosen.size, np.int64)  # each set's place, their pair
    samples, shared, count = np.empty(sets.size, np.int32), np.zeros(sets.size), 0
    for i in ascending_order(places):
        s = sets[i]
        if latest[s] != places[i]:
            latest[s], pair[s], samples[count] = places[i], count, i  # one of the pair's
            count += 1
        shared[pair[s]] += sizes[i]
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


def kinds_of_ranks(problem: Problem) -> Ranks:
    """(num_ranks,) equal numbers for ranks that can exchange their whole sets."""
    arrays = problem.arrays
    columns = [arrays.most, arrays.speeds, *([arrays.caps] if arrays.caps.size else [])]
    if all((column == column[0]).all() for column in columns):  # what follows would find the same, and takes longer
        return np.zeros(problem.num_ranks, np.int32)
    return np.unique(np.stack(columns), axis=1, return_inverse=True)[1].reshape(-1).astype(np.int32)


def match_home(problem: Problem, sets: Ranks, kinds: Ranks, set_kinds: Ranks) -> Ranks:
    """(n,) int32 rank of each sample, if sets go to ranks of their kind where much stays home, or in its node."""
    arrays = problem.arrays
    if problem.num_nodes > 1:  # first the node: its ranks of a kind are one place
        own, num_kinds = arrays.nodes.astype(np.int64), int(kinds.max()) + 1
        distinct, places, room = np.unique(own * num_kinds + kinds, return_inverse=True, return_counts=True)
        wanted = own[arrays.homes] * num_kinds + set_kinds[sets]
        near = np.minimum(np.searchsorted(distinct, wanted), distinct.size - 1)
        sizes = np.where(distinct[near] == wanted, arrays.sizes, 0.0)
        set_kinds = match_greedily(sets, near, sizes, set_kinds, (distinct % num_kinds).astype(np.int32), room)
        kinds = places.astype(np.int32)
    homes = arrays.homes.astype(np.int64)
    return match_greedily(sets, homes, arrays.sizes, set_kinds, kinds, np.ones(problem.num_ranks, np.int64))[sets]
