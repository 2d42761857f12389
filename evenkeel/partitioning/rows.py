"""The search's state: each rank's samples in ascending order of cost, with their sum and the memory they take."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.compile import kernel, step

ACROSS = 16.0  # moving a sample to another node costs this many times as much as inside one


class Terms(NamedTuple):
    """What the search must respect; arrays only, so that kernels can take it whole.

    Attributes:
        costs: (n,) cost of each sample.
        sizes: (n,) size of each sample.
        homes: (n,) home of each sample.
        memory: (n,) memory of each sample, or (0,) without caps.
        caps: (num_ranks,) memory of each rank.
        fewest: (num_ranks,) samples that a rank must keep at least.
        most: (num_ranks,) samples that a rank may hold at most.
        speeds: (num_ranks,) relative speeds.
        nodes: (num_ranks,) host of each rank.
        limits: (num_ranks,) load that each rank should not exceed, rounded to whole units.
    """

    costs: NDArray[np.int64]
    sizes: NDArray[np.float64]
    homes: NDArray[np.int32]
    memory: NDArray[np.int64]
    caps: NDArray[np.int64]
    fewest: NDArray[np.int64]
    most: NDArray[np.int64]
    speeds: NDArray[np.float64]
    nodes: NDArray[np.int32]
    limits: NDArray[np.int64]


class Rows(NamedTuple):
    """Samples by rank: row r is `length[r]` entries from `start[r]` on, with room for `room[r]`."""

    cost: NDArray[np.int64]
    item: NDArray[np.int32]
    start: NDArray[np.int64]
    length: NDArray[np.int64]
    room: NDArray[np.int64]
    load: NDArray[np.int64]
    used: NDArray[np.int64]


@kernel
def build_rows(terms: Terms, order: NDArray[np.int32], destinations: NDArray[np.int32]) -> Rows:
    """Rows of an assignment; `order` sorts the costs ascending. Rows leave room for half as many samples again."""
    num_ranks = terms.limits.size
    length = np.zeros(num_ranks, np.int64)
    for rank in destinations:
        length[rank] += 1
    room = np.empty(num_ranks, np.int64)
    start = np.empty(num_ranks, np.int64)
    total = 0
    for r in range(num_ranks):
        room[r] = max(length[r], min(terms.most[r], length[r] + length[r] // 2 + 16))
        start[r] = total
        total += room[r]
        length[r] = 0
    cost = np.empty(total, np.int64)
    item = np.empty(total, np.int32)
    load = np.zeros(num_ranks, np.int64)
    used = np.zeros(num_ranks, np.int64)
    for i in order:
        rank = destinations[i]
        place = start[rank] + length[rank]
        cost[place] = terms.costs[i]
        item[place] = i
        length[rank] += 1
        load[rank] += terms.costs[i]
        if terms.memory.size > 0:
            used[rank] += terms.memory[i]
    return Rows(cost, item, start, length, room, load, used)


@step
def read_rows(rows: Rows, ranks: NDArray[np.int64], destinations: NDArray[np.int32]) -> None:
    """Write the rank of each sample of `ranks` to `destinations`."""
    for rank in ranks:
        for i in range(rows.start[rank], rows.start[rank] + rows.length[rank]):
            destinations[rows.item[i]] = rank


@step
def away(terms: Terms, item: int, rank: int) -> float:
    """What it costs that `item` is trained on `rank`: its size, and sixteen times as much across nodes."""
    home = terms.homes[item]
    if home == rank:
        return 0.0
    if terms.nodes[home] == terms.nodes[rank]:
        return float(terms.sizes[item])
    return ACROSS * float(terms.sizes[item])


@step
def remove(rows: Rows, rank: int, i: int) -> None:
    """Take entry `i` of row `rank` out; the sums are the caller's."""
    begin = rows.start[rank]
    rows.length[rank] -= 1
    for place in range(begin + i, begin + rows.length[rank]):
        rows.cost[place] = rows.cost[place + 1]
        rows.item[place] = rows.item[place + 1]


@step
def insert(rows: Rows, rank: int, cost: int, item: int) -> None:
    """Put a sample into row `rank`, which must have room, behind those of equal cost; the sums are the caller's."""
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
def exchange(terms: Terms, rows: Rows, giver: int, i: int, taker: int, j: int) -> None:
    """Hand entry `i` of row `giver` to `taker`, and entry `j` of row `taker` to `giver` unless `j` is negative."""
    a = rows.item[rows.start[giver] + i]
    cost_a = rows.cost[rows.start[giver] + i]
    remove(rows, giver, i)
    rows.load[giver] -= cost_a
    rows.load[taker] += cost_a
    if terms.memory.size > 0:
        rows.used[giver] -= terms.memory[a]
        rows.used[taker] += terms.memory[a]
    if j >= 0:
        b = rows.item[rows.start[taker] + j]
        cost_b = rows.cost[rows.start[taker] + j]
        remove(rows, taker, j)
        insert(rows, giver, cost_b, b)
        rows.load[giver] += cost_b
        rows.load[taker] -= cost_b
        if terms.memory.size > 0:
            rows.used[giver] += terms.memory[b]
            rows.used[taker] -= terms.memory[b]
    insert(rows, taker, cost_a, a)
