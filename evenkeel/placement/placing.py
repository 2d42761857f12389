"""From choices for the average rank to a placement: shards that are not on all ranks are put on some.

The average rank bounds every placement from below. Shards go to ranks table by table, longest first, each onto the
least loaded ranks with room. Then some tables of the slowest rank and of others are taken off, and each is put back
with the option and places that make the slowest rank fastest, again and again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from evenkeel.placement.access import FloatArray, IntArray
from evenkeel.placement.layouts import Scope
from evenkeel.placement.problem import SLACK, Choice, Problem
from evenkeel.placement.request import Topology, Watch
from evenkeel.placement.search import Solution, solve

_SHARE = 0.3
"""Of the time that is left, for a search that others follow."""
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
_NOWHERE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Placed:
    """A choice with ranks for the shards that are not on all of them.

    Attributes:
        choice: The option of each table.
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

    With shards, where one group costs more mixed, its tables in any mode, all in caches, and none are faster to search
    than at once.
    """
    starts, dear = _able(problem, starts), np.flatnonzero(problem.mixing)
    if len(dear) != 1 or not problem.has_shards:
        return _at_once(problem, topology, watch, gap, starts)
    alike = replace(problem, mixing=0 * problem.mixing)
    unmixed = [replace(start, seconds=start.seconds - problem.mixed(start.choice)) for start in starts]
    found, solution = _at_once(alike, topology, watch.part(0.5), gap, unmixed)
    if found is None:
        return None, solution
    best = replace(found, seconds=found.seconds + problem.mixed(found.choice))
    best = min([best, *starts], key=lambda placed: placed.seconds)
    floors = [solution.bound + float(problem.mixing[dear[0]])]
    mine = problem.group[problem.table] == dear[0]
    for cached in (True, False):
        floor = solution.bound
        if floor < best.seconds * (1 - gap) and not watch.is_over():
            alone = alike.without(mine & (problem.cached != cached))
            found, proved = _at_once(alone, topology, watch.part(0.5), gap, unmixed)
            floor = max(floor, proved.bound)
            best = best if found is None else min(best, found, key=lambda placed: placed.seconds)
        floors.append(floor)
    return best, replace(solution, bound=min([best.seconds, *floors]))


def _able(problem: Problem, starts: Iterable[Placed]) -> list[Placed]:
    """Those whose options the problem has."""
    return [start for start in starts if np.isfinite(problem.seconds[start.choice]).all()]


def _at_once(
    problem: Problem, topology: Topology, watch: Watch, gap: float, starts: Iterable[Placed]
) -> tuple[Placed | None, Solution]:
    """The same of all groups together: first the average rank is solved for, then ranks are found for shards."""
    best = min(_able(problem, starts), key=lambda placed: placed.seconds, default=None)
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
    # Table by table no group changes to mixed and back: those that are not stay so.
    group, cached = problem.group[problem.table], problem.cached
    held = np.zeros((len(problem.mixing), 2), dtype=bool)
    held[problem.group, cached[best.choice].astype(int)] = True
    apart = problem.without((problem.mixing[group] > 0) & ~held[group, cached.astype(int)])
    best = _improved(apart, topology, best, solution.prices, watch, bound * (1 + gap))
    return best, replace(solution, bound=min(bound, best.seconds))


def _improved(
    problem: Problem, topology: Topology, start: Placed, prices: FloatArray, watch: Watch, enough: float
) -> Placed:
    """The best of placements in which some tables are taken off and put back, again and again."""
    best, draw = _Board(problem, topology, start.choice, prices), np.random.default_rng(0)
    best.put_all(start.places)
    here, fastest, now = best, start.seconds, start.seconds
    kicks = min(_KICKS, _KICKS_A_TABLE * problem.num_tables)
    for number in range(kicks):
        if watch.is_over() or fastest <= enough:
            break
        board = here.copy()
        board.kick(draw)
        while board.swap():
            pass
        then = board.slowest()
        if then <= now * (1 + _WORSE * (1 - number / kicks) * draw.random()) and board.fits():
            here, now = board, then
            if now < fastest:
                best, fastest = here, now
    return best.placed()


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


class _Board:
    """Options and places of all tables, and what ranks and hosts have of them."""

    def __init__(self, problem: Problem, topology: Topology, choice: Choice, prices: FloatArray | None) -> None:
        """Nothing is on a rank yet."""
        self.problem, self.topology, self.budget = problem, topology, problem.budget + SLACK
        self.by_price = prices is not None
        self.price = problem.priced(np.zeros(2) if prices is None else prices)
        self.cheapest: dict[int, IntArray] = {}
        self.choice, self.shards, self.scope = choice.copy(), problem.shards[choice], problem.scope[choice]
        self.places: list[IntArray] = [_NOWHERE] * len(choice)
        self.seconds, self.hbm = np.zeros((2, topology.ranks))
        self.host = np.zeros(topology.ranks // topology.local_ranks)
        self.holders: Counter[int] = Counter()
        self.agreed: dict[int, int] = {}
        for option in choice.tolist():
            self._agree(option, 1)

    def copy(self) -> _Board:
        """Another one, to change."""
        other = copy(self)
        for name in ("choice", "shards", "scope", "places", "seconds", "hbm", "host", "holders", "agreed"):
            setattr(other, name, getattr(self, name).copy())
        return other

    def placed(self) -> Placed:
        """What it comes to."""
        places = {table: tuple(sorted(own.tolist())) for table, own in enumerate(self.places) if len(own)}
        use = np.array([self.hbm.max(initial=0.0), self.host.max(initial=0.0)])
        return Placed(self.choice.copy(), places, self.slowest(), use)

    def slowest(self) -> float:
        """Kernel time of the slowest rank."""
        return float(self.seconds.max(initial=0.0)) + self.problem.mixed(self.choice)

    def fits(self) -> bool:
        """Whether all budgets are kept."""
        return bool((self.hbm <= self.budget[0]).all() and (self.host <= self.budget[1]).all())

    def put_all(self, places: dict[int, tuple[int, ...]]) -> None:
        """Puts every table where it is said to be."""
        for table in range(len(self.choice)):
            self._put(table, np.array(places.get(table, ()), dtype=np.int64))

    def fill(self, measure: int) -> bool:
        """Puts all shards on ranks, those that are largest by time (0) or HBM (1) first; whether all fit.

        With prices, a table that fits nowhere takes the cheapest option that does.
        """
        for table in np.flatnonzero(self.scope == Scope.EVERYWHERE).tolist():
            self._put(table, _NOWHERE)
        if not self.fits():
            return False
        apart: list[int] = np.flatnonzero(self.scope != Scope.EVERYWHERE).tolist()
        apart.sort(key=lambda table: (self.scope[table] != Scope.HOST, -self.shards[table, measure]))
        return all(self._put_somewhere(table) for table in apart)

    def _put_somewhere(self, table: int) -> bool:
        """With its own option, or with prices the cheapest other one that fits."""
        others = self._cheapest(table)[:_MOST_OPTIONS].tolist() if self.by_price else ()
        for option in (int(self.choice[table]), *others):
            if self._is_open(table, option) and (spots := self._spots(option)) is not None:
                self._choose(table, option)
                self._put(table, spots)
                return True
        return False

    def kick(self, draw: np.random.Generator) -> None:
        """Takes some tables off, one of the slowest rank among them, and puts each back where that is fastest."""
        slow = int(self.seconds.argmax())
        every = draw.permutation(len(self.choice)).tolist()
        near = next(table for table in every if self._is_on(table, slow))
        taken = list(dict.fromkeys([near, *every[:_KICKED]]))[: int(draw.integers(2, _KICKED + 1))]
        for table in taken:
            self._add(table, -1.0)
        for table in draw.permutation(taken).tolist():
            self._insert(table, float(draw.choice(_WEIGHTS)))

    def _insert(self, table: int, weight: float) -> None:
        """Puts a table back where it costs the slowest rank least, and all ranks by its price.

        Options are tried in the order of what they would come to on the least loaded ranks, full or not.
        """
        options, slowest = self._cheapest(table), float(self.seconds.max())
        hosts = self.seconds.reshape(-1, self.topology.local_ranks).max(axis=1)
        value, scopes = np.full(len(options), slowest), self.problem.scope[options]
        for scope, loads in ((Scope.RANK, self.seconds), (Scope.HOST, hosts)):
            mine = scopes == scope
            if mine.any():
                value[mine] = np.sort(loads)[np.minimum(self.problem.pieces[options[mine]], len(loads)) - 1]
        price, seconds = weight * self.price[options], self.problem.shards[options, 0]
        value = np.maximum(value + seconds, slowest) + price
        best: tuple[float, int, IntArray] = (math.inf, int(self.choice[table]), self.places[table])
        tried = 0
        for index in np.argsort(value, kind="stable").tolist():
            if value[index] >= best[0] or tried > _TRIED:
                break
            option = int(options[index])
            if not self._is_open(table, option):
                continue
            tried += 1
            spots = self._spots(option)
            if spots is not None:
                there = self.seconds[self._ranks_and_hosts(int(scopes[index]), spots)[0]].max()
                peak = max(slowest, float(there + seconds[index])) + float(price[index])
                best = min(best, (peak, option, spots), key=lambda each: each[0])
        self._choose(table, best[1])
        self._put(table, best[2])

    def swap(self) -> bool:
        """Lets a piece of the slowest rank change places with one of another rank, if that makes both faster."""
        slow, local = int(self.seconds.argmax()), self.topology.local_ranks
        whole = np.flatnonzero(self.scope == Scope.RANK)
        numbers = np.repeat(whole, [len(self.places[number]) for number in whole.tolist()])
        where = np.concatenate([_NOWHERE, *(self.places[number] for number in whole.tolist())])
        mine = np.unique(numbers[where == slow])
        is_mine = np.zeros(len(self.choice), dtype=bool)
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

    def _is_on(self, table: int, rank: int) -> bool:
        scope = int(self.scope[table])
        spot = rank // self.topology.local_ranks if scope == Scope.HOST else rank
        return scope == Scope.EVERYWHERE or spot in self.places[table]

    def _put(self, table: int, places: IntArray) -> None:
        self.places[table] = places
        self._add(table)

    def _add(self, table: int, sign: float = 1.0) -> None:
        """Adds time, HBM and memory of a table at its places, or with -1 takes them away."""
        ranks, hosts = self._ranks_and_hosts(int(self.scope[table]), self.places[table])
        seconds, hbm, host = sign * self.shards[table]
        if isinstance(ranks, slice):  # much quicker than below
            self.seconds += seconds
            self.hbm += hbm
            self.host += host
            return
        np.add.at(self.seconds, ranks, seconds)
        np.add.at(self.hbm, ranks, hbm)
        np.add.at(self.host, hosts, host)

    def _ranks_and_hosts(self, scope: int, places: IntArray) -> tuple[Any, Any]:
        """Those that shards at some places are on, as indices."""
        local = self.topology.local_ranks
        if scope == Scope.EVERYWHERE:
            return slice(None), slice(None)
        if scope == Scope.HOST:
            return (places[:, None] * local + np.arange(local)).ravel(), places
        return places, places // local

    def _spots(self, option: int) -> IntArray | None:
        """The least loaded places with room for the pieces of a table, apart from each other while there are enough."""
        scope, pieces, shard = (
            int(self.problem.scope[option]),
            int(self.problem.pieces[option]),
            self.problem.shards[option],
        )
        if scope == Scope.EVERYWHERE:
            room = (self.hbm.max() + shard[1] <= self.budget[0]) and (self.host.max() + shard[2] <= self.budget[1])
            return _NOWHERE if room else None
        local = self.topology.local_ranks
        shape = (-1, local) if scope == Scope.HOST else (-1, 1)
        seconds, hbm = self.seconds.reshape(shape).max(axis=1), self.hbm.reshape(shape).max(axis=1)
        rounds = -(-pieces // len(seconds))
        each = np.minimum(np.floor((self.budget[0] - hbm) / max(shard[1], 1e-12)), rounds)
        order = np.lexsort((hbm, seconds))
        found = np.concatenate([order[each[order] > number] for number in range(rounds)])
        if np.isfinite(self.budget[1]) and shard[2] > 0:
            most = np.floor((self.budget[1] - self.host) / shard[2])
            hosts = found if scope == Scope.HOST else found // local
            by_host = np.argsort(hosts, kind="stable")
            first = np.searchsorted(hosts[by_host], hosts[by_host])
            number_on_host = np.empty(len(found), dtype=np.int64)
            number_on_host[by_host] = np.arange(len(found)) - first
            found = found[number_on_host < most[hosts]]
        return found[:pieces] if len(found) >= pieces else None

    def _choose(self, table: int, option: int) -> None:
        """Gives a table that is not on ranks another option."""
        self._agree(int(self.choice[table]), -1)
        self._agree(option, 1)
        self.choice[table] = option
        self.shards[table], self.scope[table] = self.problem.shards[option], self.problem.scope[option]

    def _agree(self, option: int, sign: int) -> None:
        """Notes what a table that takes an option agrees on, or with -1 that it no longer does."""
        for what, term in self._terms(option):
            self.holders[what] += sign
            self.agreed[what] = term

    def _is_open(self, table: int, option: int) -> bool:
        """Whether an option of a table fits what other tables agree on."""
        own = {what for what, _ in self._terms(int(self.choice[table]))}
        return all(
            self.holders[what] == (what in own) or self.agreed[what] == term for what, term in self._terms(option)
        )

    def _terms(self, option: int) -> list[tuple[int, int]]:
        """What an option wants agreement on, and on what."""
        return [(int(self.problem.subject[term]), term) for term in self.problem.terms[option].tolist() if term >= 0]

    def _cheapest(self, table: int) -> IntArray:
        """The options of a table, cheapest first."""
        if table not in self.cheapest:
            first, price = self.problem.starts[table], self.price[slice(*self.problem.starts[table : table + 2])]
            self.cheapest[table] = first + np.argsort(price, kind="stable")[: np.isfinite(price).sum()]
        return self.cheapest[table]
