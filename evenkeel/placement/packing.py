"""Whole ranks: which tables share a rank, and at which ratio each, so that the slowest rank is fastest.

An iterated local search moves and swaps items. What it compares is the linear relaxation of each rank's own choice of
ratios (steps down the convex hulls of its items, best first, while there is room), so that items and ratios change
together; at the end every rank's options are chosen exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evenkeel.placement.knapsack import Knapsack, solve_knapsack
from evenkeel.placement.limits import Watch
from evenkeel.placement.ranks import Loads

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Hull = tuple[float, float, FloatArray, FloatArray]

_SLACK = 1e-6
_MOST_EVALUATIONS = 30_000
_KICKS = 12
_ROUGH_GAP = 1e-6
_KICKED = 3


@dataclass(frozen=True, slots=True)
class Shelves:
    """Items that go to ranks whole.

    Attributes:
        seconds: (items, options) time on the rank that holds it; infinite where there is no such option.
        hbm: (items, options) HBM.
        host: (items, options) host memory.
        ranks: Number of ranks.
        local_ranks: Ranks of a host.
        hbm_room: HBM of each rank.
        host_room: Memory of each host; may be infinite.
        taken: What ranks and hosts hold already.
    """

    seconds: FloatArray
    hbm: FloatArray
    host: FloatArray
    ranks: int
    local_ranks: int
    hbm_room: float
    host_room: float
    taken: Loads | None = None

    def already(self) -> Loads:
        """What ranks and hosts hold already."""
        nothing = Loads(np.zeros(self.ranks), np.zeros(self.ranks), np.zeros(self.ranks // self.local_ranks))
        return self.taken or nothing


@dataclass(frozen=True, slots=True)
class Packed:
    """Items on ranks.

    Attributes:
        rank: (items,) rank of each item.
        option: (items,) option of each item.
        slowest: Time of the slowest rank.
    """

    rank: IntArray
    option: IntArray
    slowest: float


def improve_packing(shelves: Shelves, rank: IntArray, enough: float, watch: Watch | None = None) -> Packed | None:
    """Move and swap items while the slowest rank gets faster; `None` where nothing found fits.

    Args:
        shelves: What to place.
        rank: (items,) where to start.
        enough: Time of the slowest rank at which to stop.
        watch: Looked at all the time; once its time is up, the best so far is returned.

    The search is bounded by a number of evaluations, so that it ends alike everywhere.
    """
    watch = watch or Watch()
    relaxation = _Relaxation(shelves, watch)
    draw = np.random.default_rng(0)
    best: Packed | None = None
    start = rank
    for _ in range(1 + _KICKS):
        found = _choose_options(shelves, _descend(shelves, relaxation, start), watch)
        if found is not None and (best is None or found.slowest < best.slowest):
            best = found
        if relaxation.spent() or (best is not None and best.slowest <= enough):
            break
        start = (best.rank if best is not None else rank).copy()
        kicked = draw.permutation(len(start))[: 2 * _KICKED]
        start[kicked] = start[kicked[::-1]]
    return best


class _Relaxation:
    """Least time of a rank with given items, the last ratio in part; counts how often it is asked."""

    def __init__(self, shelves: Shelves, watch: Watch) -> None:
        self.watch = watch
        self.hulls = [_hull(seconds, hbm) for seconds, hbm in zip(shelves.seconds, shelves.hbm, strict=True)]
        already = shelves.already()
        self.seconds, self.room = already.seconds, shelves.hbm_room - already.hbm
        self.asked = 0

    def __call__(self, rank: int, items: IntArray) -> float:
        self.asked += 1
        return float(self.seconds[rank]) + _least_seconds(self.hulls, items, float(self.room[rank]))

    def spent(self) -> bool:
        """Whether the search has been long enough."""
        return self.asked >= _MOST_EVALUATIONS or self.watch.is_over()


def _descend(shelves: Shelves, least: _Relaxation, rank: IntArray) -> IntArray:
    """The best move or swap of an item of the slowest rank, again and again, until none helps."""
    rank = rank.copy()
    load = np.array([least(number, np.flatnonzero(rank == number)) for number in range(shelves.ranks)])
    while not least.spent():
        slow = int(load.argmax())
        change = _best_change(rank, load, slow, least)
        if change is None:
            break
        item, back, other, load[slow], load[other] = change
        rank[item] = other
        if back >= 0:
            rank[back] = slow
    return rank


def _best_change(
    rank: IntArray, load: FloatArray, slow: int, least: _Relaxation
) -> tuple[int, int, int, float, float] | None:
    """Item of the slowest rank, item that comes back or -1, the other rank, and the times of the two afterwards."""
    mine = np.flatnonzero(rank == slow)
    best, change = load[slow] * (1 - 1e-6) if np.isfinite(load[slow]) else np.inf, None
    for other in range(len(load)):
        if other == slow or load[other] >= best or least.spent():
            continue
        theirs = np.flatnonzero(rank == other)
        for item in mine:
            if least.watch.is_over():
                break
            kept = mine[mine != item]
            for back in (-1, *theirs):
                first = least(slow, kept if back < 0 else np.append(kept, back))
                if first >= best:
                    continue
                second = least(other, np.append(theirs[theirs != back], item))
                if max(first, second) < best:
                    best, change = max(first, second), (int(item), int(back), other, first, second)
    return change


def _choose_options(shelves: Shelves, rank: IntArray, watch: Watch) -> Packed | None:
    """The fastest options of every rank's items that keep its HBM and, ranks of a host alike, its share of memory."""
    option = np.zeros(len(rank), dtype=np.int64)
    slowest, already = 0.0, shelves.already()
    for host in range(shelves.ranks // shelves.local_ranks):
        left = shelves.host_room - float(already.host[host])
        for number in range(host * shelves.local_ranks, (host + 1) * shelves.local_ranks):
            items = np.flatnonzero(rank == number)
            use = np.stack([shelves.hbm[items], shelves.host[items]])
            knapsack = Knapsack(shelves.seconds[items], use, np.array([shelves.hbm_room - already.hbm[number], left]))
            # Also when time is up a choice is made, if only the first that comes.
            found = solve_knapsack(knapsack, gap=_ROUGH_GAP, watch=watch)
            if found.choice is None:
                return None
            option[items] = found.choice
            slowest = max(slowest, float(already.seconds[number]) + found.cost)
            left -= float(shelves.host[items, found.choice].sum())
    return Packed(rank, option, slowest)


def _hull(seconds: FloatArray, hbm: FloatArray) -> Hull:
    """HBM and time of the smallest option, and the HBM and time of each step down the convex hull from it."""
    usable = np.flatnonzero(np.isfinite(seconds))
    order = usable[np.lexsort((seconds[usable], hbm[usable]))]
    hull: list[int] = []
    for point in order:
        if hull and seconds[point] >= seconds[hull[-1]]:
            continue
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (seconds[a] - seconds[b]) * (hbm[point] - hbm[b]) > (seconds[b] - seconds[point]) * (hbm[b] - hbm[a]):
                break
            hull.pop()
        if hull and hbm[hull[-1]] == hbm[point]:
            hull.pop()
        hull.append(int(point))
    return float(hbm[hull[0]]), float(seconds[hull[0]]), np.diff(hbm[hull]), -np.diff(seconds[hull])


def _least_seconds(hulls: list[Hull], items: IntArray, room: float) -> float:
    """Least time of a rank with `items`, the last ratio in part: the linear relaxation."""
    if not len(items):
        return 0.0
    chosen = [hulls[item] for item in items]
    room -= sum(hull[0] for hull in chosen)
    if room < -_SLACK:
        return np.inf
    total = sum(hull[1] for hull in chosen)
    size, saved = np.concatenate([hull[2] for hull in chosen]), np.concatenate([hull[3] for hull in chosen])
    order = np.argsort(-saved / np.maximum(size, 1e-300), kind="stable")
    size, saved = size[order], saved[order]
    filled = np.cumsum(size)
    whole = int(np.searchsorted(filled, room, side="right"))
    total -= float(saved[:whole].sum())
    if whole < len(size):
        total -= float(saved[whole]) * max(0.0, room - (filled[whole - 1] if whole else 0.0)) / float(size[whole])
    return float(total)
