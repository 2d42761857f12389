"""The search: samples are exchanged between ranks, one for one or one for none, until no rank is above its limit.

Its state are `Rows`, each rank's samples in ascending order of cost. A plain pass brings the ranks down to their limits
by the exchanges that move least. Where it ends short, a tabu search (Glover 1989) goes on from there.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from evenkeel.partitioning.compile import NONE, ZERO, kernel, step
from evenkeel.partitioning.problem import Arrays, Floats, Integers, Problem, Ranks

ACROSS = 16.0  # moving a sample to another node costs this many times as much as inside one

# The plain pass
CHOICES = 640  # samples of all the ranks that a rank above its limit chooses from, about
MOST_CHOICES = 12  # ranks that it chooses from at most
TAKERS = 16  # ranks that it turns to in vain before it is left as it is
TRIED = 3  # exchanges with a rank that `_cheapest` weighs
LOOKED = 24  # samples that it looks at for them
FIRST = 3  # ranks that it always looks at
GOOD = 1.5  # times what a plain move of the right cost would move: no further rank is looked at for less
PARTIAL = 1.2  # by how much cheaper an exchange must be that leaves the giver, or the taker, something to do
LIGHT = 8  # times all samples, what `give_light_company` looks at
# The tabu search
PATIENCE = 120  # steps that bring nothing before it ends
BUDGET, BUDGET_EACH = 200_000, 20  # entries that it looks at for each unit of effort, and further ones for each sample
TENURE = 12  # steps for which a sample that was exchanged stays where it is
ENOUGH = 6  # exchanges with a rank that fit, beyond which the search for a cheaper one ends: cheap ones come first
SOON = 1 << 11  # entries that a step looks at if that brings the rank and its partner within their limits, about
NEAR = 1 << 13  # entries that a step looks at if that yields a smaller overload, about
FAR = 1 << 16  # entries that it looks at else


class Groups(NamedTuple):
    """Ranks that exchange with each other: group g is `ranks[begin[g]:begin[g + 1]]`."""

    ranks: Integers
    begin: Integers

    @classmethod
    def by_node(cls, nodes: Ranks, num_nodes: int) -> Groups:
        """The ranks of each node as a group."""
        begin = np.concatenate([[0], np.cumsum(np.bincount(nodes, minlength=num_nodes))])
        return cls(np.argsort(nodes, kind="stable"), begin)


@cache
def everyone(num_ranks: int) -> Groups:
    """All ranks as one group."""
    return Groups(np.arange(num_ranks), np.array([0, num_ranks]))


class Rows(NamedTuple):
    """Samples by rank: row r is `length[r]` entries from `start[r]` on, with room for `room[r]`."""

    cost: Integers
    item: Ranks
    start: Integers
    length: Integers
    room: Integers
    load: Integers
    used: Integers


@kernel
def build_rows(arrays: Arrays, order: Ranks, destinations: Ranks) -> Rows:
    """Rows of an assignment; `order` sorts the costs ascending. Rows leave room for half as many samples again."""
    num_ranks = arrays.limits.size
    length, room, start = np.zeros(num_ranks, np.int64), np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64)
    for rank in destinations:
        length[rank] += 1
    total = 0
    for r in range(num_ranks):
        room[r] = max(length[r], min(arrays.most[r], length[r] + length[r] // 2 + 16))
        start[r] = total
        total += room[r]
        length[r] = 0
    cost, item = np.empty(total, np.int64), np.empty(total, np.int32)
    load, used = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    for i in order:
        rank = destinations[i]
        place = start[rank] + length[rank]
        cost[place] = arrays.costs[i]
        item[place] = i
        length[rank] += 1
        load[rank] += arrays.costs[i]
        if arrays.memory.size > 0:
            used[rank] += arrays.memory[i]
    return Rows(cost, item, start, length, room, load, used)


@step
def _read_rows(rows: Rows, ranks: Integers, destinations: Ranks) -> None:
    for rank in ranks:
        for i in range(rows.start[rank], rows.start[rank] + rows.length[rank]):
            destinations[rows.item[i]] = rank


@step
def _remove(rows: Rows, rank: int, i: int) -> None:
    begin = rows.start[rank]
    rows.length[rank] -= 1
    for place in range(begin + i, begin + rows.length[rank]):
        rows.cost[place] = rows.cost[place + 1]
        rows.item[place] = rows.item[place + 1]


@step
def _insert(rows: Rows, rank: int, cost: int, item: int) -> None:
    begin = rows.start[rank]
    place = begin + rows.length[rank]
    while place > begin and rows.cost[place - 1] > cost:
        rows.cost[place] = rows.cost[place - 1]
        rows.item[place] = rows.item[place - 1]
        place -= 1
    rows.cost[place] = cost
    rows.item[place] = item
    rows.length[rank] += 1


@step
def _exchange(arrays: Arrays, rows: Rows, giver: int, i: int, taker: int, j: int) -> None:
    """Hands entry `i` of row `giver` to `taker`, and entry `j` of row `taker` to `giver` unless `j` is negative."""
    a, cost_a = rows.item[rows.start[giver] + i], rows.cost[rows.start[giver] + i]
    cost, memory = cost_a, arrays.memory[a] if arrays.memory.size > 0 else ZERO
    _remove(rows, giver, i)
    if j >= 0:
        b, cost_b = rows.item[rows.start[taker] + j], rows.cost[rows.start[taker] + j]
        cost -= cost_b
        memory -= arrays.memory[b] if arrays.memory.size > 0 else ZERO
        _remove(rows, taker, j)
        _insert(rows, giver, cost_b, b)
    _insert(rows, taker, cost_a, a)
    rows.load[giver] -= cost
    rows.load[taker] += cost
    rows.used[giver] -= memory
    rows.used[taker] += memory


@step
def sink(heap: Integers, size: int, i: int, weights: Floats) -> None:
    """Lets what is at place `i` of a heap sink to where it belongs.

    What has the greatest weight is on top, of equal weights the lowest number, so that ties break alike everywhere.
    """
    number = heap[i]
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size:
            x, y = heap[child], heap[child + 1]
            if weights[y] > weights[x] or (weights[y] == weights[x] and y < x):
                child += 1
        other = heap[child]
        if weights[number] > weights[other] or (weights[number] == weights[other] and number < other):
            break
        heap[i] = other
        i = child
    heap[i] = number


@step
def push(heap: Integers, size: int, number: int, weights: Floats) -> int:
    """Adds to a heap of so many; its new size."""
    place = size
    while place > 0:
        other = heap[(place - 1) // 2]
        if weights[other] > weights[number] or (weights[other] == weights[number] and other < number):
            break
        heap[place] = other
        place = (place - 1) // 2
    heap[place] = number
    return size + 1


@step
def pop(heap: Integers, size: int, i: int, weights: Floats) -> int:
    """Takes off what is at place `i` of a heap of so many; its new size."""
    heap[i] = heap[size - 1]
    sink(heap, size - 1, i, weights)
    return size - 1


@step
def _slack(arrays: Arrays, rows: Rows, rank: int) -> float:
    """How far a rank is below its limit, over its speed."""
    return float((arrays.limits[rank] - rows.load[rank]) / arrays.speeds[rank])


@step
def _may_take(arrays: Arrays, rows: Rows, giver: int, taker: int) -> bool:
    """Whether the counts allow a sample for none."""
    num = rows.length[taker]
    return bool(rows.length[giver] > arrays.fewest[giver] and num < min(arrays.most[taker], rows.room[taker]))


@step
def _fits_memory(arrays: Arrays, rows: Rows, giver: int, a: int, taker: int, b: int) -> bool:
    """Whether neither rank exceeds its cap (or exceeds it more than now) after `a` went and `b` (if any) came."""
    if arrays.memory.size == 0:
        return True
    change = arrays.memory[a] - (arrays.memory[b] if b >= 0 else ZERO)
    if change > 0:
        return bool(rows.used[taker] + change <= arrays.caps[taker])
    return bool(rows.used[giver] - change <= arrays.caps[giver])


@step
def _first_at_least(cost: Integers, begin: int, length: int, value: int) -> int:
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
def _away(arrays: Arrays, item: int, rank: int) -> float:
    """What it costs that `item` is trained on `rank`: its size, and sixteen times as much across nodes."""
    home = arrays.homes[item]
    if home == rank:
        return 0.0
    if arrays.nodes[home] == arrays.nodes[rank]:
        return float(arrays.sizes[item])
    return ACROSS * float(arrays.sizes[item])


@step
def _moves(arrays: Arrays, giver: int, a: int, taker: int, b: int) -> float:
    """What the exchange of `a` for `b` (if any) adds to the movement."""
    moved = _away(arrays, a, taker) - _away(arrays, a, giver)
    if b >= 0:
        moved += _away(arrays, b, giver) - _away(arrays, b, taker)
    return moved


@step
def _cheapest(arrays: Arrays, rows: Rows, giver: int, takers: Integers, num_takers: int) -> tuple[int, int, int]:
    """The exchange with one of the first `num_takers` of `takers` that moves least for the load it takes off `giver`.

    It takes at least half of what the giver, above its limit, has too much of, or of what the taker has room for, and
    puts no taker above its limit. For each of the giver's samples, from the last one below the right cost on, the
    cheapest partner is the taker's lightest that keeps it within its limit. The first taker has most slack.
    """
    excess = rows.load[giver] - arrays.limits[giver]
    g, num_g = rows.start[giver], rows.length[giver]
    wanted = min(excess, arrays.limits[takers[0]] - rows.load[takers[0]])
    i = _first_at_least(rows.cost, g, num_g, wanted)
    if i > 0 and (i == num_g or (wanted < excess and rows.cost[g + i] > wanted)):
        i -= 1
    good = GOOD * arrays.sizes[rows.item[g + i]] / max(min(rows.cost[g + i], wanted), 1)
    best_place, best_i, best_j, best_rate = -1, -1, -1, np.inf
    for place in range(num_takers):
        if place >= FIRST and best_rate <= good:
            break
        taker = takers[place]
        slack = arrays.limits[taker] - rows.load[taker]
        if slack <= 0:
            continue
        wanted = min(excess, slack)
        low = max(wanted // 2, 1)
        t, num_t = rows.start[taker], rows.length[taker]
        may_move = _may_take(arrays, rows, giver, taker)
        i = _first_at_least(rows.cost, g, num_g, wanted)
        tried, j = 0, ZERO
        for x in range(max(i - 1, 0), min(num_g, max(i - 1, 0) + LOOKED)):
            if tried >= TRIED:
                break
            a, cost_a = int(rows.item[g + x]), rows.cost[g + x]
            if cost_a > slack:
                j = _first_at_least(rows.cost, t, num_t, cost_a - slack)
            for y in (NONE, j):  # by itself, or for the taker's lightest that keeps it within its limit
                if y == num_t or (y < 0 and not may_move):
                    continue
                b = int(rows.item[t + y]) if y >= 0 else NONE
                delta = cost_a - rows.cost[t + y] if y >= 0 else cost_a
                if not low <= delta <= slack or not _fits_memory(arrays, rows, giver, a, taker, b):
                    continue
                tried += 1
                rate = _moves(arrays, giver, a, taker, b) / min(delta, excess)
                if delta < wanted:
                    rate *= PARTIAL
                if rate < best_rate:
                    best_place, best_i, best_j, best_rate = place, x, y, rate
            if j == num_t:
                break
    return best_place, best_i, best_j


@step
def _fullest(arrays: Arrays, rows: Rows, giver: int, takers: Integers, num_takers: int) -> tuple[int, int, int]:
    """Where nothing fits: with each taker the exchange that fills it most, of these the one that moves least for it."""
    g, num_g = rows.start[giver], rows.length[giver]
    best_place, best_i, best_j, best_rate = -1, -1, -1, np.inf
    for place in range(num_takers):
        taker = takers[place]
        slack = arrays.limits[taker] - rows.load[taker]
        if slack <= 0:
            continue
        t, num_t = rows.start[taker], rows.length[taker]
        may_move = _may_take(arrays, rows, giver, taker)
        most, most_i, most_j, least = 0, -1, -1, np.inf
        first = 0  # the taker's lightest that it must give for the giver's sample, lest it go beyond its limit
        last, hopeless = NONE, False  # the cost that was looked at last, and whether every exchange with it fills less
        for i in range(num_g):
            a, cost_a = int(rows.item[g + i]), rows.cost[g + i]
            if hopeless and cost_a == last:
                continue
            last, hopeless = cost_a, True
            while first < num_t and rows.cost[t + first] < cost_a - slack:
                first += 1
            for j in range(first - 1, first + 1):  # `first - 1` stands for none
                if j == num_t or (j < first and not may_move):
                    continue
                b = int(rows.item[t + j]) if j >= first else NONE
                delta = cost_a - rows.cost[t + j] if j >= first else cost_a
                if delta < max(most, 1) or delta > slack:
                    continue
                hopeless = False
                if not _fits_memory(arrays, rows, giver, a, taker, b):
                    continue
                moved = _moves(arrays, giver, a, taker, b)
                if delta > most or moved < least:
                    most, most_i, most_j, least = delta, i, -1 if b < 0 else j, moved
        if most > 0 and least / most < best_rate:
            best_place, best_i, best_j, best_rate = place, most_i, most_j, least / most
    return best_place, best_i, best_j


@step
def _evenest(
    arrays: Arrays, rows: Rows, giver: int, taker: int, most: float, barred: Integers, now: int
) -> tuple[int, int, float, float]:
    """The exchange of `giver`, above its limit, and `taker` that leaves the smaller overload, which may be the taker's.

    Where both can get within their limits, it is the one that moves least. The overload is `most` at most. Samples for
    which `barred` is above `now` stay where they are.
    """
    excess = rows.load[giver] - arrays.limits[giver]
    slack = arrays.limits[taker] - rows.load[taker]
    g, t, num_g, num_t = rows.start[giver], rows.start[taker], rows.length[giver], rows.length[taker]
    may_move = _may_take(arrays, rows, giver, taker)
    speed_g, speed_t = arrays.speeds[giver], arrays.speeds[taker]
    alike = speed_g == speed_t  # overloads of ranks alike are compared in whole units
    best_units, first = np.iinfo(np.int64).max, ZERO
    if most < np.inf:  # a lighter sample would not take enough off the giver, whatever came back
        best_units = int(most * speed_g * (1.0 + 1e-12)) + 1  # rounded up: the overload itself decides
        first = _first_at_least(rows.cost, g, num_g, excess - best_units)
    # With an exchange of `even` both are as far above their limits; what fits is from `excess` up to `slack`.
    even = excess if excess <= slack else (excess + slack) // 2
    best_i, best_j, best_over, best_moved = -1, -1, most, np.inf
    # The taker's first entry for which the exchange takes less than `even` off the giver.
    behind = _first_at_least(rows.cost, t, num_t, rows.cost[g + first] - even + 1) if first < num_g else ZERO
    fitting = 0
    last, hopeless = NONE, False  # the cost that was looked at last, and whether any exchange with it came near
    for i in range(first, num_g):
        a, cost_a = int(rows.item[g + i]), rows.cost[g + i]
        if (hopeless and cost_a == last) or barred[a] > now:
            continue
        last, hopeless = cost_a, True
        while behind < num_t and rows.cost[t + behind] <= cost_a - even:
            behind += 1
        for j in range(behind - 2, min(behind + 1, num_t)):  # `behind - 2` stands for none
            if j == behind - 2:
                if not may_move:
                    continue
            elif j < 0:
                continue
            b = int(rows.item[t + j]) if j > behind - 2 else NONE
            delta = cost_a - rows.cost[t + j] if j > behind - 2 else cost_a
            if delta <= 0:
                continue
            units = max(excess - delta, delta - slack, 0)
            if alike and units > best_units:
                continue
            overload = units / speed_g if alike else max((excess - delta) / speed_g, (delta - slack) / speed_t, 0.0)
            if overload > best_over:
                continue
            hopeless = False
            if (b >= 0 and barred[b] > now) or not _fits_memory(arrays, rows, giver, a, taker, b):
                continue
            moved = _moves(arrays, giver, a, taker, b)
            if overload < best_over or moved < best_moved:
                best_i, best_j, best_over, best_moved, best_units = i, -1 if b < 0 else j, overload, moved, units
            fitting += overload == 0.0
        if fitting >= ENOUGH:
            break
    return best_i, best_j, best_over, best_moved


@kernel
def pass_plainly(arrays: Arrays, rows: Rows, ranks: Integers, choices: int, slack: Floats) -> None:
    """Brings ranks down to their limits, the heaviest first, by exchanges with the `choices` ranks of most slack."""
    takers, givers = np.empty(ranks.size, np.int64), np.empty(ranks.size, np.int64)
    size, num_givers = ZERO, ZERO
    for r in ranks:
        slack[r] = _slack(arrays, rows, r)
        if slack[r] > 0:
            size = push(takers, size, r, slack)
        else:
            slack[r] = -slack[r]
            num_givers = push(givers, num_givers, r, slack)
    aside = np.empty(TAKERS, np.int64)
    while num_givers > 0:
        giver = givers[0]
        num_givers = pop(givers, num_givers, ZERO, slack)
        num_aside = 0
        while rows.load[giver] > arrays.limits[giver] and num_aside < TAKERS and size > 0 and slack[takers[0]] > 0:
            place, i, j = _cheapest(arrays, rows, giver, takers, min(choices, size))
            if place < 0:
                place, i, j = _fullest(arrays, rows, giver, takers, min(choices, size))
            if place >= 0:
                taker = takers[place]
                _exchange(arrays, rows, giver, i, taker, j)
                slack[taker] = _slack(arrays, rows, taker)
                sink(takers, size, place, slack)
            else:
                for place in range(min(choices, size, TAKERS - num_aside) - 1, -1, -1):
                    aside[num_aside] = takers[place]
                    num_aside += 1
                    size = pop(takers, size, place, slack)
        for i in range(num_aside):
            size = push(takers, size, aside[i], slack)
        slack[giver] = _slack(arrays, rows, giver)
        if slack[giver] > 0:
            size = push(takers, size, giver, slack)


@step
def _worst(arrays: Arrays, rows: Rows, ranks: Integers) -> tuple[int, float]:
    """The rank furthest above its limit, and how far, over its speed (negative when all are below)."""
    worst, most = ranks[0], -np.inf
    for r in ranks:
        over = -_slack(arrays, rows, r)
        if over > most:
            worst, most = r, over
    return worst, most


@kernel
def search(
    arrays: Arrays, rows: Rows, ranks: Integers, effort: int, barred: Integers, slack: Floats, best: Ranks
) -> float:
    """Takes load off the rank furthest above its limit, by its best exchange, even one that helps nothing by itself.

    It ends when all ranks are within their limits, when `PATIENCE` steps brought no smaller maximum, or when about as
    many entries have been looked at as the effort allows; `best` takes the destinations of the smallest maximum, which
    it returns.
    """
    budget = effort * (BUDGET + BUDGET_EACH * rows.length[ranks].sum())
    worst, most = _worst(arrays, rows, ranks)
    least, saved, idle = most, False, 0
    takers = np.empty(ranks.size, np.int64)
    alike = (arrays.speeds[ranks] == arrays.speeds[ranks[0]]).all()
    now, blocked = 0, 0
    while most > 0 and budget > 0 and idle < PATIENCE and blocked <= 2:
        now += 1
        size = ZERO
        for r in ranks:
            if r != worst:
                slack[r] = _slack(arrays, rows, r)
                takers[size] = r
                size += 1
        for i in range(size // 2 - 1, -1, -1):
            sink(takers, size, i, slack)
        looked = size
        chosen, chosen_i, chosen_j, chosen_over, chosen_moved = -1, -1, -1, np.inf, np.inf
        while size > 0:
            taker = takers[0]
            joint = (rows.load[worst] - arrays.limits[worst]) + (rows.load[taker] - arrays.limits[taker])
            size = pop(takers, size, ZERO, slack)
            if joint / (arrays.speeds[worst] + arrays.speeds[taker]) > chosen_over:
                if alike:  # no exchange of the two can bring the larger overload below that of their joint load
                    break
                continue
            looked += 16 + rows.length[worst] + rows.length[taker]
            i, j, after, moved = _evenest(arrays, rows, worst, taker, chosen_over, barred, now)
            if after < chosen_over or (after == chosen_over and moved < chosen_moved):
                chosen, chosen_i, chosen_j, chosen_over, chosen_moved = taker, i, j, after, moved
            if looked > (SOON if chosen_over <= 0 else NEAR if chosen_over < most else FAR):
                break
        budget -= looked
        idle += 1
        if chosen < 0:
            blocked += 1
            now += TENURE
            continue
        blocked = 0
        if chosen_over >= most and not saved:
            _read_rows(rows, ranks, best)
            saved = True
        barred[rows.item[rows.start[worst] + chosen_i]] = now + TENURE
        if chosen_j >= 0:
            barred[rows.item[rows.start[chosen] + chosen_j]] = now + TENURE
        _exchange(arrays, rows, worst, chosen_i, chosen, chosen_j)
        worst, most = _worst(arrays, rows, ranks)
        if most < least:
            least, saved, idle = most, False, 0
    if not saved:
        _read_rows(rows, ranks, best)
    return least


@kernel
def exchange_in_groups(
    arrays: Arrays, order: Ranks, ranks: Integers, begin: Integers, choices: int, effort: int, best: Ranks
) -> tuple[float, bool]:
    """Exchanges inside each group of ranks: a plain pass if there are `choices`, a search if there is any `effort`.

    `best` are the destinations to start from, and takes those with the smallest maximum. Returns the overload over
    speed of the worst rank, and whether a rank ran out of room, which starting again from `best` gives it.
    """
    rows = build_rows(arrays, order, best)
    slack, barred = np.empty(arrays.limits.size, np.float64), np.zeros(arrays.costs.size if effort else 0, np.int64)
    least = -np.inf
    for group in range(begin.size - 1):
        own = ranks[begin[group] : begin[group + 1]]
        if choices > 0:
            pass_plainly(arrays, rows, own, choices, slack)
            _read_rows(rows, own, best)
        over = _worst(arrays, rows, own)[1]
        if over > 0 and effort > 0:
            over = search(arrays, rows, own, effort, barred, slack, best)
        least = max(least, over)
    cramped = False
    for r in ranks:
        cramped |= rows.length[r] >= rows.room[r] and rows.room[r] < arrays.most[r]
    return least, cramped


@kernel
def give_light_company(arrays: Arrays, order: Ranks, destinations: Ranks) -> bool:
    """Exchanges what lies beside a sample that is most of its rank's limit for the lightest of other ranks.

    Such a rank, where it is above its limit, needs the lightest of all ranks, of each a few. Takers stay within their
    limits. Memory is not looked at.
    """
    rows = build_rows(arrays, order, destinations)
    load, limits, budget, changed = rows.load, arrays.limits, LIGHT * order.size, False
    above = load > limits
    for giver in range(limits.size):
        count = rows.length[giver] - 1  # entries beside the heaviest, of which the heavier ones go first
        company, cost = rows.item[rows.start[giver] :], rows.cost[rows.start[giver] :]
        if count <= 0 or 2 * cost[count] <= limits[giver]:
            continue
        for b in order:
            if load[giver] <= limits[giver] or count == 0 or cost[count - 1] <= arrays.costs[b] or budget < 0:
                break
            budget -= 1
            taker = destinations[b]
            if above[taker]:
                continue
            x = _first_at_least(cost, 0, count, arrays.costs[b] + limits[taker] - load[taker] + 1) - 1
            if x < 0 or cost[x] <= arrays.costs[b]:
                continue
            destinations[company[x]], destinations[b] = taker, giver
            load[giver] -= cost[x] - arrays.costs[b]
            load[taker] += cost[x] - arrays.costs[b]
            count -= 1
            for y in range(x, count):
                company[y], cost[y] = company[y + 1], cost[y + 1]
            changed = True
    return changed


def exchange_from(
    problem: Problem,
    start: Ranks,
    *,
    plain: bool = True,
    effort: int = 0,
    groups: Groups | None = None,
) -> tuple[Ranks, float]:
    """Exchanges from an assignment on, inside each group of ranks; the destinations, and the overload that is left."""
    destinations, least = start.copy(), np.inf
    choices = max(1, min(MOST_CHOICES, CHOICES * problem.num_ranks // max(start.size, 1))) if plain else 0
    for _ in range(12 if effort else 1):
        least, cramped = exchange_in_groups(
            problem.arrays, problem.order, *(groups or everyone(problem.num_ranks)), choices, effort, destinations
        )
        if least <= 0 or not cramped:
            break
    return destinations, least
