"""How few ranks a sample needs if none may take longer than a level, and how long each is busy with it then."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.compile import kernel, step
from evenkeel.partitioning.recutting import cost_of

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_HALVINGS = 32  # of a sample's positions, and of levels


@step
def _busy(table: Floats, sample: int, begin: float, end: float, later: int, price: float) -> float:
    """The time of a piece with so many later ones: its work, and the more of what it receives and sends."""
    return cost_of(table, sample, begin, end) + price * max(begin, max(end - begin, 0.0) if later else 0.0)


@kernel
def pieces_at(table: Floats, sample: int, level: float, price: float, most: int, times: Floats, begins: Floats) -> int:
    """The fewest consecutive pieces of which none takes longer than a level, each on a rank of its own.

    From the end, each piece begins as early as the level allows. Any pieces within the level begin where these do or
    later, counted from the end, so no others are fewer, or receive less.

    Args:
        table: See `recutting.table_of`.
        sample: Which.
        level: In units of cost.
        price: What it takes to send a position's keys and values to a rank.
        most: Pieces.
        times: (most,) takes the time of each, the last piece first.
        begins: (most,) takes the first position of each, as a number that need not be whole.

    Returns:
        How many; `most` + 1 if more would be needed, or none are enough.
    """
    end = table[sample, 0]
    for later in range(most):
        if _busy(table, sample, 0.0, end, later, price) <= level:
            times[later], begins[later] = _busy(table, sample, 0.0, end, later, price), 0.0
            return later + 1
        # up to `turn` a later beginning takes less; beyond, it may take more at first, but less from some place on
        turn = end / 2 if later else 0.0
        low, high = turn, end
        if _busy(table, sample, turn, end, later, price) <= level:
            low, high = 0.0, turn
        elif price * end > level:
            return most + 1
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if _busy(table, sample, middle, end, later, price) <= level:
                high = middle
            else:
                low = middle
        if end - high < 1e-6 * end:
            return most + 1
        times[later], begins[later] = level, high
        end = high
    return most + 1


@kernel
def divide(table: Floats, sample: int, level: float, price: float, times: Floats, costs: Floats) -> None:
    """A sample in so many pieces: at a level where that takes so many, or that take equally long.

    Args as for `pieces_at`; `times` and `costs` take those of each piece, the first positions first.
    """
    count = times.size
    begins = np.empty(count)
    found = pieces_at(table, sample, level, price, count, times, begins)
    if found != count:
        low, high = 0.0, cost_of(table, sample, 0.0, table[sample, 0])
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if pieces_at(table, sample, middle, price, count, times, begins) <= count:
                high = middle
            else:
                low = middle
        found = pieces_at(table, sample, high, price, count, times, begins)
    if found != count:  # so many only take longer than fewer
        times[:] = costs[:] = cost_of(table, sample, 0.0, table[sample, 0]) / count
        return
    times[:], begins[:] = times[::-1].copy(), begins[::-1].copy()
    for i in range(count):
        costs[i] = cost_of(table, sample, begins[i], begins[i + 1] if i + 1 < count else table[sample, 0])


@kernel
def place_pieces(
    order: Integers, homes: Integers, firsts: Integers, times: Floats, speeds: Floats, room: Floats, nodes: Integers,
    sizes: Integers, full: float,
) -> Integers:  # fmt: skip
    """Where pieces had best go: to the ranks with the most room, of the node with the most if that has enough ranks.

    The last pieces of a sample come first. What finds no room in their node goes to another one, so that the keys and
    values of few positions cross between them, and to many ranks. A sample's first piece, which may be the smallest,
    is placed when all others are.

    Args:
        order: (s,) the samples, in the order in which they are placed.
        homes: (s,) rank that holds each.
        firsts: (s + 1,) where their pieces begin.
        times: (pieces,) of each, on a rank of speed 1.
        speeds: (num_ranks,) of the ranks.
        room: (num_ranks,) work that each rank may get beside what it has.
        nodes: (num_ranks,) node of each, from 0.
        sizes: (num_nodes,) ranks of each node.
        full: A rank is full if it has less room than that share of a piece; 0: if it has a piece of the sample.

    Returns:
        (pieces,) rank of each; those of a sample differ, and are of one node after the other.
    """
    num_ranks, num_nodes, mean = speeds.size, sizes.size, speeds.mean()
    room, rooms, placed = room.copy(), np.zeros(num_nodes), np.zeros(times.size, np.int64)
    taken, left, left_in = np.zeros(num_ranks, np.bool_), np.zeros(order.size), np.zeros(order.size, np.int64)
    for r in range(num_ranks):
        rooms[nodes[r]] += room[r]
    for s in order:
        first, last, home = firsts[s], firsts[s + 1], homes[s]
        node = 0
        for n in range(1, num_nodes):
            small, smaller = sizes[node] < last - first, sizes[n] < last - first
            if small != smaller:
                better = small
            elif rooms[n] != rooms[node]:
                better = rooms[n] > rooms[node]
            else:
                better = nodes[home] == n
            node = n if better else node
        taken[:] = False
        for i in range(last - 1, first, -1):
            rank = _roomiest(node, full * times[i], speeds, rooms, nodes, room, taken, home)
            node, placed[i], taken[rank] = nodes[rank], rank, True
            room[rank] -= times[i] * speeds[rank]
            rooms[node] -= times[i] * speeds[rank]
        rooms[node] -= times[first] * mean
        left[s], left_in[s] = -times[first], node
    for s in np.argsort(left, kind="mergesort"):
        first = firsts[s]
        taken[:] = False
        taken[placed[first + 1 : firsts[s + 1]]] = True
        rank = _roomiest(left_in[s], full * times[first], speeds, rooms, nodes, room, taken, homes[s])
        placed[first] = rank
        room[rank] -= times[first] * speeds[rank]
    return placed


@step
def _roomiest(
    node: int, least: float, speeds: Floats, rooms: Floats, nodes: Integers, room: Floats, taken: NDArray[np.bool_],
    home: int,
) -> int:  # fmt: skip
    """The rank with the most room in a node, or where that has less than the least, in the node with the most."""
    best = _best(node, nodes, room, taken, home)
    if best >= 0 and (least == 0.0 or room[best] >= least * speeds[best]):
        return best
    elsewhere = -1
    for r in range(room.size):
        if taken[r] or (best >= 0 and room[r] <= room[best]):
            continue
        if elsewhere >= 0:
            n, m = nodes[r], nodes[elsewhere]
            if n != m and (rooms[n] < rooms[m] or (rooms[n] == rooms[m] and n > m)):
                continue
            if n == m and (room[r] < room[elsewhere] or (room[r] == room[elsewhere] and r != home)):
                continue
        elsewhere = r
    return best if elsewhere < 0 else elsewhere


@step
def _best(node: int, nodes: Integers, room: Floats, taken: NDArray[np.bool_], home: int) -> int:
    """The rank with the most room in a node, the sample's home among equals; -1 if all are taken."""
    best = -1
    for r in range(room.size):
        if taken[r] or nodes[r] != node:
            continue
        if best < 0 or room[r] > room[best] or (room[r] == room[best] and r == home):
            best = r
    return best
