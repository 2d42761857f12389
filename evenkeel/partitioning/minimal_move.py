"""The default strategy: start from where the samples are and move as few as possible."""

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.errors import PartitionError
from evenkeel.partitioning.exchanging import exchange_from
from evenkeel.partitioning.fitting import fit_memory
from evenkeel.partitioning.nodes import balance_nodes
from evenkeel.partitioning.problem import Problem, with_crowding
from evenkeel.partitioning.starts import at_home, differenced, longest_first


def _limit(problem: Problem) -> float:
    return float((problem.terms.limits / problem.terms.speeds).max())


def _near(problem: Problem) -> float:
    """What is near the plain bound, also where `with_crowding` has raised the limits: twice the tolerance above it."""
    return problem.bound * (1.0 + 2.0 * problem.tolerance)


def _done(problem: Problem, least: float) -> bool:
    """Whether no other start is tried: all are within their limits, and near the bound if any partition can be."""
    limit = _limit(problem)
    return least <= 0 and (least + limit <= _near(problem) or limit / (1.0 + problem.tolerance) > _near(problem))


def _better(problem: Problem, overload: float, least: float) -> bool:
    """Whether a partition that moves nearly everything is worth it: `overload` is what it leaves, not `least`.

    It gains more than the tolerance; or `least` is further than that from its limit; or it alone is near the bound.
    """
    limit = _limit(problem)
    return (
        least + limit > (overload + limit) * (1.0 + problem.tolerance)
        or (least > problem.tolerance * limit and overload < least)
        or least + limit > _near(problem) >= overload + limit
    )


def minimal_move(problem: Problem) -> NDArray[np.int32]:
    """Start at home; exchange as little as possible until the load is within tolerance of the bound.

    Where that ends short, the other methods' partitions are searched from as well, inside the nodes first. They move
    nearly everything, and are taken where that gains enough.
    """
    if problem.num_nodes in (1, problem.num_ranks) or problem.terms.memory.size:
        start = fit_memory(problem, at_home(problem))
        best, least = exchange_from(problem, start, plain=True, effort=1)
    else:
        best, least = balance_nodes(problem)
        if least > 0:
            best, least = exchange_from(problem, best, plain=True, effort=1)
    if least <= 0:
        return best
    problem = with_crowding(problem)
    best, least = exchange_from(problem, best, plain=False, effort=4)
    for method, effort in ((longest_first, 8), (differenced, 4)):
        if _done(problem, least):
            break
        try:
            other = fit_memory(problem, method(problem))
        except PartitionError:
            continue
        other, overload = exchange_from(problem, other, plain=False, effort=effort)
        if _better(problem, overload, least):
            best, least = other, overload
    return best
