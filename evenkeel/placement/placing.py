"""From choices for the average rank to a placement: shards that are not on all ranks are put on some.

The average rank bounds every placement from below. Shards go to ranks table by table, longest first, each onto the
least loaded ranks with room; then tables of the slowest rank are put elsewhere, take another option, or change places
with others, while that makes it faster.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from evenkeel.placement.layouts import Layout, Scope
from evenkeel.placement.limits import Watch
from evenkeel.placement.model import Topology
from evenkeel.placement.problem import SLACK, Group, Problem
from evenkeel.placement.search import Choice, Solution, is_agreed, solve

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Places = dict[int, tuple[int, ...]]

_TIGHTER = (0.97, 0.9, 0.8)
"""Parts of the budgets that the average rank may use: what is left lets shards fit on whole ranks."""
_KICKS, _KICKED, _KICKING = 300, 4, 0.8
"""Times that tables are taken off, how many of them at most, and the share of the time that is left."""
_HALVINGS = 5
_CLOSE = 0.003
"""Relative distance of two times of the slowest shard that are not worth another search between them."""
_SHARE = 0.3
"""Of the time that is left, for a search that others follow."""
_OPTIONS = 24
"""Options of a table that are tried in a move."""
_RECHOSEN = 60
"""Options of each table of a rank that are chosen from together."""
_MOST_OPTIONS = 2_000
"""Those that are tried where a table fits nowhere."""
_FASTER = 1 - 1e-9


@dataclass(frozen=True, slots=True)
class Placed:
    """A choice with ranks for the shards that are not on all of them.

    Attributes:
        choice: For each group, the module of each of its tables.
        places: Of each table that is not on all ranks, the rank, or host, of each of its pieces.
        seconds: Kernel time of the slowest rank.
        use: HBM of the fullest rank and memory of the fullest host, in units.
    """

    choice: Choice
    places: Places
    seconds: float
    use: FloatArray


def solve_and_place(
    problem: Problem, topology: Topology, watch: Watch, *, gap: float = 0.0, starts: Sequence[Choice] = ()
) -> tuple[Placed | None, Solution]:
    """Solve for the average rank, then find ranks for shards that are not on all of them.

    Args:
        problem: What to choose from.
        topology: The machines.
        watch: Once its time is up, the best found is returned.
        gap: Relative gap to prove.
        starts: Choices that are candidates.

    Returns:
        The placement, `None` where none was found, and the solution, whose bound no placement is below.
    """
    best: Placed | None = None
    prices: FloatArray | None = None

    def offer(choice: Choice | None) -> None:
        nonlocal best
        placed = None if choice is None else place(problem, topology, choice, watch, prices=prices)
        if placed is not None and (best is None or placed.seconds < best.seconds):
            best = placed

    for start in starts:
        offer(start)
    first = best.choice if best is not None and not problem.has_shards else None
    share = _SHARE if problem.has_shards else 1.0
    solution = solve(problem, watch.part(share), gap=gap, start=first)
    if solution.choice is None and solution.proved:
        return None, solution
    prices = solution.prices
    offer(solution.choice)
    if not problem.has_shards:
        return best, solution
    bound = max(solution.bound, problem.limited().least_shard(0))

    def is_near() -> bool:
        return best is not None and best.seconds <= bound * (1 + gap)

    for part in _TIGHTER:
        if is_near() or watch.is_over():
            break
        found = solve(problem.with_budget(*(part * problem.budget)), watch.part(_SHARE), gap=_CLOSE)
        offer(found.choice)
    if best is not None and not is_near():
        best = _kicked(problem, topology, best, solution.prices, watch.part(_KICKING), bound * (1 + gap))
    low, high = bound, math.inf if best is None else best.seconds
    for _ in range(_HALVINGS):
        if is_near() or watch.is_over() or high <= low * (1 + _CLOSE) or not math.isfinite(high):
            break
        most = math.sqrt(low * high)
        found = solve(problem.limited(most), watch.part(_SHARE), gap=_CLOSE)
        offer(found.choice)
        if found.bound > most:  # of plans whose shards all take at most that none is as fast, and no other one either
            low = bound = most
        else:
            high = most
    least = math.inf if best is None else best.seconds
    return best, replace(solution, bound=min(bound, least), proved=solution.proved and best is not None)


def _kicked(
    problem: Problem, topology: Topology, start: Placed, prices: FloatArray, watch: Watch, enough: float
) -> Placed:
    """The best of placements in which some tables are taken off and put elsewhere, again and again."""
    draw = np.random.default_rng(0)
    best = start
    for _ in range(_KICKS):
        if watch.is_over() or best.seconds <= enough:
            break
        placing = _Placing.of(problem, topology, best, prices)
        placing.kick(draw)
        if placing.ranks.fits():
            placing.improve(watch)
            placed = placing.placed()
            best = placed if placed.seconds <= best.seconds else best
    return best


class _Ranks:
    """What ranks and hosts have, and where else something would go."""

    def __init__(self, topology: Topology, budget: FloatArray) -> None:
        self.topology, self.budget = topology, budget + SLACK
        self.local = topology.local_ranks
        self.seconds, self.hbm = np.zeros((2, topology.ranks))
        self.host = np.zeros(topology.ranks // self.local)

    def add(self, layout: Layout, shard: FloatArray, places: IntArray, sign: float = 1.0) -> None:
        """Adds (3,) time, HBM and memory of a shard at each of some places, or takes them away."""
        seconds, hbm, host = sign * shard
        if layout.scope is Scope.EVERYWHERE:
            self.seconds += seconds
            self.hbm += hbm
            self.host += host
        elif layout.scope is Scope.RANK:
            np.add.at(self.seconds, places, seconds)
            np.add.at(self.hbm, places, hbm)
            np.add.at(self.host, places // self.local, host)
        else:
            ranks = (places[:, None] * self.local + np.arange(self.local)).ravel()
            np.add.at(self.seconds, ranks, seconds)
            np.add.at(self.hbm, ranks, hbm)
            np.add.at(self.host, places, host)

    def on(self, layout: Layout, places: IntArray) -> FloatArray:
        """Times of the ranks that some places are of."""
        if layout.scope is Scope.EVERYWHERE:
            return self.seconds
        if layout.scope is Scope.HOST:
            return self.seconds.reshape(-1, self.local)[places].ravel()
        return self.seconds[places]

    def fits(self) -> bool:
        """Whether all budgets are kept."""
        return bool((self.hbm <= self.budget[0]).all() and (self.host <= self.budget[1]).all())

    def spots(self, layout: Layout, shard: FloatArray) -> IntArray | None:
        """The least loaded places with room for the pieces of a table, apart from each other while there are enough."""
        if layout.scope is Scope.EVERYWHERE:
            room = (self.hbm.max() + shard[1] <= self.budget[0]) and (self.host.max() + shard[2] <= self.budget[1])
            return np.zeros(0, dtype=np.int64) if room else None
        shape = (-1, self.local) if layout.scope is Scope.HOST else (-1, 1)
        seconds, hbm = self.seconds.reshape(shape).max(axis=1), self.hbm.reshape(shape).max(axis=1)
        on_host = np.arange(len(seconds)) // (1 if layout.scope is Scope.HOST else self.local)
        rounds = -(-layout.pieces // len(seconds))
        each = np.floor((self.budget[0] - hbm) / max(shard[1], 1e-12))
        each = np.minimum(each, rounds)
        order = np.lexsort((hbm, seconds))
        found = np.concatenate([order[each[order] > turn] for turn in range(rounds)])
        if np.isfinite(self.budget[1]) and shard[2] > 0:
            most = np.floor((self.budget[1] - self.host) / shard[2])
            hosts = on_host[found]
            by_host = np.argsort(hosts, kind="stable")
            first = np.searchsorted(hosts[by_host], hosts[by_host])
            number = np.empty(len(found), dtype=np.int64)
            number[by_host] = np.arange(len(found)) - first
            found = found[number < most[hosts]]
        return found[: layout.pieces] if len(found) >= layout.pieces else None


def place(
    problem: Problem, topology: Topology, choice: Choice, watch: Watch, *, prices: FloatArray | None = None
) -> Placed | None:
    """Ranks for the shards of a choice; `None` where they do not fit.

    Args:
        problem: What the choice is of.
        topology: The machines.
        choice: A module for each table.
        watch: Once its time is up, shards stay where they are.
        prices: (2,) prices of the budgets, by which tables take other options; without, they keep theirs.
    """
    if not is_agreed(problem, choice):
        return None
    best: Placed | None = None
    for measure in (0, 1):
        placing = _Placing(problem, topology, choice, prices)
        if not placing.has_shards:
            return placing.placed() if placing.ranks.fits() else None
        if placing.fill(measure):
            placing.improve(watch)
            placed = placing.placed()
            best = placed if best is None or placed.seconds < best.seconds else best
            if prices is None:
                break
    return best


def rate(problem: Problem, topology: Topology, choice: Choice, places: Places) -> Placed:
    """What a choice of modules and places comes to, whether it keeps the budgets or not."""
    unrated = Placed(choice, places, math.inf, np.zeros(2))
    return _Placing.of(problem, topology, unrated, np.zeros(2)).placed()


class _Placing:
    """Tables on ranks."""

    def __init__(self, problem: Problem, topology: Topology, choice: Choice, prices: FloatArray | None) -> None:
        self.problem, self.topology, self.prices = problem, topology, prices
        self.rows = [(group, row) for group in problem.groups for row in range(len(group.tables))]
        self.module = np.concatenate(choice) if choice else np.zeros(0, dtype=np.int64)
        self.places: list[IntArray] = []
        self.has_shards = any(self._layout(number).scope is not Scope.EVERYWHERE for number in range(len(self.rows)))
        self.opened: Counter[Hashable] = Counter()
        self.agreed: dict[Hashable, Hashable] = {}
        self.orders: dict[int, list[int]] = {}
        for number in range(len(self.rows)):
            self._agree(number, 1)
        self.reset()

    @classmethod
    def of(cls, problem: Problem, topology: Topology, placed: Placed, prices: FloatArray) -> _Placing:
        """A placement, to be changed."""
        placing = cls(problem, topology, placed.choice, prices)
        for number, (group, row) in enumerate(placing.rows):
            places = np.array(placed.places.get(group.tables[row], ()), dtype=np.int64)
            if len(places):
                placing.places[number] = places
                placing.ranks.add(placing._layout(number), placing._shard(number), places)
        return placing

    def kick(self, draw: np.random.Generator) -> None:
        """Takes some tables off, and puts each back with the option and places that make the slowest rank fastest."""
        slow = int(self.ranks.seconds.argmax())
        every = draw.permutation(len(self.rows))
        near = [n for n in every.tolist() if self._is_on(n, slow)]
        taken = list(dict.fromkeys([*near[:1], *every.tolist()]))[: int(draw.integers(2, _KICKED + 1))]
        for number in taken:
            self._take(number)
        for number in draw.permutation(taken).tolist():
            self._insert(number)

    def _insert(self, number: int) -> None:
        """The option and places of a table that is on no rank, by the slowest rank and then by price."""
        group, row = self.rows[number]
        before = int(self.module[number]), self.places[number]
        best: tuple[float, int, IntArray] | None = None
        for module in self._options(number, _OPTIONS):
            self.module[number] = module
            shard = self._shard(number)
            spots = self.ranks.spots(self._layout(number), shard)
            if spots is None:
                continue
            loads = self.ranks.on(self._layout(number), spots)
            peak = max(float(self.ranks.seconds.max()), float(loads.max()) + float(shard[0]))
            value = peak + 0.5 / self.topology.ranks * self._price(group, row, module)
            if best is None or value < best[0]:
                best = value, module, spots
        if best is None:
            self.module[number] = before[0]
            self._give(number, before[1])
            return
        self.module[number] = best[1]
        self._give(number, best[2])

    def _price(self, group: Group, row: int, module: int) -> float:
        prices = np.zeros(2) if self.prices is None else self.prices
        return float(
            group.seconds[row, module] + prices[0] * group.hbm[row, module] + prices[1] * group.host[row, module]
        )

    def reset(self) -> None:
        """Everything that is on all ranks, and nothing else."""
        self.ranks = _Ranks(self.topology, self.problem.budget)
        self.places = [np.zeros(0, dtype=np.int64)] * len(self.rows)
        common = np.zeros(3)
        for number in range(len(self.rows)):
            if self._layout(number).scope is Scope.EVERYWHERE:
                common += self._shard(number)
        self.ranks.seconds += common[0]
        self.ranks.hbm += common[1]
        self.ranks.host += common[2]

    def _layout(self, number: int) -> Layout:
        group, _ = self.rows[number]
        return group.modules[int(self.module[number])].layout

    def _shard(self, number: int) -> FloatArray:
        group, row = self.rows[number]
        return group.shard(row, int(self.module[number]))

    def _agreements(self, number: int) -> tuple[tuple[Hashable, Hashable], ...]:
        group, _ = self.rows[number]
        return group.modules[int(self.module[number])].agreements

    def fill(self, measure: int) -> bool:
        """Puts all shards on ranks, those that are largest by time (0) or HBM (1) first; whether all fit.

        With prices, a table that fits nowhere takes the cheapest option that does.
        """
        self.reset()
        if not self.ranks.fits():
            return False
        single = [n for n in range(len(self.rows)) if self._layout(n).scope is not Scope.EVERYWHERE]
        single.sort(key=lambda n: (self._layout(n).scope is not Scope.HOST, -self._shard(n)[measure]))
        for number in single:
            self._agree(number, -1)
            for module in self._options(number, _MOST_OPTIONS):
                self.module[number] = module
                spots = self.ranks.spots(self._layout(number), self._shard(number))
                if spots is not None:
                    self._give(number, spots)
                    break
            else:
                return False
        return True

    def placed(self) -> Placed:
        """What it comes to."""
        sizes = np.cumsum([len(group.tables) for group in self.problem.groups])
        ranks = self.ranks
        places = {
            group.tables[row]: tuple(sorted(self.places[number].tolist()))
            for number, (group, row) in enumerate(self.rows)
            if len(self.places[number])
        }
        use = np.array([ranks.hbm.max(initial=0.0), ranks.host.max(initial=0.0)])
        choice = tuple(np.split(self.module, sizes[:-1])) if len(sizes) else ()
        return Placed(choice, places, float(ranks.seconds.max(initial=0.0)), use)

    def improve(self, watch: Watch) -> None:
        """Moves tables of the slowest rank, and changes options there, while that makes it faster."""
        for _ in range(20 * len(self.rows)):
            slow = int(self.ranks.seconds.argmax())
            mine = [number for number in range(len(self.rows)) if self._is_on(number, slow)]
            mine.sort(key=lambda number: (self._layout(number).scope is Scope.EVERYWHERE, -self._shard(number)[0]))
            if self._rechoose(slow, mine, watch):
                continue
            if not any(not watch.is_over() and self._move(number, slow) for number in mine) and not any(
                not watch.is_over() and self._swap(number, slow) for number in mine
            ):
                return

    def _rechoose(self, rank: int, mine: list[int], watch: Watch) -> bool:
        """The fastest options of the whole tables of a rank, where they are; whether that makes it faster."""
        mine = [n for n in mine if self._layout(n).scope is Scope.RANK and self._layout(n).pieces == 1]
        if self.prices is None or len(mine) < 2 or watch.is_over():
            return False
        groups, now = [], np.zeros(3)
        for number in mine:
            self._agree(number, -1)
        for number in mine:
            group, row = self.rows[number]
            columns = self._options(number, _RECHOSEN, self._layout(number))
            shards = np.stack([group.shard(row, module) for module in columns], axis=1)[:, None, :]
            modules = tuple(replace(group.modules[m], ratio=float(m)) for m in columns)
            groups.append(Group((number,), modules, shards[0], shards[1], shards[2], np.ones((3, len(columns)))))
            now += self._shard(number)
        for number in mine:
            self._agree(number, 1)
        room = np.array([self.ranks.hbm[rank], self.ranks.host[rank // self.topology.local_ranks]]) - now[1:]
        found = solve(Problem(tuple(groups), self.ranks.budget - room - SLACK), watch.part(_SHARE), gap=1e-3)
        if found.choice is None or not found.cost < now[0] * (1 - 1e-6):
            return False
        for number, group, chosen in zip(mine, groups, found.choice, strict=True):
            places = self.places[number]
            self._take(number)
            self.module[number] = int(group.modules[int(chosen[0])].ratio)
            self._give(number, places)
        return True

    def _is_on(self, number: int, rank: int) -> bool:
        scope = self._layout(number).scope
        place = rank // self.topology.local_ranks if scope is Scope.HOST else rank
        return scope is Scope.EVERYWHERE or place in self.places[number]

    def _move(self, number: int, slow: int) -> bool:
        """Another place or option for a table, if that makes the ranks that it changes faster than the slowest is."""
        before, peak = (int(self.module[number]), self.places[number]), float(self.ranks.seconds[slow])
        self._take(number)
        for module in self._options(number, _OPTIONS):
            self.module[number] = module
            spots = self.ranks.spots(self._layout(number), self._shard(number))
            if spots is None:
                continue
            self._give(number, spots)
            if self.ranks.seconds[slow] < peak * _FASTER and self._peak(number) < peak * _FASTER:
                return True
            self._take(number)
        self.module[number] = before[0]
        self._give(number, before[1])
        return False

    def _peak(self, number: int) -> float:
        """The slowest of the ranks that a table is on."""
        return float(self.ranks.on(self._layout(number), self.places[number]).max())

    def _take(self, number: int) -> None:
        self.ranks.add(self._layout(number), self._shard(number), self.places[number], -1.0)
        self._agree(number, -1)

    def _give(self, number: int, places: IntArray) -> None:
        self.places[number] = places
        self.ranks.add(self._layout(number), self._shard(number), places)
        self._agree(number, 1)

    def _agree(self, number: int, tables: int) -> None:
        """Counts a table among those that hold its agreements, or no longer."""
        for what, choice in self._agreements(number):
            self.opened[what] += tables
            self.agreed[what] = choice

    def _options(self, number: int, most: int, layout: Layout | None = None) -> list[int]:
        """The option of a table, and the cheapest others, of a layout if one is given, that fit what is agreed on."""
        found = [int(self.module[number])]
        if self.prices is None:
            return found
        group, row = self.rows[number]
        if number not in self.orders:
            priced = group.seconds[row] + self.prices[0] * group.hbm[row] + self.prices[1] * group.host[row]
            self.orders[number] = np.argsort(priced, kind="stable")[: np.isfinite(priced).sum()].tolist()
        for column in self.orders[number]:
            if len(found) > most:
                break
            module = group.modules[column]
            if (layout is None or module.layout == layout) and all(
                not self.opened[what] or self.agreed[what] == choice for what, choice in module.agreements
            ):
                found.append(column)
        return found

    def _swap(self, number: int, slow: int) -> bool:
        """Lets a table of one piece change places with one of another rank, if that makes both ranks faster."""
        if self._layout(number).scope is not Scope.RANK or len(self.places[number]) != 1:
            return False
        ranks, local, mine = self.ranks, self.topology.local_ranks, self._shard(number)
        others = [n for n in range(len(self.rows)) if self._layout(n).scope is Scope.RANK and len(self.places[n]) == 1]
        others = [n for n in others if int(self.places[n][0]) != slow]
        if not others:
            return False
        where = np.array([int(self.places[n][0]) for n in others])
        more = mine - np.stack([self._shard(n) for n in others])
        peak = ranks.seconds[slow]
        after = np.maximum(peak - more[:, 0], ranks.seconds[where] + more[:, 0])
        fits = (ranks.hbm[where] + more[:, 1] <= ranks.budget[0]) & (ranks.hbm[slow] - more[:, 1] <= ranks.budget[0])
        apart = where // local != slow // local
        fits &= ~apart | (ranks.host[where // local] + more[:, 2] <= ranks.budget[1])
        fits &= ~apart | (ranks.host[slow // local] - more[:, 2] <= ranks.budget[1])
        after = np.where(fits, after, np.inf)
        best = int(after.argmin())
        if not after[best] < peak * _FASTER:
            return False
        other, there = others[best], self.places[others[best]]
        for table in (number, other):
            self._take(table)
        self._give(number, there)
        self._give(other, np.array([slow]))
        return True
