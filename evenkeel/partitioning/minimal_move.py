"""The default strategy: start from where the samples are and move as few as possible."""

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.compile import kernel
from evenkeel.partitioning.errors import PartitionError
from evenkeel.partitioning.exchanging import PATIENCE, exchange_from, shed
from evenkeel.partitioning.fitting import fit_memory
from evenkeel.partitioning.karmarkar_karp import evened
from evenkeel.partitioning.nodes import balance_nodes
from evenkeel.partitioning.problem import Problem, counts_and_loads, with_crowding
from evenkeel.partitioning.rows import ACROSS
from evenkeel.partitioning.starts import at_home, differenced, longest_first

HEAVY = 1 / 8  # of what a rank gets: with samples as heavy, what can be had is looked at before anything is tried
MANY = 16  # ranks from which on that takes less than trying


def _limit(problem: Problem) -> float:
    return float((problem.terms.limits / problem.terms.speeds).max())


def _heaviest(problem: Problem) -> float:
    return float(problem.terms.costs[problem.order[-1]])


def _crowded(problem: Problem) -> bool:
    """Whether heavy samples keep every partition more than twice the tolerance above the plain bound."""
    return _limit(problem) / (1.0 + problem.tolerance) > problem.bound * (1.0 + 2.0 * problem.tolerance)


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
    load = largest / problem.bound if problem.bound > 0 else 1.0
    return load + problem.move_price * _share(problem, destinations)


def _may_stay(problem: Problem) -> bool:
    """Whether every sample may stay at home."""
    terms, counts = problem.terms, problem.home_counts
    return not terms.memory.size and bool((counts >= terms.fewest).all() and (counts <= terms.most).all())


def minimal_move(problem: Problem) -> NDArray[np.int32]:
    """Start at home; exchange as little as possible until the load is within tolerance of the bound.

    Where heavy samples do not divide evenly over the ranks, limits say so before much is tried. Where exchanging ends
    short all the same, the other methods' partitions are searched from as well, inside the nodes first. They move
    nearly everything: they are looked at where more is left to gain, and taken where load and moves together take less
    time than before. If nothing does that takes less than staying, all samples stay.
    """
    best, largest = _exchanged(problem)
    terms, home = problem.terms, largest_load(problem.home_loads, problem.terms.speeds)
    if home <= largest + problem.move_price * problem.bound and _may_stay(problem):
        loads = counts_and_loads(terms.costs, best, problem.num_ranks)[1]
        if _time(problem, terms.homes, home) <= _time(problem, best, largest_load(loads, terms.speeds)):
            return terms.homes.copy()
    return best


def _share(problem: Problem, destinations: NDArray[np.int32]) -> float:
    return moved_share(problem.terms.sizes, problem.terms.homes, problem.terms.nodes, destinations)


def _largest(problem: Problem, destinations: NDArray[np.int32]) -> float:
    return largest_load(counts_and_loads(problem.terms.costs, destinations, problem.num_ranks)[1], problem.terms.speeds)


def _exchanged(problem: Problem) -> tuple[NDArray[np.int32], float]:
    """Where samples go, and how much the rank that takes longest has to do at most."""
    if problem.num_nodes in (1, problem.num_ranks) or problem.terms.memory.size:
        start = fit_memory(problem, at_home(problem))
        early = problem.num_ranks >= MANY and _heaviest(problem) >= HEAVY * problem.bound
        if early:
            problem = with_crowding(problem)
        best, stuck = shed(problem, start)
        if stuck and not early:
            problem = with_crowding(problem)
            if _crowded(problem):  # what was tried cannot be had: less has to move for what can
                best, stuck = shed(problem, start)
        least = 0.0
        if stuck:
            best, least = exchange_from(problem, best, plain=False, effort=4, patience=PATIENCE)
    else:
        best, least = balance_nodes(problem)
        if least > 0:
            problem = with_crowding(problem)
            best, least = exchange_from(problem, best, plain=True, effort=4)
    limit = _limit(problem)
    for method, effort in ((longest_first, 8), (differenced, 4)):
        if least <= 0:
            break
        try:
            other = fit_memory(problem, method(problem))
        except PartitionError:
            continue
        if least <= problem.bound * problem.move_price * (_share(problem, other) - _share(problem, best)):
            continue  # all that it could save is less than what it moves more
        searched, overload = exchange_from(problem, other, plain=False, effort=effort)
        if overload > 0:  # limits are rounded rank by rank: overloads alone do not tell what is worse than the method
            other = evened(problem, other) if method is differenced else other
        for found in (searched, other):
            if _time(problem, found, _largest(problem, found)) < _time(problem, best, _largest(problem, best)):
                best, least = found, min(overload, least)
    return best, limit if least <= 0 else _largest(problem, best)
