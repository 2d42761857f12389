"""Plain transcriptions that the kernels are held against: lists, loops, no shortcuts."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def karmarkar_karp_sets(costs: Any, num_sets: int, *, equal: bool) -> list[int]:
    """Set of each sample; sets carry (sum, number of members, members in order of joining) and compare as such."""
    values = np.asarray(costs).tolist()
    items = sorted(range(len(values)), key=lambda i: (values[i], i))
    empty: tuple[Any, int, list[Any]] = (0, 0, [])

    def alone(i: int) -> tuple[Any, int, list[Any]]:
        return (values[i], 1, [(i, values[i])])

    states = []
    if equal:
        slots: list[int | None] = [None] * (-len(items) % num_sets)
        slots += items
        for begin in range(0, len(slots), num_sets):
            states.append([empty if i is None else alone(i) for i in slots[begin : begin + num_sets]])
    else:
        states = [[alone(i)] + [empty] * (num_sets - 1) for i in items]
    for state in states:
        state.sort(reverse=True)
    while len(states) > 1:
        states.sort(key=lambda state: (state[0][0] - state[-1][0], state[0]), reverse=True)
        a, b, *rest = states
        joined = [tuple(x + y for x, y in zip(a[i], b[num_sets - 1 - i], strict=True)) for i in range(num_sets)]
        joined.sort(reverse=True)
        states = [joined, *rest]
    sets = [0] * len(values)
    for index, (_, _, members) in enumerate(states[0] if states else []):
        for i, _ in members:
            sets[i] = index
    return sets


def lpt_loads(costs: Sequence[int], num_ranks: int, fewest: int, most: int) -> list[int]:
    """Loads after placing the longest first onto the least loaded rank with room, so that all get their fewest."""
    loads, counts = [0] * num_ranks, [0] * num_ranks
    for number, cost in enumerate(sorted(costs, reverse=True)):
        needed = sum(max(fewest - count, 0) for count in counts)
        room = fewest if needed == len(costs) - number else most
        rank = min((r for r in range(num_ranks) if counts[r] < room), key=lambda r: (loads[r], r))
        loads[rank] += cost
        counts[rank] += 1
    return loads


def allowed_counts(homes: Sequence[int], num_ranks: int, counts: str) -> list[range]:
    """For each rank, the numbers of samples that it may end with."""
    n = len(homes)
    at_home = [list(homes).count(r) for r in range(num_ranks)]
    if counts == "free":
        return [range(n + 1)] * num_ranks
    if max(at_home) - min(at_home) <= 1:
        return [range(c, c + 1) for c in at_home]
    return [range(n // num_ranks, -(-n // num_ranks) + 1)] * num_ranks


def assignments(homes: Sequence[int], num_ranks: int, counts: str) -> Iterator[tuple[int, ...]]:
    """Every assignment that respects the counts."""
    allowed = allowed_counts(homes, num_ranks, counts)
    for ranks in itertools.product(range(num_ranks), repeat=len(homes)):
        if all(ranks.count(r) in allowed[r] for r in range(num_ranks)):
            yield ranks


class Traffic:
    """What ranks send and receive: to each node once, a share to each of its ranks, which passes it on to the others.

    Args:
        num_ranks: Ranks.
        nodes: Of each.
        within: Price of a position that goes to a rank of the same node.
        between: Price of one that goes to another.
    """

    def __init__(self, num_ranks: int, nodes: Any, within: float, between: float) -> None:
        self.nodes, self.prices, self.first, self.then = nodes, (within, between), *np.zeros((2, 2, num_ranks))

    def add(self, keys: float, source: int, targets: Sequence[int]) -> None:
        """Keys and values of a piece go to the ranks of later ones."""
        for relay in targets:
            others = [rank for rank in targets if self.nodes[rank] == self.nodes[relay] and rank != relay]
            share = keys / (len(others) + 1)
            price = share * self.prices[int(self.nodes[source] != self.nodes[relay])]
            self.first[:, [source, relay]] += [[price, 0.0], [0.0, price]]
            for rank in others:
                self.then[:, [relay, rank]] += share * self.prices[0] * np.eye(2)

    def times(self) -> NDArray[np.float64]:
        """(num_ranks,) the more of what is sent and received, and again of what is passed on."""
        times: NDArray[np.float64] = self.first.max(axis=0) + self.then.max(axis=0)
        return times


def rows_of(users: Any, sizes: Any, ranks: Any) -> float:
    """Rows that all ranks look up, where those of a sample are among those of its user's largest on the rank."""
    largest: dict[tuple[int, int], float] = {}
    for user, size, rank in zip(users.tolist(), sizes.tolist(), ranks.tolist(), strict=True):
        largest[user, rank] = max(largest.get((user, rank), 0.0), size)
    return sum(largest.values())
