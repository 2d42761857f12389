"""Balance between the nodes first, so that only what one node has too much of leaves it."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.exchanging import exchange_from
from evenkeel.partitioning.groups import by_node
from evenkeel.partitioning.problem import Problem, with_limits
from evenkeel.partitioning.starts import at_home, kept_at_home, kinds_of_ranks, match_home, place_in_groups, spill


def _sums(nodes: NDArray[np.int32], values: NDArray[np.int64], num_nodes: int) -> NDArray[np.int64]:
    sums = np.zeros(num_nodes, np.int64)
    np.add.at(sums, nodes, values)
    return sums


def _between_nodes(problem: Problem, keep: NDArray[np.int64]) -> Problem:
    """The same problem with nodes for ranks, their limits half the tolerance above what their ranks should carry."""
    terms, num_nodes = problem.terms, problem.num_nodes
    held = _sums(terms.nodes, problem.home_counts, num_nodes)
    if problem.free:
        fewest, most = np.zeros(num_nodes, np.int64), np.full(num_nodes, terms.costs.size)
    else:
        fewest = most = _sums(terms.nodes, keep, num_nodes)
    of_nodes = terms._replace(
        homes=terms.nodes[terms.homes],
        fewest=fewest,
        most=most,
        speeds=np.bincount(terms.nodes, weights=terms.speeds).astype(np.float64),
        nodes=np.arange(num_nodes, dtype=np.int32),
    )
    return replace(
        problem,
        terms=with_limits(of_nodes, problem.bound, problem.tolerance / 2),
        num_ranks=num_nodes,
        num_fuller=-1,
        home_counts=held,
        home_loads=_sums(terms.nodes, problem.home_loads, num_nodes),
    )


def _items_by_node(
    items: NDArray[np.int32], node_of_sample: NDArray[np.int32], num_nodes: int
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    nodes = node_of_sample[items]
    begin = np.zeros(num_nodes + 1, np.int64)
    np.cumsum(np.bincount(nodes, minlength=num_nodes), out=begin[1:])
    return items[np.argsort(nodes, kind="stable")], begin


def balance_nodes(problem: Problem) -> tuple[NDArray[np.int32], float]:
    """Exchange samples between nodes until none has too much, then between the ranks of each node.

    Where that ends short inside a node, its ranks start again from longest first.

    Returns:
        The destinations, and the largest overload over speed that is left.
    """
    terms, num_nodes = problem.terms, problem.num_nodes
    keep, most = kept_at_home(problem)
    between = _between_nodes(problem, keep)
    node_of_sample, over_nodes = exchange_from(between, at_home(between), plain=True, effort=1)

    destinations = np.where(node_of_sample == terms.nodes[terms.homes], terms.homes, np.int32(-1))
    spill(problem.order, keep, destinations)
    pool = problem.order[destinations[problem.order] < 0]
    groups = by_node(terms.nodes, num_nodes)
    if pool.size:
        counts = np.bincount(destinations[destinations >= 0], minlength=problem.num_ranks)
        items, begin = _items_by_node(pool, node_of_sample, num_nodes)
        place_in_groups(problem, items, begin, groups, counts, most, -1, destinations)
    best, least = exchange_from(problem, destinations, plain=True, effort=1, groups=groups)
    if least > 0 and over_nodes <= 0:
        other = np.full_like(best, -1)
        items, begin = _items_by_node(problem.order, node_of_sample, num_nodes)
        counts = np.zeros(problem.num_ranks, np.int64)
        place_in_groups(problem, items, begin, groups, counts, most, -1, other)
        kinds = kinds_of_ranks(problem) * np.int32(num_nodes) + terms.nodes
        other = match_home(problem, other, kinds, kinds)
        other, overload = exchange_from(problem, other, plain=False, effort=8, groups=groups)
        if overload <= 0:
            return other, overload
    return best, least
