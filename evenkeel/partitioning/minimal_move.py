"""The strategies: Karmarkar-Karp and longest first as in the literature, and the default, which moves little.

`minimal_move` starts where the samples are and exchanges as few as possible until the load is within tolerance of the
bound; where there are nodes, between them first, so that only what one node has too much of leaves it.
"""

from __future__ import annotations

from evenkeel.partitioning.exchange import ACROSS, PATIENCE, exchange_from
from evenkeel.partitioning.karmarkar_karp import differenced
from evenkeel.partitioning.lpt import at_home, longest_first
from evenkeel.partitioning.nodes import balance_nodes
from evenkeel.partitioning.problem import (
    PartitionError,
    Problem,
    Ranks,
    counts_and_loads,
    moved_sizes,
    with_crowding,
)

HEAVY = 1 / 8  # of what a rank gets: with samples as heavy, what can be had is looked at before anything is tried
FAR_OFF = 2e-3  # of the bound, above the limits, where a longer search pays


def lpt(problem: Problem) -> Ranks:
    """Longest first onto the least loaded rank with room."""
    return problem.fit(problem, longest_first(problem))


def karmarkar_karp(problem: Problem) -> Ranks:
    """The largest differencing method; it knows no speeds or caps, which exchanges then see to."""
    return _evened(problem, problem.fit(problem, differenced(problem)))


def _evened(problem: Problem, start: Ranks) -> Ranks:
    if problem.interchangeable and problem.arrays.memory.size == 0:
        return start
    return exchange_from(problem, start, effort=1)[0]


def _start(problem: Problem) -> Ranks:
    if problem.arrays.most is problem.home_counts:  # the homes are as even as counts get
        return problem.arrays.homes.copy()
    return at_home(problem)


def _share(problem: Problem, destinations: Ranks) -> float:
    """Share of all sizes that moves, weighed: what stays in its node counts little, if anything can leave it."""
    arrays = problem.arrays
    total, _, moved, between = moved_sizes(arrays.sizes, arrays.homes, arrays.nodes, destinations)
    inside = 1.0 / ACROSS if problem.num_nodes > 1 else 1.0
    return (between + inside * (moved - between)) / total if total > 0.0 else 0.0


def _largest(problem: Problem, destinations: Ranks) -> float:
    """The load over speed of the rank that takes longest."""
    loads = counts_and_loads(problem.arrays.costs, destinations, problem.num_ranks)[1]
    return float((loads / problem.arrays.speeds).max())


def _limit(problem: Problem) -> float:
    return float((problem.arrays.limits / problem.arrays.speeds).max())


def _time(problem: Problem, destinations: Ranks) -> float:
    """What a partition takes, load and moves together, as a multiple of the bound on the load."""
    load = _largest(problem, destinations) / problem.bound if problem.bound > 0 else 1.0
    return load + problem.move_price * _share(problem, destinations)


def minimal_move(problem: Problem) -> Ranks:
    """Starts at home; exchanges as little as possible until the load is within tolerance of the bound.

    Where that ends short, the other methods' partitions are searched from as well. They move nearly everything: they
    are looked at where more is left to gain, and taken where load and moves together take less time than before. If
    nothing does that takes less than staying, all samples stay.
    """
    if problem.num_nodes in (1, problem.num_ranks) or problem.arrays.memory.size:
        best, least, problem = _from_home(problem)
    else:
        best, least = balance_nodes(problem)
        if least > 0:
            problem = with_crowding(problem)
            best, least = exchange_from(problem, best, effort=4)
    largest = _limit(problem) if least <= 0 else _largest(problem, best)
    for method, effort in ((longest_first, 8), (differenced, 4)):
        if least <= 0:
            break
        try:
            other = problem.fit(problem, method(problem))
        except PartitionError:
            continue
        if least <= problem.bound * problem.move_price * (_share(problem, other) - _share(problem, best)):
            continue  # all that it could save is less than what it moves more
        searched, overload = exchange_from(problem, other, plain=False, effort=effort)
        if overload > 0:  # limits are rounded rank by rank: overloads alone do not tell what is worse than the method
            other = _evened(problem, other) if method is differenced else other
        for candidate in (searched, other):
            if _time(problem, candidate) < _time(problem, best):
                best, least, largest = candidate, min(overload, least), _largest(problem, candidate)
    arrays, counts = problem.arrays, problem.home_counts
    home = float((problem.home_loads / arrays.speeds).max())
    if home <= largest + problem.move_price * problem.bound and not arrays.memory.size:
        may_stay = bool((counts >= arrays.fewest).all() and (counts <= arrays.most).all())
        if may_stay and _time(problem, arrays.homes) <= _time(problem, best):
            return arrays.homes.copy()
    return best


def _from_home(problem: Problem) -> tuple[Ranks, float, Problem]:
    """Exchanges from the homes on, the largest overload left, and the problem with the limits that can be had.

    Where heavy samples do not divide evenly over the ranks, these limits are looked for before much is tried.
    """
    start = problem.fit(problem, _start(problem))
    heaviest = float(problem.arrays.costs[problem.order[-1]])
    early = heaviest >= HEAVY * problem.bound
    if early:
        problem = with_crowding(problem)
    best, least = exchange_from(problem, start)
    if least > 0 and not early:
        problem = with_crowding(problem)
    if least > 0:
        best, least = exchange_from(problem, best, plain=False, effort=4, patience=PATIENCE)
    if least > FAR_OFF * problem.bound:
        other, overload = exchange_from(problem, best, plain=False, effort=8)
        if _time(problem, other) < _time(problem, best):
            best, least = other, overload
    return best, least, problem
