"""Ranks that a search left with too few samples get some of the lightest."""

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.problem import Problem


def fill(problem: Problem, destinations: NDArray[np.int32], at_least: int) -> NDArray[np.int32]:
    """The assignment with at least so many samples on each rank, or floor of the mean where there are fewer.

    A rank that has too few takes the lightest sample of those that have more, one after the other; of equal ones the
    one that is smallest to move. The memory caps come first: a rank on which no sample has room stays as it is.

    Args:
        problem: What was assigned.
        destinations: (n,) rank of each sample.
        at_least: Samples of each rank.
    """
    terms = problem.terms
    counts = np.bincount(destinations, minlength=problem.num_ranks)
    at_least = min(at_least, destinations.size // problem.num_ranks)
    short = np.flatnonzero(counts < at_least)
    if not short.size:
        return destinations
    filled = destinations.copy()
    lightest_first = np.lexsort((terms.sizes, terms.costs))
    held = None
    if terms.caps.size:
        held = np.zeros(problem.num_ranks, np.int64)
        np.add.at(held, filled, terms.memory)
    for rank in short:
        while counts[rank] < at_least:
            spare = counts[filled] > at_least
            if held is not None:
                spare &= held[rank] + terms.memory <= terms.caps[rank]
            found = lightest_first[spare[lightest_first]]
            if not found.size:
                break
            sample = found[0]
            giver = filled[sample]
            filled[sample] = rank
            counts[giver] -= 1
            counts[rank] += 1
            if held is not None:
                held[giver] -= terms.memory[sample]
                held[rank] += terms.memory[sample]
    return filled
