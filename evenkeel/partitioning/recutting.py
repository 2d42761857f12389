"""Where samples in pieces are cut: so that the ranks that share them have equally much to do, all else counted.

A rank's time is its load over its speed, and what its keys and values take: the more of what it sends and receives, and
what it passes on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.compile import kernel, step
from evenkeel.partitioning.spans import SpanCosts

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_HALVINGS = 60  # of the range in which the common level is


def table_of(spans: SpanCosts) -> Floats:
    """(n, 11) what the kernels know of each sample, with what `SpanCosts.before` reads first."""
    columns = (
        spans.positions, spans.context, spans.candidates, spans.per_position, spans.per_pair, spans.targets,
        spans.per_target, spans.fixed, spans.first_cut, spans.granule, spans.num_cuts.astype(np.float64),
    )  # fmt: skip
    return np.ascontiguousarray(np.stack(columns, axis=1))


@step
def _before(table: Floats, sample: int, position: float) -> float:
    """As `SpanCosts.before`."""
    context, history = table[sample, 1], table[sample, 0] - table[sample, 2]
    last = min(max(position, context), history)
    seen = min(position, context) * history + (last * (last + 1) - context * (context + 1)) / 2
    seen += max(position - history, 0.0) * (history + 1)
    targets = max(position - (table[sample, 0] - table[sample, 5]), 0.0)
    cost: float = table[sample, 3] * position + table[sample, 4] * seen + table[sample, 6] * targets
    return cost


@step
def cost_of(table: Floats, sample: int, begin: float, end: float) -> float:
    """What the positions from `begin` to before `end` of a sample cost; of the last with what is fixed."""
    cost = _before(table, sample, np.float64(end)) - _before(table, sample, np.float64(begin))
    return cost + table[sample, 7] if end >= table[sample, 0] else cost


@step
def _exchange(
    table: Floats,
    firsts: Integers,
    ranks: Integers,
    begins: Integers,
    ends: Integers,
    nodes: Integers,
    within: float,
    between: float,
    found: Floats,
) -> tuple[int, int]:
    """What each rank's keys and values take, into found[0]; returns positions that travel within and between nodes.

    To each node they go once: to each rank there that sees them an equal share, which it passes on to the others there.
    `found` is (8, num_ranks), with work space for what ranks send and receive, and for what nodes have of a sample:
    pieces that follow; keys that were counted, and those of them that its latest piece sends; what each of its ranks
    has received, and passed on.
    """
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
        history, before = np.int64(table[s, 0] - table[s, 2]), 0
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
def measure(
    base: Floats,
    table: Floats,
    firsts: Integers,
    ranks: Integers,
    begins: Integers,
    ends: Integers,
    nodes: Integers,
    within: float,
    between: float,
) -> tuple[Floats, Floats, int, int]:
    """Loads and exchange of each rank, and the positions whose keys and values travel within nodes and between them.

    Args:
        base: (num_ranks,) load of what stays.
        table: (s, 11) see `table_of`, of the samples in pieces.
        firsts: (s + 1,) where their pieces begin.
        ranks: (pieces,) rank of each.
        begins: (pieces,) first position of each.
        ends: (pieces,) the one after its last.
        nodes: (num_ranks,) node of each rank.
        within: Price of a position's keys and values that go to a rank of the same node.
        between: Price of those that go to another, once for all of its ranks.
    """
    loads, found = base.copy(), np.zeros((8, base.size))
    for s in range(firsts.size - 1):
        for i in range(firsts[s], firsts[s + 1]):
            loads[ranks[i]] += cost_of(table, s, begins[i], ends[i])
    near, far = _exchange(table, firsts, ranks, begins, ends, nodes, within, between, found)
    return loads, found[0], near, far


@step
def _cut(table: Floats, sample: int, first: int, last: int, shares: Floats, begins: Integers, ends: Integers) -> None:
    """Cuts a sample so that its pieces cost what their shares say, as nearly as may be."""
    count, place, wanted = np.int64(table[sample, 10]), np.int64(-1), 0.0
    for i in range(first, last - 1):
        wanted += shares[i - first]
        low, high = place + 1, count - (last - 1 - i)  # a place for each cut that follows
        least = low
        while low < high:
            middle = (low + high) // 2
            if _before(table, sample, table[sample, 8] + middle * table[sample, 9]) < wanted:
                low = middle + 1
            else:
                high = middle
        at = table[sample, 8] + low * table[sample, 9]
        if low > least:
            below = at - table[sample, 9]
            if wanted - _before(table, sample, below) <= _before(table, sample, at) - wanted:
                low, at = low - 1, below
        place = low
        ends[i] = np.int64(at)
        begins[i + 1] = np.int64(at)


@kernel
def recut(
    base: Floats,
    speeds: Floats,
    table: Floats,
    firsts: Integers,
    ranks: Integers,
    begins: Integers,
    ends: Integers,
    nodes: Integers,
    within: float,
    between: float,
    costs: Floats,
    passes: int,
) -> float:
    """Cuts the samples one after the other where their ranks get equally much to do, some passes over all of them.

    Args as for `measure`; `speeds` are the ranks', `begins` and `ends` take the best cuts, and `costs` are what the
    pieces had better cost in the first turn. A sample in p pieces can be cut in p - 1 places at least.

    Returns:
        The largest time of a rank.
    """
    num_ranks = base.size
    found, busy = np.zeros((8, num_ranks)), np.zeros(num_ranks)
    shares, costs = np.zeros(num_ranks), costs.copy()
    best, best_begins, best_ends = np.inf, begins.copy(), ends.copy()
    for turn in range(passes + 1):
        for s in range(firsts.size - 1):
            first, last = firsts[s], firsts[s + 1]
            total = cost_of(table, s, 0.0, table[s, 0])
            if turn == 0:
                for i in range(first, last):
                    shares[i - first] = costs[i]
            else:
                _exchange(table, firsts, ranks, begins, ends, nodes, within, between, found)
                for r in range(num_ranks):
                    busy[r] = base[r] / speeds[r] + found[0, r]
                for i in range(ranks.size):
                    if i < first or i >= last:
                        busy[ranks[i]] += costs[i] / speeds[ranks[i]]
                low, high = np.inf, 0.0
                slowest = np.inf
                for i in range(first, last):
                    low, high = min(low, busy[ranks[i]]), max(high, busy[ranks[i]])
                    slowest = min(slowest, speeds[ranks[i]])
                high += total / slowest
                for _ in range(_HALVINGS):
                    level, room = (low + high) / 2, 0.0
                    for i in range(first, last):
                        room += max(level - busy[ranks[i]], 0.0) * speeds[ranks[i]]
                    if room < total:
                        low = level
                    else:
                        high = level
                for i in range(first, last):
                    shares[i - first] = max(high - busy[ranks[i]], 0.0) * speeds[ranks[i]]
            _cut(table, s, first, last, shares, begins, ends)
            for i in range(first, last):
                costs[i] = cost_of(table, s, begins[i], ends[i])
        _exchange(table, firsts, ranks, begins, ends, nodes, within, between, found)
        busy[:] = base
        for i in range(ranks.size):
            busy[ranks[i]] += costs[i]
        time = 0.0
        for r in range(num_ranks):
            time = max(time, busy[r] / speeds[r] + found[0, r])
        if time < best:
            best = time
            best_begins[:], best_ends[:] = begins, ends
    begins[:], ends[:] = best_begins, best_ends
    return best
