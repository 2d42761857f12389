"""Nodes: samples are balanced between them first, so that only what one node has too much of leaves it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from evenkeel.partitioning.exchange import Groups, exchange_from
from evenkeel.partitioning.lpt import at_home, kept_at_home, place_in_groups, spill
from evenkeel.partitioning.matching import kinds_of_ranks, match_home
from evenkeel.partitioning.problem import Integers, Problem, Ranks, with_limits


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
        num_fuller=-1,
        home_counts=_node_sums(problem, problem.home_counts),
        home_loads=_node_sums(problem, problem.home_loads),
    )


def balance_nodes(problem: Problem) -> tuple[Ranks, float]:
    """Exchanges samples between nodes until none has too much, then between the ranks of each node.

    Where that ends short inside a node, its ranks start again from longest first.
    """
    arrays, num_nodes = problem.arrays, problem.num_nodes
    keep, most = kept_at_home(problem)
    between = between_nodes(problem, keep)
    node_of_sample, over_nodes = exchange_from(between, at_home(between), effort=1)
    groups = Groups.by_node(arrays.nodes, num_nodes)

    def place(destinations: Ranks) -> None:
        """Places what has no rank yet inside its node."""
        items = problem.order[destinations[problem.order] < 0]
        if items.size:
            by_node = Groups.by_node(node_of_sample[items], num_nodes)
            place_in_groups(problem, items[by_node.ranks], by_node.begin, groups, most, -1, destinations)

    destinations = np.where(node_of_sample == arrays.nodes[arrays.homes], arrays.homes, np.int32(-1))
    spill(problem.order, keep, destinations)
    place(destinations)
    best, least = exchange_from(problem, destinations, effort=1, groups=groups)
    if least > 0 and over_nodes <= 0:
        sets = np.full_like(best, -1)
        place(sets)
        kinds = kinds_of_ranks(problem) * np.int32(num_nodes) + arrays.nodes
        other, overload = exchange_from(
            problem, match_home(problem, sets, kinds, kinds), plain=False, effort=8, groups=groups
        )
        if overload <= 0:
            return other, overload
    return best, least
