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
    """The time of a piece with so many later ones: its work, and the more of what it receives and what it sends."""
    return cost_of(table, sample, begin, end) + price * max(begin, max(end - begin, 0.0) * later)


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
        turn = end * later / (later + 1)
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
    sizes: Integers,
) -> Integers:  # fmt: skip
    """Where pieces had best go: to the ranks with the most room, of the node with the most if that has enough ranks.

    A sample's first piece, which may be the smallest, is placed when all others are.

    Args:
        order: (s,) the samples, in the order in which they are placed.
        homes: (s,) rank that holds each.
        firsts: (s + 1,) where their pieces begin.
        times: (pieces,) of each, on a rank of speed 1.
        speeds: (num_ranks,) of the ranks.
        room: (num_ranks,) work that each rank may get beside what it has.
        nodes: (num_ranks,) node of each, from 0.
        sizes: (num_nodes,) ranks of each node.

    Returns:
        (pieces,) rank of each; those of a sample differ, and are of one node after the other.
    """
    num_ranks, num_nodes, mean = speeds.size, sizes.size, speeds.mean()
    room, rooms, placed = room.copy(), np.zeros(num_nodes), np.zeros(times.size, np.int64)
    places, taken = np.zeros((firsts.size - 1, num_nodes), np.int64), np.zeros(num_ranks, np.bool_)
    for r in range(num_ranks):
        rooms[nodes[r]] += room[r]
    left = np.zeros(firsts.size - 1)
    for s in order:
        first, last = firsts[s], firsts[s + 1]
        # nodes with ranks enough first, then those with more room; of equals the home's, then by number
        numbers, home = np.arange(num_nodes), nodes[homes[s]]
        numbers[0], numbers[1 : home + 1] = home, np.arange(home)
        numbers = numbers[np.argsort(-rooms[numbers], kind="mergesort")]
        small = sizes[numbers] < last - first
        numbers = np.concatenate((numbers[~small], numbers[small]))
        places[s, numbers] = np.arange(num_nodes)
        taken[:] = False
        for i in range(first + 1, last):
            rank = _best(places[s], nodes, room, taken, homes[s])
            placed[i], taken[rank] = rank, True
            room[rank] -= times[i] * speeds[rank]
            rooms[nodes[rank]] -= times[i] * speeds[rank]
        rooms[numbers[0]] -= times[first] * mean
        left[s] = -times[first]
    for s in np.argsort(left, kind="mergesort"):
        first, last = firsts[s], firsts[s + 1]
        taken[:] = False
        taken[placed[first + 1 : last]] = True
        rank = _best(places[s], nodes, room, taken, homes[s])
        placed[first] = rank
        room[rank] -= times[first] * speeds[rank]
    return placed


@step
def _best(places: Integers, nodes: Integers, room: Floats, taken: NDArray[np.bool_], home: int) -> int:
    """The rank with the most room in the first node that has one, the sample's home among equals."""
    best = -1
    for r in range(room.size):
        if taken[r]:
            continue
        if best >= 0:
            nearer = places[nodes[r]] - places[nodes[best]]
            if nearer > 0 or (nearer == 0 and (room[r] < room[best] or (room[r] == room[best] and r != home))):
                continue
        best = r
    return best
