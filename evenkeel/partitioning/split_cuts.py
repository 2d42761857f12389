"""Where samples in pieces are cut: so that the ranks that share them have equally much to do, all else counted.

A rank's time is its load over its speed, and what its keys and values take: the more of what it sends and receives, and
what it passes on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.compile import kernel, step
from evenkeel.partitioning.splits import step_before as _before
from evenkeel.partitioning.splits import step_cuts as _cuts

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_HALVINGS = 60  # of the range in which the common level is


class Pieces(NamedTuple):
    """Samples in pieces.

    Attributes:
        table: (samples,) of `SPAN`.
        firsts: (samples + 1,) the first piece of each; they ascend by position.
        ranks: (pieces,) the rank of each piece.
        begins: (pieces,) its first position.
        ends: (pieces,) the one after its last.
    """

    table: NDArray[Any]
    firsts: Integers
    ranks: Integers
    begins: Integers
    ends: Integers


class Machine(NamedTuple):
    """Speed and node of each rank, and what a position's keys and values take within a node and between nodes."""

    speeds: Floats
    nodes: Integers
    within: float
    between: float


@step
def cost_of(table: NDArray[Any], sample: int, begin: float, end: float) -> float:
    """What the positions from `begin` to before `end` of a sample cost; of the last with what is fixed."""
    span = table[sample]
    cost: float = _before(span, np.float64(end)) - _before(span, np.float64(begin))
    return cost + span.fixed if end >= span.positions else cost


@step
def _exchange(pieces: Pieces, machine: Machine, found: Floats) -> tuple[int, int]:
    """What each rank's keys and values take, into found[0]; returns positions that travel within and between nodes.

    To each node they go once: to each rank there that sees them an equal share, which it passes on to the others there.
    `found` is (8, num_ranks), with work space for what ranks send and receive, and for what nodes have of a sample:
    pieces that follow; keys that were counted, and those of them that its latest piece sends; what each of its ranks
    has received, and passed on.
    """
    table, firsts, ranks, begins, ends = pieces
    nodes, within, between = machine.nodes, machine.within, machine.between
    exchange, sent, received, later, counted, latest, taken, passed = found
    found[:] = 0.0
    near = far = 0
    for s in range(firsts.size - 1):
        first, last, num_nodes = firsts[s], firsts[s + 1], 0
        for i in range(first, last):
            node = nodes[ranks[i]]
            later[node] = counted[node] = latest[node] = taken[node] = passed[node] = 0.0
        for i in range(first, last):
            num_nodes += 1 if later[nodes[ranks[i]]] == 0 else 0
            later[nodes[ranks[i]]] += 1
        history, before = np.int64(table[s].positions - table[s].candidates), 0
        for i in range(first, last):
            rank, keys = ranks[i], max(min(ends[i], history) - begins[i], 0)
            node = nodes[rank]
            # All keys since the node's piece before are shared by as many ranks: this one's, and of those that follow.
            more, own = before - counted[node], latest[node]
            taken[node] += (between * (more - own) + within * own) / later[node]
            passed[node] += within * (more - more / later[node])
            received[rank] += taken[node]
            exchange[rank] += passed[node]
            later[node] -= 1
            counted[node], latest[node] = before, keys
            before += keys
            is_alone = later[node] == 0
            num_nodes -= 1 if is_alone else 0
            others = num_nodes if is_alone else num_nodes - 1
            sent[rank] += keys * (between * others + (0.0 if is_alone else within))
            far += keys * others
            near += keys * (last - 1 - i - others)
    for r in range(exchange.size):
        exchange[r] += max(sent[r], received[r])
    return near, far


@kernel
def measure(base: Floats, pieces: Pieces, machine: Machine) -> tuple[Floats, Floats, int, int]:
    """Loads and exchange of each rank, and the positions whose keys and values travel within nodes and between them."""
    loads, found = base.copy(), np.zeros((8, base.size))
    for s in range(pieces.firsts.size - 1):
        for i in range(pieces.firsts[s], pieces.firsts[s + 1]):
            loads[pieces.ranks[i]] += cost_of(pieces.table, s, pieces.begins[i], pieces.ends[i])
    near, far = _exchange(pieces, machine, found)
    return loads, found[0], near, far


@step
def _cut(pieces: Pieces, sample: int, shares: Floats) -> None:
    """Cuts a sample so that its pieces cost what their shares say, as nearly as may be."""
    span, first, last = pieces.table[sample], pieces.firsts[sample], pieces.firsts[sample + 1]
    count, first_cut = np.int64(_cuts(span)), span.head + span.granule
    place, wanted = np.int64(-1), 0.0
    for i in range(first, last - 1):
        wanted += shares[i]
        low, high = place + 1, count - (last - 1 - i)  # a place for each cut that follows
        least = low
        while low < high:
            middle = (low + high) // 2
            if _before(span, first_cut + middle * span.granule) < wanted:
                low = middle + 1
            else:
                high = middle
        at = first_cut + low * span.granule
        if low > least:
            below = at - span.granule
            if wanted - _before(span, below) <= _before(span, at) - wanted:
                low, at = low - 1, below
        place = low
        pieces.ends[i] = np.int64(at)
        pieces.begins[i + 1] = np.int64(at)


@kernel
def filled(times: Floats, speeds: Floats, work: float) -> float:
    """The time to which work fills ranks that are busy for so long already."""
    speed = worked = 0.0  # of the ranks that are filled
    for r in np.argsort(times, kind="mergesort"):
        if speed > 0.0 and times[r] * speed - worked >= work:
            break
        speed += speeds[r]
        worked += speeds[r] * times[r]
    return (work + worked) / speed


@step
def _spend(base: Floats, pieces: Pieces, machine: Machine, costs: Floats, found: Floats, times: Floats) -> None:
    """What each rank takes, into `times`, where pieces cost so much."""
    _exchange(pieces, machine, found)
    for r in range(base.size):
        times[r] = base[r] / machine.speeds[r] + found[0, r]
    for i in range(costs.size):
        times[pieces.ranks[i]] += costs[i] / machine.speeds[pieces.ranks[i]]


@kernel
def recut(base: Floats, pieces: Pieces, machine: Machine, costs: Floats, passes: int) -> float:
    """Cuts the samples one after the other where their ranks get equally much to do, some passes over all of them.

    `base` is what the ranks have to do besides, and `costs` what the pieces had better cost at first; the pieces take
    the best cuts. A sample in p pieces can be cut in p - 1 places at least.
    """
    table, firsts, ranks, begins, ends = pieces
    found, times = np.zeros((8, base.size)), np.zeros(base.size)
    shares, costs = costs.copy(), costs.copy()
    best, best_begins, best_ends = np.inf, begins.copy(), ends.copy()
    for turn in range(passes + 1):
        for s in range(firsts.size - 1):
            first, last = firsts[s], firsts[s + 1]
            if turn > 0:
                _spend(base, pieces, machine, costs, found, times)
                own, speeds = ranks[first:last], machine.speeds[ranks[first:last]]
                besides = times[own] - costs[first:last] / speeds
                level = filled(besides, speeds, cost_of(table, s, 0.0, table[s].positions))
                shares[first:last] = np.maximum(level - besides, 0.0) * speeds
            _cut(pieces, s, shares)
            for i in range(first, last):
                costs[i] = cost_of(table, s, begins[i], ends[i])
        _spend(base, pieces, machine, costs, found, times)
        if times.max() < best:
            best = times.max()
            best_begins[:], best_ends[:] = begins, ends
    begins[:], ends[:] = best_begins, best_ends
    return best


@step
def _busy(table: NDArray[Any], sample: int, begin: float, end: float, later: int, price: float) -> float:
    """The time of a piece with so many later ones: its work, and the more of what it receives and sends."""
    return cost_of(table, sample, begin, end) + price * max(begin, max(end - begin, 0.0) if later else 0.0)


@kernel
def pieces_at(
    table: NDArray[Any], sample: int, level: float, price: float, most: int, times: Floats, begins: Floats
) -> int:
    """The fewest consecutive pieces of which none takes longer than a level, each on a rank of its own.

    From the end, each piece begins as early as the level allows. Any pieces within the level begin where these do or
    later, counted from the end, so no others are fewer, or receive less.
    """
    end = table[sample].positions
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
def divide(table: NDArray[Any], sample: int, level: float, price: float, times: Floats, costs: Floats) -> None:
    """A sample in so many pieces: at a level where that takes so many, or that take equally long.

    Args as for `pieces_at`; `times` and `costs` take those of each piece, the first positions first.
    """
    count = times.size
    begins = np.empty(count)
    found = pieces_at(table, sample, level, price, count, times, begins)
    if found != count:
        low, high = 0.0, cost_of(table, sample, 0.0, table[sample].positions)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if pieces_at(table, sample, middle, price, count, times, begins) <= count:
                high = middle
            else:
                low = middle
        found = pieces_at(table, sample, high, price, count, times, begins)
    if found != count:  # so many only take longer than fewer
        times[:] = costs[:] = cost_of(table, sample, 0.0, table[sample].positions) / count
        return
    times[:], begins[:] = times[::-1].copy(), begins[::-1].copy()
    for i in range(count):
        costs[i] = cost_of(table, sample, begins[i], begins[i + 1] if i + 1 < count else table[sample].positions)


@kernel
def place_pieces(
    order: Integers, homes: Integers, firsts: Integers, times: Floats, machine: Machine, room: Floats, full: float
) -> Integers:
    """Where pieces had best go: to the ranks with the most room, of the node with the most if that has enough ranks.

    The last pieces of a sample come first. What finds no room in their node goes to another one, so that the keys and
    values of few positions cross between them, and to many ranks. A sample's first piece, which may be the smallest,
    is placed when all others are.
    """
    speeds, nodes = machine.speeds, machine.nodes
    num_nodes, mean = nodes.max() + 1, speeds.mean()
    room, rooms, sizes = room.copy(), np.zeros(num_nodes), np.zeros(num_nodes, np.int64)
    placed, taken = np.zeros(times.size, np.int64), np.zeros(speeds.size, np.bool_)
    left, left_in = np.zeros(order.size), np.zeros(order.size, np.int64)
    for r in range(speeds.size):
        rooms[nodes[r]] += room[r]
        sizes[nodes[r]] += 1
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
            rank = _roomiest(node, full * times[i], machine, rooms, room, taken, home)
            node, placed[i], taken[rank] = nodes[rank], rank, True
            room[rank] -= times[i] * speeds[rank]
            rooms[node] -= times[i] * speeds[rank]
        rooms[node] -= times[first] * mean
        left[s], left_in[s] = -times[first], node
    for s in np.argsort(left, kind="mergesort"):
        first = firsts[s]
        taken[:] = False
        taken[placed[first + 1 : firsts[s + 1]]] = True
        rank = _roomiest(left_in[s], full * times[first], machine, rooms, room, taken, homes[s])
        placed[first] = rank
        room[rank] -= times[first] * speeds[rank]
    return placed


@step
def _roomiest(
    node: int, least: float, machine: Machine, rooms: Floats, room: Floats, taken: NDArray[np.bool_], home: int
) -> int:
    """The rank with the most room in a node, or where that has less than the least, in the node with the most."""
    best, other = _best(node, machine.nodes, room, taken, home), -1
    if best >= 0 and (least == 0.0 or room[best] >= least * machine.speeds[best]):
        return best
    for r in range(room.size):
        if not taken[r] and (best < 0 or room[r] > room[best]):
            n = machine.nodes[r]
            if other < 0 or rooms[n] > rooms[other] or (rooms[n] == rooms[other] and n < other):
                other = n
    return best if other < 0 else _best(other, machine.nodes, room, taken, home)


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
