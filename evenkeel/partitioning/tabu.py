"""A search that goes on where no single exchange helps: it takes the best all the same and does not undo it soon."""

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.compile import ZERO, kernel, step
from evenkeel.partitioning.heaviest_first import sink
from evenkeel.partitioning.rows import Rows, Terms, build_rows, exchange, read_rows
from evenkeel.partitioning.swaps import evenest_exchange

TENURE = 12  # steps for which a sample that was exchanged stays where it is
SOON = 1 << 11  # entries that a step looks at if that brings the rank and its partner within their limits, about
NEAR = 1 << 13  # entries that a step looks at if that yields a smaller overload, about
FAR = 1 << 16  # entries that it looks at else


@step
def _most_overloaded(terms: Terms, rows: Rows, ranks: NDArray[np.int64]) -> tuple[int, float]:
    """The rank furthest above its limit, and how far, over its speed (negative when all are below)."""
    worst, most = ranks[0], -np.inf
    for r in ranks:
        over = (rows.load[r] - terms.limits[r]) / terms.speeds[r]
        if over > most:
            worst, most = r, over
    return worst, most


@step
def _at_best(terms: Terms, rows: Rows, giver: int, taker: int) -> float:
    """What no exchange of the two can bring the larger of their overloads below: that of their joint load."""
    over = (rows.load[giver] - terms.limits[giver]) + (rows.load[taker] - terms.limits[taker])
    return float(over / (terms.speeds[giver] + terms.speeds[taker]))


@step
def _without_first(heap: NDArray[np.int64], size: int, weights: NDArray[np.float64]) -> int:
    """The size of the heap once the rank on its top is taken off."""
    heap[0] = heap[size - 1]
    sink(heap, size - 1, ZERO, weights)
    return size - 1


@kernel
def _search(
    terms: Terms,
    rows: Rows,
    ranks: NDArray[np.int64],
    budget: int,
    patience: int,
    barred: NDArray[np.int64],
    slack: NDArray[np.float64],
    best: NDArray[np.int32],
) -> float:
    worst, most = _most_overloaded(terms, rows, ranks)
    least, saved, idle = most, False, 0
    takers = np.empty(ranks.size, np.int64)
    alike = True
    for r in ranks:
        alike &= terms.speeds[r] == terms.speeds[ranks[0]]
    step, blocked = 0, 0
    while most > 0 and budget > 0 and idle < patience:
        step += 1
        size = ZERO
        for r in ranks:
            if r != worst:
                slack[r] = (terms.limits[r] - rows.load[r]) / terms.speeds[r]
                takers[size] = r
                size += 1
        for i in range(size // 2 - 1, -1, -1):
            sink(takers, size, i, slack)
        looked = size
        chosen, chosen_i, chosen_j, chosen_over, chosen_away = -1, -1, -1, np.inf, np.inf
        while size > 0:
            taker = takers[0]
            if chosen >= 0 and _at_best(terms, rows, worst, taker) > chosen_over:
                if alike:
                    break
                size = _without_first(takers, size, slack)
                continue
            size = _without_first(takers, size, slack)
            looked += 16 + rows.length[worst] + rows.length[taker]
            i, j, after, moved = evenest_exchange(terms, rows, worst, taker, chosen_over, barred, step)
            if i >= 0 and (after < chosen_over or (after == chosen_over and moved < chosen_away)):
                chosen, chosen_i, chosen_j, chosen_over, chosen_away = taker, i, j, after, moved
            if looked > (SOON if chosen_over <= 0 else NEAR if chosen_over < most else FAR):
                break
        budget -= looked
        idle += 1
        if chosen < 0:
            blocked += 1
            if blocked > 2:
                break
            step += TENURE
            continue
        blocked = 0
        if chosen_over >= most and not saved:
            read_rows(rows, ranks, best)
            saved = True
        a = rows.item[rows.start[worst] + chosen_i]
        barred[a] = step + TENURE
        if chosen_j >= 0:
            barred[rows.item[rows.start[chosen] + chosen_j]] = step + TENURE
        exchange(terms, rows, worst, chosen_i, chosen, chosen_j)
        worst, most = _most_overloaded(terms, rows, ranks)
        if most < least:
            least, saved, idle = most, False, 0
    if not saved and most <= least:
        read_rows(rows, ranks, best)
    return least


@kernel
def search(
    terms: Terms,
    order: NDArray[np.int32],
    ranks: NDArray[np.int64],
    begin: NDArray[np.int64],
    effort: int,
    patience: int,
    best: NDArray[np.int32],
) -> tuple[float, bool]:
    """Take load off the rank furthest above its limit, step by step, until all are within their limits.

    Each step is that rank's best exchange with the ranks that have the most slack (tabu search, Glover 1989), inside
    its group, `ranks[begin[g]:begin[g + 1]]`. A group's search ends when enough steps brought no smaller maximum, or
    when enough entries have been looked at.

    Args:
        terms: What to respect.
        order: (n,) sorts the costs ascending.
        ranks: Ranks by group.
        begin: Where each group begins.
        effort: Entries to look at, in units of 200,000 with 20 more a sample.
        patience: Steps that bring no smaller maximum before a group's search ends.
        best: (n,) destinations to start from; takes those with the smallest maximum.

    Returns:
        That maximum: the overload over speed of the worst rank, 0.0 or less when all are within their limits; and
        whether a rank ran out of room for more samples, which starting again from `best` gives it.
    """
    rows = build_rows(terms, order, best)
    barred = np.zeros(terms.costs.size, np.int64)
    slack = np.empty(terms.limits.size, np.float64)
    least = -np.inf
    for group in range(begin.size - 1):
        own = ranks[begin[group] : begin[group + 1]]
        samples = 0
        for r in own:
            samples += rows.length[r]
        budget = effort * (200_000 + 20 * samples)
        least = max(least, _search(terms, rows, own, budget, patience, barred, slack, best))
    cramped = False
    for r in ranks:
        cramped |= rows.length[r] >= rows.room[r] and rows.room[r] < terms.most[r]
    return least, cramped
