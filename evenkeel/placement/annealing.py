"""Local search over options and places together, for problems that are too large for one program.

One table after the other takes the option, and the places for its pieces, that suit best what all others have. What is
compared is a soft maximum of the ranks' times and a price on every byte over a budget. The maximum gets sharper and the
price higher from sweep to sweep: at first tables go where there is time, then those that can do so at least cost give
way where memory is short.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evenkeel.placement.assigning import Places
from evenkeel.placement.incumbent import Incumbent, Modules
from evenkeel.placement.layouts import Scope
from evenkeel.placement.limits import Watch

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_SWEEPS, _FEWEST, _CHOICES = 24, 8, 12_000
"""Sweeps over all tables: at most, at least, and how many choices of a table in all between these."""
_RUNS = (3, 16)
_SHARPNESS = (12.0, 400.0)
_PRICES = (0.3, 100.0)
"""Time that a budget exceeded costs, in parts of the slowest rank's: at first, and at the end."""
_STEEPEST = 60.0
_SCOPES = (Scope.EVERYWHERE, Scope.RANK, Scope.HOST)


@dataclass(frozen=True, slots=True)
class _Options:
    """The options of one table.

    Attributes:
        group: Its group.
        row: Its row there.
        module: (options,) module of each.
        figures: (3, options) time, HBM and host memory of one shard.
        scope: (options,) index into `_SCOPES`.
        pieces: (options,) pieces.
        opening: (options,) number of the opening of each, over all groups.
        side: (options,) number of the side that excludes other openings, over all groups; -1 where none does.
        kind: (options,) number of the kind of module of each, over all groups.
    """

    group: int
    row: int
    module: IntArray
    figures: FloatArray
    scope: IntArray
    pieces: IntArray
    opening: IntArray
    side: IntArray
    kind: IntArray


class Annealing:
    """All tables' options, and what ranks and hosts hold at the moment."""

    def __init__(self, search: Incumbent) -> None:
        self.search, self.machines = search, search.machines
        self.tables: list[_Options] = []
        self.kinds: dict[tuple[object, ...], int] = {}
        fixed: list[float] = []
        for number, (group, whole) in enumerate(zip(search.problem.groups, search.whole, strict=True)):
            opening_of, cost = group.openings()
            scope = np.array([_SCOPES.index(module.layout.scope) for module in group.modules])
            pieces = np.array([module.layout.pieces for module in group.modules])
            side = np.array([2 * number + m.side if m.side >= 0 and group.bound else -1 for m in group.modules])
            names = [(number, m.layout.scope, m.mode) for m in group.modules]
            kind = np.array([self.kinds.setdefault(name, len(self.kinds)) for name in names])
            limit = np.array([1, self.machines.ranks, self.machines.hosts])[scope]
            for row in range(len(group.tables)):
                own = np.flatnonzero(np.isfinite(group.time[row]) & (pieces <= limit))
                # Where a group is not bound, each table pays for its module itself: a group is then one table.
                table = _Options(
                    number,
                    row,
                    own,
                    whole[:, row, own],
                    scope[own],
                    pieces[own],
                    len(fixed) + opening_of[own],
                    side[own],
                    kind[own],
                )
                self.tables.append(table)
            fixed += cost.tolist()
        self.fixed = np.array(fixed)
        openings: dict[int, set[int]] = {}
        for table in self.tables:
            for number in np.unique(table.side[table.side >= 0]).tolist():
                openings.setdefault(number, set()).update(table.opening[table.side == number].tolist())
        self.sides = {number: np.array(sorted(found)) for number, found in openings.items()}

    @property
    def sweeps(self) -> int:
        """Sweeps of a run."""
        return min(_SWEEPS, max(_FEWEST, _CHOICES // max(1, len(self.tables))))

    @property
    def runs(self) -> int:
        """Runs that are worth their time."""
        return min(_RUNS[1], max(_RUNS[0], _CHOICES // max(1, len(self.tables) * self.sweeps)))

    def kinds_in(self, modules: Modules) -> list[int]:
        """Kinds of modules that a choice has, those of the largest fixed time first."""
        found: dict[int, float] = {}
        for number, (group, mine) in enumerate(zip(self.search.problem.groups, modules, strict=True)):
            for module in {int(module) for module in mine}:
                info = group.modules[module]
                found[self.kinds[number, info.layout.scope, info.mode]] = info.fixed
        return sorted(found, key=lambda kind: (-found[kind], kind))

    def run(
        self, modules: Modules, places: Places, scale: float, seed: int, barred: frozenset[int], watch: Watch
    ) -> tuple[Modules, Places] | None:
        """Modules and places after some sweeps from a start; `None` where a table has no option, or time is up.

        Args:
            modules: Module of each table.
            places: Of each table that is not everywhere, the rank or host of each piece. Tables that it lacks are not
                placed at first.
            scale: About the time of the slowest rank.
            seed: Of the order in which tables choose.
            barred: Kinds of modules that no table may choose. No table alone can close what others are in.
            watch: Once its time is up, nothing is returned.
        """
        draw, sweeps = np.random.default_rng(seed), self.sweeps
        closed = [np.isin(table.kind, list(barred)) for table in self.tables]
        if any(mask.all() for mask in closed):
            return None
        state = _State(self, modules, places)
        if not state.complete:
            return None
        sharp = np.geomspace(*_SHARPNESS, sweeps)
        price = np.geomspace(*_PRICES, sweeps)
        for sweep in range(sweeps):
            for table in draw.permutation(len(self.tables)).tolist():
                if watch.is_over():
                    return None
                state.choose(table, closed[table], float(sharp[sweep]) / scale, float(sharp[sweep] * price[sweep]))
            if not state.over():
                scale = min(scale, float(state.load[0].max(initial=0.0)) + state.common)
        return state.read(modules)


class _State:
    """What each table has, and what that makes of ranks and hosts."""

    def __init__(self, options: Annealing, modules: Modules, places: Places) -> None:
        self.options, self.machines = options, options.machines
        ranks, hosts = self.machines.ranks, self.machines.hosts
        self.load = np.zeros((2, ranks))
        self.memory = np.zeros(hosts)
        self.counts = np.zeros(len(options.fixed), dtype=np.int64)
        self.chosen = np.zeros(len(options.tables), dtype=np.int64)
        self.where: list[IntArray] = []
        self.complete = True
        budget = options.search.problem.budget
        self.rooms = np.array([max(1e-9, float(value)) if np.isfinite(value) else np.inf for value in budget])
        for number, table in enumerate(options.tables):
            found = np.flatnonzero(table.module == modules[table.group][table.row])
            if not len(found):
                self.complete = False
                return
            index = options.search.problem.groups[table.group].tables[table.row]
            self.chosen[number] = found[0]
            self.where.append(np.array(places.get(index, ()), dtype=np.int64))
            self.counts[table.opening[found[0]]] += 1
            self._add(number, 1.0)

    @property
    def common(self) -> float:
        """Fixed time of all openings that are in use."""
        return float(self.options.fixed[self.counts > 0].sum())

    def over(self) -> bool:
        """Whether a budget is exceeded."""
        return bool((self.load[1] > self.rooms[0] + 1e-6).any() or (self.memory > self.rooms[1] + 1e-6).any())

    def _add(self, number: int, sign: float) -> None:
        table, option, where = self.options.tables[number], self.chosen[number], self.where[number]
        seconds, hbm, host = table.figures[:, option] * sign
        scope, local = int(table.scope[option]), self.machines.local_ranks
        if scope == 0:
            self.load += np.array([[seconds], [hbm]])
            self.memory += host
        elif scope == 1:
            np.add.at(self.load[0], where, seconds)
            np.add.at(self.load[1], where, hbm)
            np.add.at(self.memory, where // local, host)
        else:
            for place in where:
                self.load[:, place * local : (place + 1) * local] += np.array([[seconds], [hbm]])
            np.add.at(self.memory, where, host)

    def choose(self, number: int, closed: BoolArray, sharpness: float, price: float) -> None:
        """Gives a table its best option that is not closed, and places."""
        table, was = self.options.tables[number], int(self.chosen[number])
        self._add(number, -1.0)
        self.counts[table.opening[was]] -= 1
        (seconds, hbm, host), machines = table.figures, self.machines
        new = self.counts[table.opening] == 0
        extra = np.where(new, self.options.fixed[table.opening], 0.0)
        # Times are compared with those that the slowest rank would have anyway.
        start = np.exp(sharpness * (self.load[0] - self.load[0].max(initial=0.0)))
        steep = np.exp(np.minimum(_STEEPEST, sharpness * extra))
        rise = np.expm1(np.minimum(_STEEPEST, sharpness * seconds)) * steep
        by_rank = rise[:, None] * start[None, :]
        by_rank += self._price(hbm, self.load[1], float(self.rooms[0]), price)
        by_host = self._price(host, self.memory, float(self.rooms[1]), price)
        cost = steep * float(start.sum())
        narrow, wide, spread = table.scope == 1, table.scope == 2, table.scope == 0
        cost[spread] += by_rank[spread].sum(axis=1) + by_host[spread].sum(axis=1)
        if narrow.any():
            by_rank[narrow] += np.repeat(by_host[narrow], machines.local_ranks, axis=1)
            cost[narrow] += _least(by_rank[narrow], table.pieces[narrow])
        if wide.any():
            on_host = by_rank[wide].reshape(int(wide.sum()), machines.hosts, machines.local_ranks).sum(axis=2)
            by_host[wide] += on_host
            cost[wide] += _least(by_host[wide], table.pieces[wide])
        cost[self._excluded(table) | closed] = np.inf
        best = int(cost.argmin())
        where = self.where[number]
        pieces = int(table.pieces[best])
        if table.scope[best] == 0:
            where = where[:0]
        else:
            place = (by_rank if table.scope[best] == 1 else by_host)[best]
            where = np.sort(np.argsort(place, kind="stable")[:pieces])
        self.chosen[number], self.where[number] = best, where
        self.counts[table.opening[best]] += 1
        self._add(number, 1.0)

    @staticmethod
    def _price(size: FloatArray, held: FloatArray, room: float, price: float) -> FloatArray:
        """(options, places) what more bytes over a budget cost."""
        if not np.isfinite(room):
            return np.zeros((len(size), len(held)))
        before = np.maximum(0.0, held - room)
        after = np.maximum(0.0, held[None, :] + size[:, None] - room)
        priced: FloatArray = (after - before[None, :]) * (price / room)
        return priced

    def _excluded(self, table: _Options) -> BoolArray:
        """(options,) whether an opening of another table stands against each."""
        if not (table.side >= 0).any():
            return np.zeros(len(table.side), dtype=bool)
        excluded = np.zeros(len(table.side), dtype=bool)
        for side in set(table.side[table.side >= 0].tolist()):
            of_side = self.options.sides[side]
            taken = of_side[self.counts[of_side] > 0]
            if len(taken):
                excluded |= (table.side == side) & ~np.isin(table.opening, taken)
        return excluded

    def read(self, modules: Modules) -> tuple[Modules, Places]:
        """Modules and places."""
        chosen = tuple(mine.copy() for mine in modules)
        places: dict[int, tuple[int, ...]] = {}
        for table, option, where in zip(self.options.tables, self.chosen.tolist(), self.where, strict=True):
            chosen[table.group][table.row] = table.module[option]
            if table.scope[option]:
                index = self.options.search.problem.groups[table.group].tables[table.row]
                places[index] = tuple(where.tolist())
        return chosen, places


def _least(cost: FloatArray, pieces: IntArray) -> FloatArray:
    """(options,) sum of the least of (options, places) costs, as many as there are pieces."""
    summed = np.cumsum(np.sort(cost, axis=1), axis=1)
    found: FloatArray = summed[np.arange(len(cost)), pieces - 1]
    return found
