"""Exchange as few samples as possible until every rank is within its limit: the plain pass, then the search."""

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.compile import ZERO, kernel
from evenkeel.partitioning.groups import Groups, everyone
from evenkeel.partitioning.heaviest_first import push, sink
from evenkeel.partitioning.problem import Problem
from evenkeel.partitioning.rows import Rows, Terms, build_rows, exchange, read_rows
from evenkeel.partitioning.swaps import cheapest_exchange, fullest_fill
from evenkeel.partitioning.tabu import search

TAKERS = 16  # ranks that a rank above its limit turns to in vain before the plain pass leaves it as it is
CHOICES = 640  # samples of all the ranks that a rank above its limit chooses from in the plain pass, about
PATIENCE = 60  # steps of the search that bring nothing before it ends, for each unit of effort
MOST_CHOICES = 12  # ranks that it chooses from at most


@kernel
def plain_pass(terms: Terms, rows: Rows, ranks: NDArray[np.int64], choices: int, slack: NDArray[np.float64]) -> int:
    """Bring each of `ranks` above its limit down to it, heaviest first, by exchanges with those that have most slack.

    Of the exchanges with the `choices` ranks of most slack the one is taken that moves least for the load it takes off.
    `slack` is (num_ranks,) to work in.

    Returns:
        Number of ranks that stay above their limits.
    """
    heap, givers = np.empty(ranks.size, np.int64), np.empty(ranks.size, np.int64)
    size, num_givers = ZERO, ZERO
    for r in ranks:
        slack[r] = (terms.limits[r] - rows.load[r]) / terms.speeds[r]
        if slack[r] > 0:
            heap[size] = r
            size += 1
        elif slack[r] < 0:
            givers[num_givers] = r
            num_givers += 1
            slack[r] = -slack[r]
    for i in range(size // 2 - 1, -1, -1):
        sink(heap, size, i, slack)
    for i in range(num_givers // 2 - 1, -1, -1):
        sink(givers, num_givers, i, slack)
    aside = np.empty(TAKERS, np.int64)
    stuck = 0
    while num_givers > 0:
        giver = givers[0]
        num_givers -= 1
        givers[0] = givers[num_givers]
        sink(givers, num_givers, ZERO, slack)
        num_aside = 0
        while rows.load[giver] > terms.limits[giver] and num_aside < TAKERS and size > 0 and slack[heap[0]] > 0:
            place, i, j = cheapest_exchange(terms, rows, giver, heap, min(choices, size))
            if place < 0:
                place, i, j = fullest_fill(terms, rows, giver, heap, min(choices, size))
            if place >= 0:
                taker = heap[place]
                exchange(terms, rows, giver, i, taker, j)
                slack[taker] = (terms.limits[taker] - rows.load[taker]) / terms.speeds[taker]
                sink(heap, size, place, slack)
            else:
                for place in range(min(choices, size, TAKERS - num_aside) - 1, -1, -1):
                    aside[num_aside] = heap[place]
                    num_aside += 1
                    size -= 1
                    heap[place] = heap[size]
                    sink(heap, size, place, slack)
        for i in range(num_aside):
            push(heap, size, aside[i], slack)
            size += 1
        slack[giver] = (terms.limits[giver] - rows.load[giver]) / terms.speeds[giver]
        if slack[giver] > 0:
            push(heap, size, giver, slack)
            size += 1
        stuck += slack[giver] < 0
    return stuck


@kernel
def exchange_plainly(
    terms: Terms,
    order: NDArray[np.int32],
    ranks: NDArray[np.int64],
    begin: NDArray[np.int64],
    choices: int,
    destinations: NDArray[np.int32],
) -> int:
    """The plain pass inside each group of ranks, `ranks[begin[g]:begin[g + 1]]`; `destinations` change in place.

    Returns:
        Number of ranks that stay above their limits.
    """
    rows = build_rows(terms, order, destinations)
    slack = np.empty(terms.limits.size, np.float64)
    stuck = 0
    for group in range(begin.size - 1):
        stuck += plain_pass(terms, rows, ranks[begin[group] : begin[group + 1]], choices, slack)
    read_rows(rows, ranks, destinations)
    return stuck


def shed(problem: Problem, start: NDArray[np.int32], groups: Groups | None = None) -> tuple[NDArray[np.int32], int]:
    """The plain pass from `start` on, inside each group: destinations, and how many ranks stay above their limits."""
    destinations = start.copy()
    choices = max(1, min(MOST_CHOICES, CHOICES * problem.num_ranks // max(start.size, 1)))
    stuck = exchange_plainly(
        problem.terms, problem.order, *(groups or everyone(problem.num_ranks)), choices, destinations
    )
    return destinations, stuck


def exchange_from(
    problem: Problem,
    start: NDArray[np.int32],
    *,
    plain: bool,
    effort: int,
    patience: int | None = None,
    groups: Groups | None = None,
) -> tuple[NDArray[np.int32], float]:
    """Exchange from `start` on, inside each group; the destinations and the largest overload that is left."""
    destinations = start.copy()
    least = np.inf
    groups = groups or everyone(problem.num_ranks)
    for _ in range(12):
        if plain:
            destinations, stuck = shed(problem, destinations, groups)
            if stuck == 0:
                return destinations, 0.0
        least, cramped = search(
            problem.terms, problem.order, *groups, effort, patience or PATIENCE * effort, destinations
        )
        if least <= 0 or not cramped:
            break
    return destinations, least
