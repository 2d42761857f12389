"""The default strategy: start from where the samples are and move as few as possible."""

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.compile import kernel
from evenkeel.partitioning.errors import PartitionError
from evenkeel.partitioning.exchanging import exchange_from
from evenkeel.partitioning.fitting import fit_memory
from evenkeel.partitioning.nodes import balance_nodes
from evenkeel.partitioning.problem import Problem, with_crowding
from evenkeel.partitioning.rows import ACROSS
from evenkeel.partitioning.starts import at_home, differenced, longest_first


def _limit(problem: Problem) -> float:
    return float((problem.terms.limits / problem.terms.speeds).max())


def _done(problem: Problem, overload: float) -> bool:
    """Whether no other start is tried: all are within their limits, and near the bound if any partition can be.

    Near the plain bound, also where `with_crowding` has raised the limits: twice the tolerance above it.
    """
    limit, near = _limit(problem), problem.bound * (1.0 + 2.0 * problem.tolerance)
    return overload <= 0 and (overload + limit <= near or limit / (1.0 + problem.tolerance) > near)


@kernel
def largest_load(loads: NDArray[np.int64], speeds: NDArray[np.float64]) -> float:
    """The load over speed of the rank that takes longest."""
    largest = 0.0
    for r in range(loads.size):
        largest = max(largest, loads[r] / speeds[r])
    return largest


@kernel
def moved_share(
    sizes: NDArray[np.float64], homes: NDArray[np.int32], nodes: NDArray[np.int32], destinations: NDArray[np.int32]
) -> float:
    """Share of all sizes that moves, weighed: what stays in its node counts little, if anything can leave it."""
    inside = 1.0
    for node in nodes:
        if node != nodes[0]:
            inside = 1.0 / ACROSS
    total, moved = 0.0, 0.0
    for i in range(destinations.size):
        total += sizes[i]
        if destinations[i] != homes[i]:
            moved += sizes[i] * (1.0 if nodes[homes[i]] != nodes[destinations[i]] else inside)
    return moved / total if total > 0.0 else 0.0


def _time(problem: Problem, destinations: NDArray[np.int32], largest: float) -> float:
    """What a partition takes, load and moves together, as a multiple of the bound on the load.

    Args:
        problem: Whose samples.
        destinations: Where they go.
        largest: Load over speed of the rank that takes longest.
    """
    terms = problem.terms
    load = largest / problem.bound if problem.bound > 0 else 1.0
    return load + problem.move_price * moved_share(terms.sizes, terms.homes, terms.nodes, destinations)


def _may_stay(problem: Problem) -> bool:
    """Whether every sample may stay at home."""
    terms, counts = problem.terms, problem.home_counts
    return not terms.memory.size and bool((counts >= terms.fewest).all() and (counts <= terms.most).all())


def minimal_move(problem: Problem) -> NDArray[np.int32]:
    """Start at home; exchange as little as possible until the load is within tolerance of the bound.

    Where that ends short, the other methods' partitions are searched from as well, inside the nodes first. They move
    nearly everything, and are taken where load and moves together take less time than before. If nothing does that
    takes less than staying, all samples stay.
    """
    best, largest = _exchanged(problem)
    homes, home = problem.terms.homes, largest_load(problem.home_loads, problem.terms.speeds)
    near = home <= largest + problem.move_price * problem.bound
    if near and _may_stay(problem) and _time(problem, homes, home) <= _time(problem, best, largest):
        return homes.copy()
    return best


def _exchanged(problem: Problem) -> tuple[NDArray[np.int32], float]:
    """Where samples go, and about how much the rank that takes longest has to do."""
    if problem.num_nodes in (1, problem.num_ranks) or problem.terms.memory.size:
        start = fit_memory(problem, at_home(problem))
        best, least = exchange_from(problem, start, plain=True, effort=1)
    else:
        best, least = balance_nodes(problem)
        if least > 0:
            best, least = exchange_from(problem, best, plain=True, effort=1)
    if least <= 0:
        return best, problem.bound
    problem = with_crowding(problem)
    best, least = exchange_from(problem, best, plain=False, effort=4)
    limit = _limit(problem)
    for method, effort in ((longest_first, 8), (differenced, 4)):
        if _done(problem, least):
            break
        try:
            other = fit_memory(problem, method(problem))
        except PartitionError:
            continue
        other, overload = exchange_from(problem, other, plain=False, effort=effort)
        if overload < least and _time(problem, other, overload + limit) < _time(problem, best, least + limit):
            best, least = other, overload
    return best, least + limit
