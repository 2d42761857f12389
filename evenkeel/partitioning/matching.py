"""Which rank trains which set, so that as much size as possible stays home."""

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.compile import ZERO, kernel
from evenkeel.partitioning.rows import ACROSS
from evenkeel.partitioning.sorting import ascending_order

EXACT = 96  # ranks up to which the best matching is found; beyond, a greedy one
KEPT = 8  # largest overlaps of a set that each round of the greedy matching looks at
PLACES = 1 << 24  # (node, kind) pairs up to which sets are given their nodes before their ranks


@kernel
def heaviest_assignment(weights: NDArray[np.float64]) -> NDArray[np.int32]:
    """(n,) int32 column of each row of the (n, n) `weights`, so that their sum is greatest.

    Shortest augmenting paths with dual prices (Kuhn 1955, Jonker and Volgenant 1987), O(n^3).
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
def _members(sets: NDArray[np.int32], num_sets: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Samples by set, and where each set begins."""
    begin = np.zeros(num_sets + 1, np.int64)
    for s in sets:
        begin[s + 1] += 1
    for s in range(num_sets):
        begin[s + 1] += begin[s]
    place = begin[:-1].copy()
    members = np.empty(sets.size, np.int32)
    for i in range(sets.size):
        members[place[sets[i]]] = i
        place[sets[i]] += 1
    return members, begin


@kernel
def _match_greedily(
    members: NDArray[np.int32],
    begin: NDArray[np.int64],
    places: NDArray[np.int32],
    offsets: NDArray[np.int32],
    sizes: NDArray[np.float64],
    room: NDArray[np.int64],
    groups: NDArray[np.int32],
    set_groups: NDArray[np.int32],
) -> NDArray[np.int32]:
    """Place of each set, largest shared size first, in rounds over each open set's largest overlaps.

    A sample's own place is `places[sample] + offsets[set]`; a set may only go to places of its group that have room.
    """
    num_sets = set_groups.size
    chosen = np.full(num_sets, -1, np.int32)
    shared, seen = np.zeros(room.size), np.full(room.size, -1, np.int32)
    touched = np.empty(members.size, np.int32)
    pair_set, pair_place = np.empty(num_sets * KEPT, np.int32), np.empty(num_sets * KEPT, np.int32)
    pair_size = np.empty(num_sets * KEPT)
    progress = True
    while progress:
        progress = False
        num_pairs = 0
        for place in range(seen.size):
            seen[place] = -1
        for s in range(num_sets):
            if chosen[s] >= 0:
                continue
            num_touched = 0
            for position in range(begin[s], begin[s + 1]):
                i = members[position]
                place = places[i] + offsets[s]
                if room[place] == 0 or groups[place] != set_groups[s]:
                    continue
                if seen[place] != s:
                    seen[place] = s
                    shared[place] = 0.0
                    touched[num_touched] = place
                    num_touched += 1
                shared[place] += sizes[i]
            kept = 0
            for x in range(num_touched):
                size = shared[touched[x]]
                if kept == KEPT and size <= pair_size[num_pairs + kept - 1]:
                    continue
                kept = min(kept + 1, KEPT)
                y = num_pairs + kept - 1
                while y > num_pairs and pair_size[y - 1] < size:
                    pair_size[y], pair_place[y] = pair_size[y - 1], pair_place[y - 1]
                    y -= 1
                pair_size[y], pair_place[y] = size, touched[x]
            for y in range(num_pairs, num_pairs + kept):
                pair_set[y] = s
            num_pairs += kept
        order = ascending_order(pair_size[:num_pairs].view(np.int64))
        for x in range(num_pairs - 1, -1, -1):
            s, place = pair_set[order[x]], pair_place[order[x]]
            if chosen[s] < 0 and room[place] > 0:
                chosen[s] = place
                room[place] -= 1
                progress = True
    # What shares nothing with an open place takes the first open one.
    num_groups = ZERO
    for group in groups:
        num_groups = max(num_groups, int(group) + 1)
    by_group, first_of_group = _members(groups, num_groups)
    for s in range(num_sets):
        if chosen[s] < 0:
            x = first_of_group[set_groups[s]]
            while room[by_group[x]] == 0:
                x += 1
            first_of_group[set_groups[s]] = x
            chosen[s] = by_group[x]
            room[chosen[s]] -= 1
    return chosen


@kernel
def _weights(
    sets: NDArray[np.int32],
    set_kinds: NDArray[np.int32],
    rank_kinds: NDArray[np.int32],
    homes: NDArray[np.int32],
    sizes: NDArray[np.float64],
    nodes: NDArray[np.int32],
) -> NDArray[np.float64]:
    """(num_ranks, num_ranks) what is saved if a set goes to a rank."""
    num_ranks = rank_kinds.size
    weights, stays = np.zeros((num_ranks, num_ranks)), np.zeros(num_ranks)
    num_nodes = 0
    for node in nodes:
        num_nodes = max(num_nodes, node + 1)
    barred = 1.0
    for i in range(sets.size):
        weights[sets[i], homes[i]] += sizes[i]
        barred += sizes[i]
    barred *= -ACROSS * (num_ranks + 1.0)
    for s in range(num_ranks):
        for r in range(num_ranks):
            stays[r] = 0.0
        if num_nodes > 1:
            for r in range(num_ranks):
                stays[nodes[r]] += (ACROSS - 1.0) * weights[s, r]
        for r in range(num_ranks):
            weights[s, r] += stays[nodes[r]]
            if set_kinds[s] != rank_kinds[r]:
                weights[s, r] = barred
    return weights


def match_sets(
    sets: NDArray[np.int32],
    set_kinds: NDArray[np.int32],
    rank_kinds: NDArray[np.int32],
    homes: NDArray[np.int32],
    sizes: NDArray[np.float64],
    nodes: NDArray[np.int32],
) -> NDArray[np.int32]:
    """(num_ranks,) int32 rank of each set; sets go to ranks of their own kind, staying in the node counting most."""
    num_ranks, num_nodes = rank_kinds.size, int(nodes.max()) + 1
    if num_ranks <= EXACT:
        return heaviest_assignment(_weights(sets, set_kinds, rank_kinds, homes, sizes, nodes))
    members, begin = _members(sets, num_ranks)
    groups, set_groups, num_kinds = rank_kinds, set_kinds, int(rank_kinds.max()) + 1
    if num_nodes > 1 and num_nodes * num_kinds <= PLACES:
        # First the node: a place is a (node, kind), and has room for as many sets as it has ranks.
        groups = nodes * np.int32(num_kinds) + rank_kinds
        room = np.bincount(groups, minlength=num_nodes * num_kinds)
        places = nodes[homes] * np.int32(num_kinds)
        kinds_of_places = np.arange(room.size, dtype=np.int32) % np.int32(num_kinds)
        set_groups = _match_greedily(members, begin, places, set_kinds, sizes, room, kinds_of_places, set_kinds)
    nothing, room = np.zeros(num_ranks, np.int32), np.ones(num_ranks, np.int64)
    return _match_greedily(members, begin, homes, nothing, sizes, room, groups, set_groups)
