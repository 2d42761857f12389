"""From choices for the average rank to a placement: shards that are not on all ranks are put on some.

The average rank bounds every placement from below. Shards go to ranks table by table, longest first, each onto the
least loaded ranks with room. Then some tables of the slowest rank and of others are taken off, and each is put back
with the option and places that make the slowest rank fastest, again and again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from evenkeel.placement.layouts import Scope
from evenkeel.placement.limits import Watch
from evenkeel.placement.model import Topology
from evenkeel.placement.problem import SLACK, Choice, Group, Problem
from evenkeel.placement.search import Solution, solve

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_SHARE = 0.3
"""Of the time that is left, for a search that others follow."""
_TIGHTER = (0.97, 0.9, 0.8)
"""Parts of the budgets for the average rank where its choice fits on no ranks."""
_HALVINGS, _CLOSE = 5, 0.003
"""Times that the largest shard is limited, between the bound and what is known, and what these searches prove."""
_KICKS, _KICKS_A_TABLE, _KICKED = 3_000, 100, 6
"""Times that tables are taken off, at most and for each table, and how many of them at once."""
_WORSE = 0.01
"""Relative time by which the next placement may be slower at first; less and less of it later."""
_WEIGHTS = (0.1, 0.5, 1.0, 10.0)
"""Of what an option costs all ranks, beside what it makes of the slowest one: one of them for each table."""
_TRIED, _MOST_OPTIONS = 40, 2_000
"""Options of a table that are tried where it is put back, and where it fits nowhere."""
_SWAPPED = 32
"""Longest pieces of the slowest rank that are tried on other ranks."""
_FASTER = 1 - 1e-9
_SCOPES = list(Scope)
_EVERYWHERE, _RANK, _HOST = map(_SCOPES.index, (Scope.EVERYWHERE, Scope.RANK, Scope.HOST))
_NOWHERE = np.zeros(0, dtype=np.int64)


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
    places: dict[int, tuple[int, ...]]
    seconds: float
    use: FloatArray


def solve_and_place(
    problem: Problem, topology: Topology, watch: Watch, *, gap: float = 0.0, starts: Iterable[Placed] = ()
) -> tuple[Placed | None, Solution]:
    """The best placement found, `starts` among its candidates, and the solution, whose bound no placement is below.

    First the average rank is solved for, then ranks are found for shards that are not on all of them.
    """
    best = min(starts, key=lambda placed: placed.seconds, default=None)
    if not problem.has_shards:
        solution = solve(problem, watch, gap=gap, start=None if best is None else best.choice)
        return None if solution.choice is None else place(problem, topology, solution.choice), solution
    solution = solve(problem, watch.part(_SHARE), gap=gap)
    if solution.choice is None and solution.proved:
        return None, solution
    bound = max(solution.bound, problem.limited().least_shard(0))

    def offer(found: Solution) -> None:
        nonlocal best
        placed = None if found.choice is None else place(problem, topology, found.choice, solution.prices)
        if placed is not None and (best is None or placed.seconds < best.seconds):
            best = placed

    offer(solution)
    for part in _TIGHTER:
        if best is None and not watch.is_over():
            offer(solve(problem.with_budget(*(part * problem.budget)), watch.part(_SHARE), gap=_CLOSE))
    if best is None:
        return None, replace(solution, proved=False)
    low, high = bound, best.seconds
    for _ in range(_HALVINGS):
        if watch.is_over() or best.seconds <= bound * (1 + gap) or high <= low * (1 + _CLOSE):
            break
        most = math.sqrt(low * high)
        found = solve(problem.limited(most), watch.part(_SHARE), gap=_CLOSE)
        offer(found)
        if found.bound > most:  # of plans whose shards all take at most that none is as fast, and no other one either
            low = bound = most
        else:
            high = most
    best = _improved(problem, topology, best, solution.prices, watch, bound * (1 + gap))
    return best, replace(solution, bound=min(bound, best.seconds))


def _improved(
    problem: Problem, topology: Topology, start: Placed, prices: FloatArray, watch: Watch, enough: float
) -> Placed:
    """The best of placements in which some tables are taken off and put back, again and again."""
    board, draw = _Board(problem, topology, start.choice, prices), np.random.default_rng(0)
    board.put_all(start.places)
    best = here = board.saved()
    seconds = now = start.seconds
    kicks = min(_KICKS, _KICKS_A_TABLE * problem.num_tables)
    for number in range(kicks):
        if watch.is_over() or seconds <= enough:
            break
        board.kick(draw)
        while board.swap():
            pass
        then = float(board.seconds.max())
        if then <= now * (1 + _WORSE * (1 - number / kicks) * draw.random()) and board.fits():
            here, now = board.saved(), then
            if now < seconds:
                best, seconds = here, now
        else:
            board.restore(here)
    board.restore(best)
    return board.placed()


def place(problem: Problem, topology: Topology, choice: Choice, prices: FloatArray | None = None) -> Placed | None:
    """Ranks for the shards of a choice; `None` where they do not fit.

    With prices of the budgets, tables that fit nowhere take other options, by these.
    """
    if not problem.is_agreed(choice):
        return None
    found = []
    for measure in (0, 1) if problem.has_shards else (0,):
        board = _Board(problem, topology, choice, prices)
        if board.fill(measure):
            found.append(board.placed())
    return min(found, key=lambda placed: placed.seconds, default=None)


class _Kinds:
    """What the modules of a group are, as arrays."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.scope = np.array([_SCOPES.index(module.layout.scope) for module in group.modules])
        self.pieces = np.array([module.layout.pieces for module in group.modules])


class _Options:
    """What a table may choose from, cheapest first, as arrays."""

    def __init__(self, kinds: _Kinds, row: int, prices: FloatArray) -> None:
        group = kinds.group
        price = group.seconds[row] + prices[0] * group.hbm[row] + prices[1] * group.host[row]
        self.columns = np.argsort(price, kind="stable")[: np.isfinite(price).sum()]
        self.price = price[self.columns]
        means = np.stack([group.seconds[row], group.hbm[row], group.host[row]])
        self.shards = (means[:, self.columns] * group.scale[:, self.columns]).T
        self.scope, self.pieces = kinds.scope[self.columns], kinds.pieces[self.columns]


class _Board:
    """Options and places of all tables, and what ranks and hosts have of them."""

    def __init__(self, problem: Problem, topology: Topology, choice: Choice, prices: FloatArray | None) -> None:
        """Nothing is on a rank yet."""
        self.problem, self.topology, self.budget = problem, topology, problem.budget + SLACK
        self.rows = [(kinds, row) for kinds in map(_Kinds, problem.groups) for row in range(len(kinds.group.tables))]
        self.prices = prices
        self.options: dict[int, _Options] = {}
        self.module = np.concatenate(choice) if choice else _NOWHERE
        self.shards, self.scope = np.zeros((len(self.rows), 3)), np.zeros(len(self.rows), dtype=np.int64)
        self.places: list[IntArray] = [_NOWHERE] * len(self.rows)
        self.seconds, self.hbm = np.zeros((2, topology.ranks))
        self.host = np.zeros(topology.ranks // topology.local_ranks)
        self.holders: Counter[Hashable] = Counter()
        self.agreed: dict[Hashable, Hashable] = {}
        for number, module in enumerate(self.module.tolist()):
            self._hold(number, module)

    def saved(self) -> tuple[Any, ...]:
        """The state as it is, for `restore`."""
        return (*(mine.copy() for mine in self._arrays()), self.places.copy(), self.holders.copy(), self.agreed.copy())

    def restore(self, state: tuple[Any, ...]) -> None:
        """Takes a state that was saved."""
        *arrays, places, holders, agreed = state
        for mine, kept in zip(self._arrays(), arrays, strict=True):
            mine[:] = kept
        self.places, self.holders, self.agreed = places.copy(), holders.copy(), agreed.copy()

    def _arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return self.module, self.shards, self.scope, self.seconds, self.hbm, self.host

    def placed(self) -> Placed:
        """What it comes to."""
        ends = np.cumsum([len(group.tables) for group in self.problem.groups])[:-1]
        places = {
            kinds.group.tables[row]: tuple(sorted(self.places[number].tolist()))
            for number, (kinds, row) in enumerate(self.rows)
            if len(self.places[number])
        }
        use = np.array([self.hbm.max(initial=0.0), self.host.max(initial=0.0)])
        choice = tuple(np.split(self.module.copy(), ends)) if self.problem.groups else ()
        return Placed(choice, places, float(self.seconds.max(initial=0.0)), use)

    def fits(self) -> bool:
        """Whether all budgets are kept."""
        return bool((self.hbm <= self.budget[0]).all() and (self.host <= self.budget[1]).all())

    def put_all(self, places: dict[int, tuple[int, ...]]) -> None:
        """Puts every table where it is said to be."""
        for number, (kinds, row) in enumerate(self.rows):
            self._put(number, np.array(places.get(kinds.group.tables[row], ()), dtype=np.int64))

    def fill(self, measure: int) -> bool:
        """Puts all shards on ranks, those that are largest by time (0) or HBM (1) first; whether all fit.

        With prices, a table that fits nowhere takes the cheapest option that does.
        """
        for number in np.flatnonzero(self.scope == _EVERYWHERE).tolist():
            self._put(number, _NOWHERE)
        if not self.fits():
            return False
        apart: list[int] = np.flatnonzero(self.scope != _EVERYWHERE).tolist()
        apart.sort(key=lambda n: (self.scope[n] != _HOST, -self.shards[n, measure]))
        return all(self._put_somewhere(number) for number in apart)

    def _put_somewhere(self, number: int) -> bool:
        """With its own option, or with prices the cheapest other one that fits."""
        kinds, row = self.rows[number]
        others = () if self.prices is None else self._options(number).columns[:_MOST_OPTIONS].tolist()
        for module in (int(self.module[number]), *others):
            if self._is_open(number, module):
                shard = kinds.group.shard(row, module)
                spots = self._spots(int(kinds.scope[module]), int(kinds.pieces[module]), shard)
                if spots is not None:
                    self._choose(number, module)
                    self._put(number, spots)
                    return True
        return False

    def kick(self, draw: np.random.Generator) -> None:
        """Takes some tables off, one of the slowest rank among them, and puts each back where that is fastest."""
        slow = int(self.seconds.argmax())
        every = draw.permutation(len(self.rows)).tolist()
        near = next(number for number in every if self._is_on(number, slow))
        taken = list(dict.fromkeys([near, *every[:_KICKED]]))[: int(draw.integers(2, _KICKED + 1))]
        for number in taken:
            self._add(number, -1.0)
        for number in draw.permutation(taken).tolist():
            self._insert(number, float(draw.choice(_WEIGHTS)))

    def _insert(self, number: int, weight: float) -> None:
        """Puts a table back where it costs the slowest rank least, and all ranks by its price.

        Options are tried in the order of what they would come to on the least loaded ranks, full or not.
        """
        options, slowest = self._options(number), float(self.seconds.max())
        hosts = self.seconds.reshape(-1, self.topology.local_ranks).max(axis=1)
        value = np.full(len(options.price), slowest)
        for scope, loads in ((_RANK, self.seconds), (_HOST, hosts)):
            mine = options.scope == scope
            if mine.any():
                value[mine] = np.sort(loads)[np.minimum(options.pieces[mine], len(loads)) - 1]
        price = weight * options.price
        value = np.maximum(value + options.shards[:, 0], slowest) + price
        best: tuple[float, int, IntArray] = (math.inf, int(self.module[number]), self.places[number])
        tried = 0
        for index in np.argsort(value, kind="stable").tolist():
            if value[index] >= best[0] or tried > _TRIED:
                break
            if not self._is_open(number, int(options.columns[index])):
                continue
            tried += 1
            scope, shard = int(options.scope[index]), options.shards[index]
            spots = self._spots(scope, int(options.pieces[index]), shard)
            if spots is not None:
                peak = max(slowest, float(self._loads(scope, spots).max() + shard[0])) + float(price[index])
                best = min(best, (peak, int(options.columns[index]), spots), key=lambda each: each[0])
        self._choose(number, best[1])
        self._put(number, best[2])

    def swap(self) -> bool:
        """Lets a piece of the slowest rank change places with one of another rank, if that makes both faster."""
        slow, local = int(self.seconds.argmax()), self.topology.local_ranks
        whole = np.flatnonzero(self.scope == _RANK)
        numbers = np.repeat(whole, [len(self.places[number]) for number in whole.tolist()])
        where = np.concatenate([_NOWHERE, *(self.places[number] for number in whole.tolist())])
        mine = np.unique(numbers[where == slow])
        is_mine = np.zeros(len(self.rows), dtype=bool)
        is_mine[mine] = True
        numbers, where = numbers[~is_mine[numbers]], where[~is_mine[numbers]]
        if not len(mine) or not len(numbers):
            return False
        mine = mine[np.argsort(-self.shards[mine, 0], kind="stable")[:_SWAPPED]]
        held = np.zeros((len(mine), self.topology.ranks), dtype=bool)
        for index, number in enumerate(mine.tolist()):
            held[index, self.places[number]] = True
        more, hbm, host = np.moveaxis(self.shards[mine, None] - self.shards[None, numbers], 2, 0)
        after = np.maximum(self.seconds[slow] - more, self.seconds[where] + more)
        fits = (self.hbm[where] + hbm <= self.budget[0]) & (self.hbm[slow] - hbm <= self.budget[0]) & ~held[:, where]
        there, here = where // local, slow // local
        moved = (self.host[there] + host <= self.budget[1]) & (self.host[here] - host <= self.budget[1])
        fits &= moved | (there == here)
        after = np.where(fits, after, np.inf)
        best = int(after.argmin())
        if after.flat[best] >= self.seconds[slow] * _FASTER:
            return False
        index, other = divmod(best, len(numbers))
        rank = int(where[other])
        for table, old, new in ((int(mine[index]), slow, rank), (int(numbers[other]), rank, slow)):
            self._add(table, -1.0)
            self._put(table, np.where(self.places[table] == old, new, self.places[table]))
        return True

    def _is_on(self, number: int, rank: int) -> bool:
        scope = int(self.scope[number])
        spot = rank // self.topology.local_ranks if scope == _HOST else rank
        return scope == _EVERYWHERE or spot in self.places[number]

    def _put(self, number: int, places: IntArray) -> None:
        self.places[number] = places
        self._add(number)

    def _add(self, number: int, sign: float = 1.0) -> None:
        """Adds time, HBM and memory of a table at its places, or with -1 takes them away."""
        scope, places, local = int(self.scope[number]), self.places[number], self.topology.local_ranks
        seconds, hbm, host = sign * self.shards[number]
        if scope == _EVERYWHERE:
            self.seconds += seconds
            self.hbm += hbm
            self.host += host
            return
        ranks, hosts = places, places // local
        if scope == _HOST:
            ranks, hosts = (places[:, None] * local + np.arange(local)).ravel(), places
        np.add.at(self.seconds, ranks, seconds)
        np.add.at(self.hbm, ranks, hbm)
        np.add.at(self.host, hosts, host)

    def _loads(self, scope: int, places: IntArray) -> FloatArray:
        if scope == _HOST:
            return self.seconds.reshape(-1, self.topology.local_ranks)[places].ravel()
        return self.seconds if scope == _EVERYWHERE else self.seconds[places]

    def _spots(self, scope: int, pieces: int, shard: FloatArray) -> IntArray | None:
        """The least loaded places with room for the pieces of a table, apart from each other while there are enough."""
        if scope == _EVERYWHERE:
            room = (self.hbm.max() + shard[1] <= self.budget[0]) and (self.host.max() + shard[2] <= self.budget[1])
            return _NOWHERE if room else None
        local = self.topology.local_ranks
        shape = (-1, local) if scope == _HOST else (-1, 1)
        seconds, hbm = self.seconds.reshape(shape).max(axis=1), self.hbm.reshape(shape).max(axis=1)
        rounds = -(-pieces // len(seconds))
        each = np.minimum(np.floor((self.budget[0] - hbm) / max(shard[1], 1e-12)), rounds)
        order = np.lexsort((hbm, seconds))
        found = np.concatenate([order[each[order] > number] for number in range(rounds)])
        if np.isfinite(self.budget[1]) and shard[2] > 0:
            most = np.floor((self.budget[1] - self.host) / shard[2])
            hosts = found if scope == _HOST else found // local
            by_host = np.argsort(hosts, kind="stable")
            first = np.searchsorted(hosts[by_host], hosts[by_host])
            number_on_host = np.empty(len(found), dtype=np.int64)
            number_on_host[by_host] = np.arange(len(found)) - first
            found = found[number_on_host < most[hosts]]
        return found[:pieces] if len(found) >= pieces else None

    def _hold(self, number: int, module: int) -> None:
        kinds, row = self.rows[number]
        self.module[number], self.scope[number] = module, kinds.scope[module]
        self.shards[number] = kinds.group.shard(row, module)
        for what, choice in kinds.group.modules[module].agreements:
            self.holders[what] += 1
            self.agreed[what] = choice

    def _choose(self, number: int, module: int) -> None:
        """Gives a table that is not on ranks another module."""
        if module != self.module[number]:
            kinds, _ = self.rows[number]
            for what, _ in kinds.group.modules[int(self.module[number])].agreements:
                self.holders[what] -= 1
            self._hold(number, module)

    def _is_open(self, number: int, module: int) -> bool:
        """Whether a module fits what other tables agree on."""
        modules = self.rows[number][0].group.modules
        mine = {what for what, _ in modules[int(self.module[number])].agreements}
        return all(
            self.holders[what] == (what in mine) or self.agreed[what] == choice
            for what, choice in modules[module].agreements
        )

    def _options(self, number: int) -> _Options:
        if number not in self.options:
            self.options[number] = _Options(*self.rows[number], np.zeros(2) if self.prices is None else self.prices)
        return self.options[number]
