"""The default strategy, which moves little.

It starts where the samples are and exchanges as few as possible until the load is within tolerance of the bound; where
there are nodes, between them first, so that only what one node has too much of leaves it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from evenkeel.partitioning.karmarkar_karp import differenced, evened
from evenkeel.partitioning.local_search import ACROSS, Groups, exchange_from, give_light_company
from evenkeel.partitioning.lpt import longest_first, place, spill
from evenkeel.partitioning.problem import (
    Integers,
    PartitionError,
    Problem,
    Ranks,
    counts_and_loads,
    largest_load,
    moved_sizes,
    with_crowding,
    with_limits,
)

HEAVY = 1 / 8  # of what a rank gets: with samples as heavy, what can be had is looked at before anything is tried
SKEW = 1.5  # a home whose load is this many times its limit sheds samples in bulk before single ones are looked at


def _share(problem: Problem, destinations: Ranks) -> float:
    """Share of all sizes that moves, weighed: what stays in its node counts little, if anything can leave it."""
    arrays = problem.arrays
    total, _, moved, between = moved_sizes(arrays.sizes, arrays.homes, arrays.nodes, destinations)
    inside = 1.0 / ACROSS if problem.num_nodes > 1 else 1.0
    return (between + inside * (moved - between)) / total if total > 0.0 else 0.0


def _largest(problem: Problem, destinations: Ranks) -> float:
    """The load over speed of the rank that takes longest."""
    loads = counts_and_loads(problem.arrays.costs, destinations, problem.num_ranks)[1]
    return largest_load(loads, problem.arrays.speeds)


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
    best, least, problem = _search_from(problem, _start(problem))
    largest = largest_load(problem.arrays.limits, problem.arrays.speeds) if least <= 0 else _largest(problem, best)
    for method in (longest_first, differenced):
        if least <= 0:
            break
        try:
            other = problem.fit(problem, method(problem))
        except PartitionError:
            continue
        if least <= problem.bound * problem.move_price * (_share(problem, other) - _share(problem, best)):
            continue  # all that it could save is less than what it moves more
        searched, overload = exchange_from(problem, other, plain=False, effort=8)
        if overload > 0:  # limits are rounded rank by rank: overloads alone do not tell what is worse than the method
            other = evened(problem, other) if method is differenced else other
        for candidate in (searched, other):
            if _time(problem, candidate) < _time(problem, best):
                best, least, largest = candidate, min(overload, least), _largest(problem, candidate)
    arrays, counts = problem.arrays, problem.home_counts
    home = largest_load(problem.home_loads, arrays.speeds)
    if home <= largest + problem.move_price * problem.bound and not arrays.memory.size:
        may_stay = bool((counts >= arrays.fewest).all() and (counts <= arrays.most).all())
        if may_stay and _time(problem, arrays.homes) <= _time(problem, best):
            return arrays.homes.copy()
    return best


def _search_from(problem: Problem, start: Ranks) -> tuple[Ranks, float, Problem]:
    """Exchanges from a start on, the largest overload left, and the problem with the limits that can be had.

    Where heavy samples do not divide evenly over the ranks, these limits are looked for before much is tried.
    """
    if float(problem.arrays.costs[problem.order[-1]]) >= HEAVY * problem.bound:
        problem = with_crowding(problem)
    best, least = exchange_from(problem, start)
    if least > 0 and not problem.arrays.memory.size:
        other = best.copy()
        if give_light_company(problem.arrays, problem.order, other):
            other, overload = exchange_from(problem, other)
            if overload < least:
                best, least = other, overload
    if least > 0:
        best, least = exchange_from(problem, best, plain=False, effort=12)
    return best, least, problem


def _node_sums(problem: Problem, values: Integers) -> Integers:
    sums = np.zeros(problem.num_nodes, np.int64)
    np.add.at(sums, problem.arrays.nodes, values)
    return sums


def between_nodes(problem: Problem, keep: Integers) -> Problem:
    """The same problem with nodes for ranks, their limits half the tolerance above what their ranks should carry."""
    arrays, num_nodes = problem.arrays, problem.num_nodes
    counts = _node_sums(problem, keep)
    of_nodes = arrays._replace(
        homes=arrays.nodes[arrays.homes],
        fewest=np.zeros(num_nodes, np.int64) if problem.free else counts,
        most=np.full(num_nodes, arrays.costs.size) if problem.free else counts,
        speeds=np.bincount(arrays.nodes, weights=arrays.speeds).astype(np.float64),
        nodes=np.arange(num_nodes, dtype=np.int32),
    )
    return replace(
        problem,
        arrays=with_limits(of_nodes, problem.bound, problem.tolerance / 2),
        num_ranks=num_nodes,
        home_counts=_node_sums(problem, problem.home_counts),
        home_loads=_node_sums(problem, problem.home_loads),
    )


def _start(problem: Problem) -> Ranks:
    """The homes, brought within counts and memory caps; or after exchanges between nodes, then inside each."""
    arrays = problem.arrays
    if problem.num_nodes in (1, problem.num_ranks) or arrays.memory.size:
        return problem.fit(problem, at_home(problem))
    keep = kept_at_home(problem)
    between = between_nodes(problem, keep)
    node_of_sample, _ = exchange_from(between, at_home(between), effort=1)
    destinations = np.where(node_of_sample == arrays.nodes[arrays.homes], arrays.homes, np.int32(-1))
    spill(problem.order, keep, destinations)
    place(problem, destinations, node_of_sample)
    groups = Groups.by_node(arrays.nodes, problem.num_nodes)
    return exchange_from(problem, destinations, effort=8, groups=groups)[0]


def kept_at_home(problem: Problem) -> Integers:
    """How many of its own samples each rank may keep at the start.

    Counts may force some to leave; with free counts, gross overload does.
    """
    arrays, counts = problem.arrays, problem.home_counts
    if arrays.fewest is counts:  # they are as even as counts get
        return counts
    if not problem.free:
        keep = arrays.fewest.copy()
        fuller = np.argsort(-counts, kind="stable")[: counts.sum() - keep.sum()]
        keep[fuller] = arrays.most[fuller]
        return keep
    keep = counts.copy()
    over = problem.home_loads > SKEW * arrays.limits
    keep[over] = (counts[over] * (arrays.limits[over] / problem.home_loads[over])).astype(np.int64)
    return keep


def at_home(problem: Problem) -> Ranks:
    """The homes, after whatever had to leave went where the load is least."""
    destinations = problem.arrays.homes.copy()
    keep = kept_at_home(problem)
    if bool((problem.home_counts > keep).any()):
        spill(problem.order, keep, destinations)
        place(problem, destinations)
    return destinations
