"""From a start to its best neighbourhood: the plain pass, then the search that goes on from where it ends."""

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.groups import Groups, everyone
from evenkeel.partitioning.minimal_move import exchange_plainly
from evenkeel.partitioning.problem import Problem
from evenkeel.partitioning.tabu import search

CHOICES = 640  # samples of all the ranks that a rank above its limit chooses from in the plain pass, about
MOST_CHOICES = 12  # ranks that it chooses from at most


def exchange_from(
    problem: Problem, start: NDArray[np.int32], *, plain: bool, effort: int, groups: Groups | None = None
) -> tuple[NDArray[np.int32], float]:
    """Exchange from `start` on, inside each group; the destinations and the largest overload that is left."""
    destinations = start.copy()
    least = np.inf
    groups = groups or everyone(problem.num_ranks)
    choices = max(1, min(MOST_CHOICES, CHOICES * problem.num_ranks // max(start.size, 1)))
    for _ in range(12):
        if plain and exchange_plainly(problem.terms, problem.order, *groups, choices, destinations) == 0:
            return destinations, 0.0
        least, cramped = search(problem.terms, problem.order, *groups, effort, destinations)
        if least <= 0 or not cramped:
            break
    return destinations, least
