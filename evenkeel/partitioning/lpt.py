"""Longest processing time first (Graham 1969): the heaviest sample onto the least loaded rank that has room for it."""

from __future__ import annotations

import numpy as np

from evenkeel.partitioning.compile import ZERO, kernel
from evenkeel.partitioning.local_search import Groups, everyone, pop, push, sink
from evenkeel.partitioning.matching import kinds_of_ranks, match_home
from evenkeel.partitioning.problem import Arrays, Integers, Problem, Ranks


@kernel
def place_longest_first(arrays: Arrays, items: Ranks, item_begin: Integers, groups: Groups, placed: Ranks) -> None:
    """Places each group's items onto its ranks, beside what is `placed` already: (n,) rank of each sample, or -1.

    Group g has `items[item_begin[g]:item_begin[g + 1]]`, ascending by cost and taken from the end. Of its ranks equally
    loaded ones get items in their order, and all get their fewest. A sample that fits under no rank's memory cap goes
    where it overflows least, for later repair.
    """
    ranks, num_ranks = groups.ranks, arrays.most.size
    loads, used, counts = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    for item in range(placed.size):
        if placed[item] >= 0:
            loads[placed[item]] += arrays.costs[item]
            counts[placed[item]] += 1
            if arrays.memory.size > 0:
                used[placed[item]] += arrays.memory[item]
    heap, aside = np.empty(ranks.size, np.int64), np.empty(ranks.size, np.int64)  # of places among the group's ranks
    weight = np.empty(ranks.size, np.float64)  # less the time of each
    for group in range(groups.begin.size - 1):
        own = ranks[groups.begin[group] : groups.begin[group + 1]]
        size, spare = ZERO, item_begin[group + 1] - item_begin[group]  # items beyond the fewest of all ranks
        for x in range(own.size):
            spare -= max(arrays.fewest[own[x]] - counts[own[x]], ZERO)
            weight[x] = -loads[own[x]] / arrays.speeds[own[x]]
            size = push(heap, size, x, weight)
        for i in range(item_begin[group + 1] - 1, item_begin[group] - 1, -1):
            item, num_aside, x = items[i], 0, ZERO
            while size > 0:
                x = heap[0]
                rank = own[x]
                if counts[rank] < arrays.fewest[rank] or (spare > 0 and counts[rank] < arrays.most[rank]):
                    if arrays.memory.size == 0 or used[rank] + arrays.memory[item] <= arrays.caps[rank]:
                        break
                    aside[num_aside] = x
                    num_aside += 1
                size = pop(heap, size, ZERO, weight)
            if size == 0:
                x = aside[0]
                for y in range(1, num_aside):
                    if arrays.caps[own[aside[y]]] - used[own[aside[y]]] > arrays.caps[own[x]] - used[own[x]]:
                        x = aside[y]
            rank = own[x]
            placed[item] = rank
            spare -= counts[rank] >= arrays.fewest[rank]
            loads[rank] += arrays.costs[item]
            counts[rank] += 1
            if arrays.memory.size > 0:
                used[rank] += arrays.memory[item]
            weight[x] = -loads[rank] / arrays.speeds[rank]
            sink(heap, size, ZERO, weight)  # the rank is on top, or aside
            for y in range(num_aside):
                size = push(heap, size, aside[y], weight)


def place(problem: Problem, placed: Ranks, node_of_sample: Ranks | None = None) -> None:
    """Places what is nowhere yet, -1 in (n,) `placed`, each sample inside its node if these are given.

    Of equally loaded ranks the fastest comes first.
    """
    items, groups = problem.order[placed[problem.order] < 0], everyone(problem.num_ranks)
    begin = np.array([0, items.size])
    if node_of_sample is not None:
        groups = Groups.by_node(problem.arrays.nodes, problem.num_nodes)
        by_node, begin = Groups.by_node(node_of_sample[items], problem.num_nodes)
        items = items[by_node]
    if not problem.same_speeds:
        group_of = np.repeat(np.arange(groups.begin.size - 1), np.diff(groups.begin))
        groups = groups._replace(ranks=groups.ranks[np.lexsort((-problem.arrays.speeds[groups.ranks], group_of))])
    place_longest_first(problem.arrays, items, begin, groups, placed)


def lpt(problem: Problem) -> Ranks:
    """The strategy."""
    return problem.fit(problem, longest_first(problem))


def longest_first(problem: Problem) -> Ranks:
    """(n,) rank of each sample; ranks of a kind swap what they got, so that much stays home."""
    sets = np.full(problem.arrays.costs.size, -1, np.int32)
    place(problem, sets)
    kinds = kinds_of_ranks(problem)
    return match_home(problem, sets, kinds, kinds)


@kernel
def spill(order: Ranks, keep: Integers, destinations: Ranks) -> None:
    """Takes from ranks that hold more than `keep`, evenly over their sorted costs; what leaves becomes -1."""
    counts, seen = np.zeros(keep.size, np.int64), np.zeros(keep.size, np.int64)
    for rank in destinations:
        if rank >= 0:
            counts[rank] += 1
    for i in order:
        rank = destinations[i]
        if rank >= 0 and counts[rank] > keep[rank]:
            surplus = counts[rank] - keep[rank]
            before = seen[rank] * surplus // counts[rank]
            seen[rank] += 1
            if seen[rank] * surplus // counts[rank] > before:
                destinations[i] = -1
