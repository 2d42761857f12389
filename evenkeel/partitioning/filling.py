"""Least counts: ranks that would be left with too few samples take some from others."""

from __future__ import annotations

import numpy as np

from evenkeel.partitioning.problem import Problem, Ranks


def fill(problem: Problem, destinations: Ranks, at_least: int) -> Ranks:
    """The assignment with at least so many samples on each rank, or floor of the mean where there are fewer.

    A rank that has too few takes the lightest sample of those that have more, one after the other; of equal ones the
    one that is smallest to move. The memory caps come first: a rank on which no sample has room stays as it is.
    """
    arrays = problem.arrays
    counts = np.bincount(destinations, minlength=problem.num_ranks)
    at_least = min(at_least, destinations.size // problem.num_ranks)
    short = np.flatnonzero(counts < at_least)
    if not short.size:
        return destinations
    filled, lightest_first = destinations.copy(), np.lexsort((arrays.sizes, arrays.costs))
    memory = arrays.memory if arrays.caps.size else np.zeros(filled.size, np.int64)
    room = arrays.caps.copy() if arrays.caps.size else np.zeros(problem.num_ranks, np.int64)
    np.subtract.at(room, filled, memory)
    for rank in np.repeat(short, at_least - counts[short]).tolist():
        spare = (counts[filled] > at_least) & (memory <= room[rank])
        candidates = lightest_first[spare[lightest_first]]
        if candidates.size:
            sample = candidates[0]
            counts[[filled[sample], rank]] += [-1, 1]
            np.add.at(room, [filled[sample], rank], [memory[sample], -memory[sample]])
            filled[sample] = rank
    return filled
