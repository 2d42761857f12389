"""The best single exchange of a rank with others: one sample for one, or one for none where the counts allow it."""

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.compile import NONE, ZERO, step
from evenkeel.partitioning.rows import Rows, Terms, away

ENOUGH = 6  # exchanges with a rank that fit, beyond which the search for a cheaper one ends: cheap ones come first
EACH = 2  # partners that are tried for one sample
TRIED = 3  # exchanges with a rank that `cheapest_exchange` weighs
LOOKED = 24  # samples that it looks at for them
FIRST = 3  # ranks that it always looks at
GOOD = 1.5  # times what a plain move of the right cost would move: no further rank is looked at for less
PARTIAL = 1.2  # by how much cheaper an exchange must be that leaves the giver, or the taker, something to do


@step
def fits_memory(terms: Terms, rows: Rows, giver: int, a: int, taker: int, b: int) -> bool:
    """Whether neither rank exceeds its cap (or exceeds it more than now) after `a` went and `b` (if any) came."""
    change = terms.memory[a]
    if b >= 0:
        change -= terms.memory[b]
    if change > 0:
        return bool(rows.used[taker] + change <= terms.caps[taker])
    return bool(rows.used[giver] - change <= terms.caps[giver])


@step
def _first_at_least(cost: NDArray[np.int64], begin: int, length: int, value: int) -> int:
    """Entry of the row at `begin` from which on costs are at least `value`."""
    low, high = 0, length
    while low < high:
        middle = (low + high) // 2
        if cost[begin + middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


@step
def moves_away(terms: Terms, giver: int, a: int, taker: int, b: int) -> float:
    """What the exchange of `a` for `b` (if any) adds to the movement."""
    moved = away(terms, a, taker) - away(terms, a, giver)
    if b >= 0:
        moved += away(terms, b, giver) - away(terms, b, taker)
    return moved


@step
def cheapest_exchange(
    terms: Terms, rows: Rows, giver: int, takers: NDArray[np.int64], num_takers: int
) -> tuple[int, int, int]:
    """The exchange with one of the first `num_takers` of `takers` that moves least for the load it takes off `giver`.

    It takes at least half of what the giver, above its limit, has too much of, or of what the taker has room for, and
    puts no taker above its limit. For each of the giver's samples, from the last one below the right cost on, the
    cheapest partner is the taker's lightest that keeps it within its limit. The first taker has most slack.

    Returns:
        Place of the taker, entry of the giver's row, entry of the taker's row (negative: a plain move); a negative
        place if there is none.
    """
    excess = rows.load[giver] - terms.limits[giver]
    with_memory = terms.memory.size > 0
    g, num_g = rows.start[giver], rows.length[giver]
    if num_g == 0:
        return -1, -1, -1
    first_slack = terms.limits[takers[0]] - rows.load[takers[0]]
    wanted = min(excess, first_slack)
    at_excess = _first_at_least(rows.cost, g, num_g, excess)
    i = at_excess if wanted == excess else _first_at_least(rows.cost, g, num_g, wanted)
    if i > 0 and (i == num_g or (wanted < excess and rows.cost[g + i] > wanted)):
        i -= 1
    good = GOOD * terms.sizes[rows.item[g + i]] / max(min(rows.cost[g + i], wanted), 1)
    best_place, best_i, best_j, best_rate = -1, -1, -1, np.inf
    for place in range(num_takers):
        if place >= FIRST and best_rate <= good:
            break
        taker = takers[place]
        slack = terms.limits[taker] - rows.load[taker]
        if slack <= 0:
            continue
        wanted = min(excess, slack)
        low = max(wanted // 2, 1)
        t, num_t = rows.start[taker], rows.length[taker]
        may_move = num_g > terms.fewest[giver] and num_t < min(terms.most[taker], rows.room[taker])
        i = at_excess if wanted == excess else _first_at_least(rows.cost, g, num_g, wanted)
        i = max(i - 1, 0)
        last = min(num_g, i + LOOKED)
        tried = 0
        j = 0
        while i < last and tried < TRIED:
            a, cost_a = int(rows.item[g + i]), rows.cost[g + i]
            if (
                may_move
                and low <= cost_a <= slack
                and not (with_memory and not fits_memory(terms, rows, giver, a, taker, NONE))
            ):
                tried += 1
                rate = moves_away(terms, giver, a, taker, NONE) / min(cost_a, excess)
                if cost_a < wanted:
                    rate *= PARTIAL
                if rate < best_rate:
                    best_place, best_i, best_j, best_rate = place, i, -1, rate
            if cost_a > slack:
                if j == 0:
                    j = _first_at_least(rows.cost, t, num_t, cost_a - slack)
                while j < num_t and rows.cost[t + j] < cost_a - slack:
                    j += 1
            if j == num_t:
                break
            delta = cost_a - rows.cost[t + j]
            if delta >= low:
                b = int(rows.item[t + j])
                if not (with_memory and not fits_memory(terms, rows, giver, a, taker, b)):
                    tried += 1
                    rate = moves_away(terms, giver, a, taker, b) / min(delta, excess)
                    if delta < wanted:
                        rate *= PARTIAL
                    if rate < best_rate:
                        best_place, best_i, best_j, best_rate = place, i, j, rate
            i += 1
    return best_place, best_i, best_j


@step
def fullest_fill(
    terms: Terms, rows: Rows, giver: int, takers: NDArray[np.int64], num_takers: int
) -> tuple[int, int, int]:
    """Where nothing fits: with each taker the exchange that fills it most, of these the one that moves least for it.

    Returns:
        As `cheapest_exchange` does.
    """
    with_memory = terms.memory.size > 0
    g, num_g = rows.start[giver], rows.length[giver]
    best_place, best_i, best_j, best_rate = -1, -1, -1, np.inf
    for place in range(num_takers):
        taker = takers[place]
        slack = terms.limits[taker] - rows.load[taker]
        if slack <= 0:
            continue
        t, num_t = rows.start[taker], rows.length[taker]
        may_move = num_g > terms.fewest[giver] and num_t < min(terms.most[taker], rows.room[taker])
        # What an exchange moves is only looked up where two fill equally, and for the one that is left.
        most, most_a, most_b, most_i, most_j, least = 0, NONE, NONE, -1, -1, np.inf
        known = False
        first = 0  # the taker's lightest that it must give for the giver's sample, lest it go beyond its limit
        last, hopeless = NONE, False  # the cost that was looked at last, and whether every exchange with it fills less
        for i in range(num_g):
            a, cost_a = int(rows.item[g + i]), rows.cost[g + i]
            if hopeless and cost_a == last:
                continue
            last, hopeless = cost_a, True
            while first < num_t and rows.cost[t + first] < cost_a - slack:
                first += 1
            for j in range(first - 1, first + 1):
                b, delta = NONE, cost_a
                if j >= first:
                    if j == num_t:
                        continue
                    b, delta = int(rows.item[t + j]), cost_a - rows.cost[t + j]
                elif not may_move:
                    continue
                if delta < max(most, 1) or delta > slack:
                    continue
                hopeless = False
                if with_memory and not fits_memory(terms, rows, giver, a, taker, b):
                    continue
                if delta == most:
                    if not known:
                        known, least = True, moves_away(terms, giver, most_a, taker, most_b)
                    moved = moves_away(terms, giver, a, taker, b)
                    if moved >= least:
                        continue
                    least = moved
                else:
                    known = False
                most, most_a, most_b, most_i, most_j = delta, a, b, i, -1 if b < 0 else j
        if most > 0:
            if not known:
                least = moves_away(terms, giver, most_a, taker, most_b)
            if least / most < best_rate:
                best_place, best_i, best_j, best_rate = place, most_i, most_j, least / most
    return best_place, best_i, best_j


@step
def evenest_exchange(
    terms: Terms, rows: Rows, giver: int, taker: int, most: float, barred: NDArray[np.int64], now: int
) -> tuple[int, int, float, float]:
    """The exchange of `giver`, above its limit, and `taker` that leaves the smaller overload, which may be the taker's.

    Where both can get within their limits, it is the one that moves least. The overload is `most` at most. Samples for
    which `barred` is above `now` stay where they are.

    Returns:
        Entry of the giver's row (negative: none found), entry of the taker's row (negative: a plain move), the larger
        overload over speed that remains (0.0 when both are within their limits), and what it costs in movement.
    """
    excess = rows.load[giver] - terms.limits[giver]
    slack = terms.limits[taker] - rows.load[taker]
    with_memory = terms.memory.size > 0
    g, t = rows.start[giver], rows.start[taker]
    num_g, num_t = rows.length[giver], rows.length[taker]
    may_move = num_g > terms.fewest[giver] and num_t < min(terms.most[taker], rows.room[taker])
    speed_g, speed_t = terms.speeds[giver], terms.speeds[taker]
    alike = speed_g == speed_t  # overloads of ranks alike are compared in whole units
    best_units, first = np.iinfo(np.int64).max, ZERO
    if most < np.inf:  # a lighter sample would not take enough off the giver, whatever came back
        best_units = int(most * speed_g * (1.0 + 1e-12)) + 1  # rounded up: the overload itself tells
        first = _first_at_least(rows.cost, g, num_g, excess - best_units)
    # With an exchange of `even` both are as far above their limits; what fits is from `excess` up to `slack`.
    even = excess if excess <= slack else (excess + slack) // 2
    best_i, best_j, best_over, best_away = -1, -1, most, np.inf
    # The taker's first entry for which the exchange takes less than `even` off the giver.
    behind = _first_at_least(rows.cost, t, num_t, rows.cost[g + first] - even + 1) if first < num_g else ZERO
    found = 0
    last, hopeless = NONE, False  # the cost that was looked at last, and whether any exchange with it came near
    for i in range(first, num_g):
        a, cost_a = int(rows.item[g + i]), rows.cost[g + i]
        if cost_a <= 0 or (hopeless and cost_a == last) or barred[a] > now:
            continue
        last, hopeless = cost_a, True
        while behind < num_t and rows.cost[t + behind] <= cost_a - even:
            behind += 1
        for j in range(behind - EACH // 2 - 1, min(behind + EACH // 2, num_t)):
            b, delta = NONE, cost_a
            if j >= behind - EACH // 2:
                if j < 0:
                    continue
                b, delta = int(rows.item[t + j]), cost_a - rows.cost[t + j]
            elif not may_move:
                continue
            if delta <= 0:
                continue
            units = max(excess - delta, delta - slack, 0)
            if alike and units > best_units:
                continue
            overload = units / speed_g if alike else max((excess - delta) / speed_g, (delta - slack) / speed_t, 0.0)
            if overload > best_over:
                continue
            hopeless = False
            if b >= 0 and barred[b] > now:
                continue
            if with_memory and not fits_memory(terms, rows, giver, a, taker, b):
                continue
            moved = moves_away(terms, giver, a, taker, b)
            if overload < best_over or moved < best_away:
                best_i, best_j, best_over, best_away, best_units = i, -1 if b < 0 else j, overload, moved, units
            found += overload == 0.0
        if found >= ENOUGH:
            break
    return best_i, best_j, best_over, best_away
