"""A bound from what a rank can hold at once, which is above that of the average rank where shards are large.

A pattern is what one rank may hold in less than some time, within its HBM: shards, whole tables, and its share of
tables that are everywhere. Ranks are alike, so a plan is one pattern for each rank, which together hold all of every
table. How many patterns that takes at least, in parts of patterns too, is a linear program whose columns are made as
they are needed: the pattern that is worth most, at what the program pays for each table, is a knapsack. Where that is
worth less than an even share of all tables, no plan is as fast. Every rank takes the fixed time of all openings, so all
of this is asked for each set of openings that could be part of a faster plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np
import numpy.typing as npt

from evenkeel.placement.highs import Highs
from evenkeel.placement.knapsack import Knapsack, solve_knapsack
from evenkeel.placement.layouts import Scope
from evenkeel.placement.limits import Watch
from evenkeel.placement.placement_problem import PlacementProblem
from evenkeel.placement.ranks import Machines

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_MOST_TABLES = 80
"""Above, shards are small beside a rank, and the bound of the average rank is near."""
_MOST_KINDS, _MOST_SETS, _MOST_VALUES = 10, 40, 3_000_000
_MOST_COLUMNS = 2_000
_UNITS = 1e5
"""Time is counted in parts of the time that is asked about, for the knapsack's sense of what is nothing."""
_SMOOTH = 0.6
"""Of the prices so far, in those that the next pattern is sought at: fewer patterns are needed so."""
_DEAR = 100.0
"""Patterns that all of a host's memory is worth at most."""
_FOREVER, _LITTLE = 1e9, 1e-7
_HALVINGS = 7
_NEAR = 0.002


@dataclass(frozen=True, slots=True)
class _Items:
    """What a rank may hold of each table; option 0 is nothing.

    Attributes:
        part: (tables, options) part of the table.
        seconds: (tables, options) time; infinite where there is no such option.
        hbm: (tables, options) HBM.
        host: (tables, options) the rank's share in the memory that its host needs for it.
        kind: (tables, options) number of the opening, those of a group that only differ in their ratio being one; -1
            where the fixed time is in `seconds`.
        fixed: (kinds,) fixed time.
        module: (tables, options) module of each option.
        kind_of_module: For each group, (modules,) kind of each module.
    """

    part: FloatArray
    seconds: FloatArray
    hbm: FloatArray
    host: FloatArray
    kind: IntArray
    fixed: FloatArray
    module: IntArray
    kind_of_module: list[IntArray]


def _items(problem: PlacementProblem, whole: Sequence[FloatArray], machines: Machines) -> _Items | None:
    """`None` where a rank would have to hold several shards of a table, or openings are too many."""
    kinds: dict[tuple[object, ...], int] = {}
    fixed: list[float] = []
    rows: list[FloatArray] = []
    kind_of_module: list[IntArray] = []
    places = {Scope.EVERYWHERE: 1, Scope.RANK: machines.ranks, Scope.HOST: machines.hosts}
    spread = {Scope.EVERYWHERE: machines.ranks, Scope.RANK: 1, Scope.HOST: machines.local_ranks}
    for number, (group, figures) in enumerate(zip(problem.groups, whole, strict=True)):
        meaning = np.zeros((4, len(group.modules)))
        for index, module in enumerate(group.modules):
            layout, scope = module.layout, module.layout.scope
            if layout.pieces > places[scope]:
                return None
            kind = -1
            if group.bound:
                name = (number, layout if scope is Scope.EVERYWHERE else scope, module.mode)
                kind = kinds.setdefault(name, len(kinds))
                if kind == len(fixed):
                    fixed.append(module.fixed)
            share = 1.0 if scope is Scope.RANK else 1 / machines.local_ranks
            alone = 0.0 if group.bound else module.fixed
            meaning[:, index] = (1 / (layout.pieces * spread[scope]), kind, share, alone)
        kind_of_module.append(meaning[1].astype(np.int64))
        for row in range(len(group.tables)):
            there = np.flatnonzero(np.isfinite(figures[0, row]))
            seconds, hbm, host = figures[:, row, there]
            part, kind_of, share_of, alone_of = meaning[:, there]
            rows.append(np.stack([part, seconds + alone_of, hbm, host * share_of, kind_of, there]))
    if len(fixed) > _MOST_KINDS or problem.num_tables << len(fixed) > _MOST_VALUES:
        return None
    width = 1 + max(own.shape[1] for own in rows)
    padded = np.zeros((6, len(rows), width))
    padded[1, :, 1:], padded[4] = np.inf, -1
    for number, own in enumerate(rows):
        padded[:, number, 1 : 1 + own.shape[1]] = own
    part, seconds, hbm, host, *numbers = padded
    kind_of, module = (values.astype(np.int64) for values in numbers)
    return _Items(part, seconds, hbm, host, kind_of, np.array(fixed), module, kind_of_module)


@dataclass(frozen=True, slots=True)
class _Pattern:
    """What a rank holds.

    Attributes:
        option: (tables,) option of each table.
        part: (tables,) part of each table.
        seconds: Its time, without that of openings.
        host: Its share in the memory of its host.
        openings: The kinds that it has, as bits.
    """

    option: IntArray
    part: FloatArray
    seconds: float
    host: float
    openings: int


class Patterns:
    """Sets of openings, numbered by their bits, with a bound for each; and the patterns that were found so far.

    Attributes:
        least: (sets,) no plan with just these openings is faster; infinite where they cannot hold all tables.
        fixed: (sets,) their fixed time.
    """

    def __init__(self, items: _Items, machines: Machines, problem: PlacementProblem) -> None:
        self.items, self.machines, self.problem = items, machines, problem
        self.room, memory = float(problem.budget[0]), float(problem.budget[1]) * machines.hosts
        self.fits = (items.hbm <= self.room + 1e-6) & (items.host <= memory + 1e-6)
        # Where there is none, only what takes none fits, and no price is asked for it.
        self.memory = memory if 0 < memory < np.inf else None
        self.found: list[_Pattern] = []
        self.useful = np.zeros(items.part.shape, dtype=bool)
        kinds = len(items.fixed)
        bits = (np.arange(1 << kinds)[:, None] >> np.arange(kinds)[None, :]) & 1
        self.fixed: FloatArray = bits @ items.fixed
        self.least: FloatArray = self._by_set(np.where(self.fits, items.seconds, np.inf)).max(axis=1) + self.fixed
        # Without an opening that costs nothing there are only fewer options.
        self.least[(bits[:, items.fixed == 0] == 0).any(axis=1)] = np.inf

    @staticmethod
    def of(problem: PlacementProblem, whole: Sequence[FloatArray], machines: Machines) -> Patterns | None:
        """Those of a problem; `None` where openings are too many, or a rank has to hold several shards of a table.

        Args:
            problem: Groups and budgets.
            whole: For each group, (3, tables, modules) time, HBM and memory of one shard, or of a table that is
                everywhere.
            machines: Ranks and hosts.
        """
        items = _items(problem, whole, machines)
        return None if items is None else Patterns(items, machines, problem)

    @property
    def bound(self) -> float:
        """No plan is faster."""
        return float(self.least.min())

    def faster(self, seconds: float) -> list[int]:
        """Sets of openings that a plan may have which takes less than that, the most promising first."""
        left = np.flatnonzero(self.least < seconds)
        found: list[int] = left[np.argsort(self.least[left], kind="stable")].tolist()
        return found

    def closed(self, number: int) -> list[BoolArray]:
        """For each group, (tables, modules) which options are not in a set of openings."""
        return [
            ~self._opened(number, kind)[None, :].repeat(len(group.tables), axis=0)
            for group, kind in zip(self.problem.groups, self.items.kind_of_module, strict=True)
        ]

    def hopeful(self) -> list[BoolArray]:
        """For each group, (tables, modules) the options in programs that could not be proved to be impossible."""
        found, first = [], 0
        for group in self.problem.groups:
            mask = np.zeros(group.time.shape, dtype=bool)
            for row in range(len(group.tables)):
                options = np.flatnonzero(self.useful[first + row, 1:]) + 1
                mask[row, self.items.module[first + row, options]] = True
            found.append(mask)
            first += len(group.tables)
        return found

    @staticmethod
    def _opened(number: int, kind: IntArray) -> BoolArray:
        opened: BoolArray = (kind < 0) | (((number >> np.maximum(kind, 0)) & 1) > 0)
        return opened

    def raise_at(self, prices: FloatArray) -> None:
        """Raises the bounds to those of the average rank at (2,) prices: the cost of all tables less what memory is."""
        items, finite = self.items, np.isfinite(self.problem.budget)
        prices = np.where(finite, prices, 0.0)
        taken = items.seconds + prices[0] * items.hbm + prices[1] * items.host * self.machines.local_ranks
        taken[:, 1:] /= np.maximum(items.part[:, 1:] * self.machines.ranks, 1e-300)
        taken[:, 0] = np.inf
        paid = float(prices[finite] @ self.problem.budget[finite])
        np.maximum(self.least, self._by_set(taken).sum(axis=1) + self.fixed - paid, out=self.least)

    def raise_to(self, number: int, seconds: float) -> None:
        """Raises the bound of one set."""
        self.least[number] = max(self.least[number], seconds)

    def cannot_fit(self, watch: Watch) -> bool:
        """Whether it is proved that ranks cannot hold all tables, however long they take."""
        if len(self.items.part) > _MOST_TABLES:
            return False
        return self._too_fast_with(len(self.fixed) - 1, _FOREVER, watch)

    def prove(self, high: float, watch: Watch) -> None:
        """Raises the bounds by what single ranks can hold, towards the time of a plan."""
        low = self.bound
        if len(self.items.part) > _MOST_TABLES or not np.isfinite(high):
            return
        over, ask = high, high * (1 - _NEAR)
        for _ in range(_HALVINGS):
            if ask <= low * (1 + _NEAR / 2) or watch.is_over():
                break
            if self._too_fast(ask, watch):
                low = ask
            else:
                over = ask
            ask = (low + over) / 2

    def _by_set(self, value: FloatArray) -> FloatArray:
        """(sets, tables) least of (tables, options) `value` over the options of each set of openings."""
        kinds = len(self.items.fixed)
        found = np.full((1 << kinds, len(value)), np.inf)
        found[0] = np.where(self.items.kind < 0, value, np.inf)[:, 1:].min(axis=1)
        for kind in range(kinds):
            first = 1 << kind
            own = np.where(self.items.kind == kind, value, np.inf).min(axis=1)
            found[first : 2 * first] = np.minimum(found[:first], own)
        return found

    def _too_fast(self, seconds: float, watch: Watch) -> bool:
        """Whether it is proved that no plan takes less than that."""
        left = self.faster(seconds)
        if len(left) > _MOST_SETS:
            return False
        for number in left:
            if not self._too_fast_with(number, seconds, watch):
                return False
            self.raise_to(number, seconds)
        return True

    def _too_fast_with(self, number: int, seconds: float, watch: Watch) -> bool:
        """The same of plans with one set of openings."""
        items, room = self.items, seconds - float(self.fixed[number])
        fits = self._opened(number, items.kind) & (items.seconds <= room) & self.fits
        most = np.where(fits, items.part, 0.0).max(axis=1)
        if (most == 0).any():
            return True
        master = _Master(len(most), self.memory)
        alone = [int(np.flatnonzero(fits[row] & (items.part[row] == part))[0]) for row, part in enumerate(most)]
        for row, option in enumerate(alone):
            master.add(most[row] * np.eye(len(most))[row], float(items.host[row, option]))
        added = [p for p in self.found if p.seconds <= room and p.openings | number == number]
        for pattern in added:
            master.add(pattern.part, pattern.host)
        usual: tuple[FloatArray, float] | None = None
        for _ in range(_MOST_COLUMNS):
            if watch.is_over():
                return False
            count, worth, price = master.solve()
            if count <= self.machines.ranks * (1 + 1e-7):
                taken = master.taken()
                for row in np.flatnonzero(taken[: len(alone)]).tolist():
                    self.useful[row, alone[row]] = True
                for index in np.flatnonzero(taken[len(alone) :]).tolist():
                    self.useful[np.arange(len(alone)), added[index].option] = True
                return False
            ways = [(worth, price)]
            if usual is not None:
                ways.insert(0, (_SMOOTH * usual[0] + (1 - _SMOOTH) * worth, _SMOOTH * usual[1] + (1 - _SMOOTH) * price))
            for usual in ways:
                even = (float(usual[0].sum()) - usual[1] * (self.memory or 0.0)) / self.machines.ranks
                worthiest, proved = self._best(*usual, room, even * (1 - 1e-6), fits, watch)
                if worthiest is None:
                    return proved
                self.found.append(worthiest)
                added.append(worthiest)
                master.add(worthiest.part, worthiest.host)
                if float(worth @ worthiest.part) - price * worthiest.host > 1 + 1e-9:
                    break
        return False

    def _best(
        self, worth: FloatArray, price: float, room: float, above: float, fits: BoolArray, watch: Watch
    ) -> tuple[_Pattern | None, bool]:
        """A pattern that is worth more than that, and whether it is proved that there is none."""
        items, scale = self.items, _UNITS / room
        value = np.where(fits, worth[:, None] * items.part - price * items.host, -np.inf)
        value[:, 0] = 0.0
        best = value.max(axis=1, keepdims=True)
        kept = np.flatnonzero((value >= 0).any(axis=0))
        use = np.stack([np.where(fits, items.seconds, 0.0) * scale, items.hbm])[:, :, kept]
        use[:, :, 0] = 0.0
        asked = Knapsack(np.where(value >= 0, best - value, np.inf)[:, kept], use, np.array([_UNITS, self.room]))
        found = solve_knapsack(asked, cutoff=float(best.sum()) - above, watch=watch)
        if found.choice is None:
            return None, found.proved
        rows, columns = np.arange(len(value)), kept[found.choice]
        held = columns > 0
        taken = float(items.seconds[rows[held], columns[held]].sum())
        openings = 0
        for kind in np.unique(items.kind[rows[held], columns[held]]).tolist():
            openings |= 1 << kind if kind >= 0 else 0
        return _Pattern(
            columns, items.part[rows, columns], taken, float(items.host[rows, columns].sum()), openings
        ), False


class _Master:
    """The program: patterns, in parts, that hold all of every table, as few as can be."""

    def __init__(self, tables: int, memory: float | None) -> None:
        self.tables, self.memory = tables, memory
        self.model = Highs()
        nothing = (0, np.array([], dtype=np.int32), np.array([], dtype=np.float64))
        for _ in range(tables):
            self.model.addRow(1.0, highspy.kHighsInf, *nothing)
        if memory is not None:
            self.model.addRow(-highspy.kHighsInf, 1.0, *nothing)
            self.model.addCol(_DEAR, 0.0, highspy.kHighsInf, 1, np.array([tables], dtype=np.int32), np.array([-1.0]))

    def add(self, part: FloatArray, host: float) -> None:
        """One more column: a pattern with (tables,) parts of tables, and memory of its host."""
        rows = np.flatnonzero(part)
        values = part[rows]
        if self.memory is not None and host:
            rows, values = np.append(rows, self.tables), np.append(values, host / self.memory)
        self.model.addCol(1.0, 0.0, highspy.kHighsInf, len(rows), rows.astype(np.int32), values)

    def taken(self) -> FloatArray:
        """(patterns,) how much of each is in the solution."""
        values: FloatArray = np.array(self.model.getSolution().col_value)[0 if self.memory is None else 1 :]
        return np.where(values > _LITTLE, values, 0.0)

    def solve(self) -> tuple[float, FloatArray, float]:
        """Number of patterns, what each table is worth, and the price of memory of hosts."""
        self.model.run()
        dual = np.array(self.model.getSolution().row_dual)
        worth = np.maximum(0.0, dual[: self.tables])
        price = 0.0 if self.memory is None else max(0.0, -float(dual[self.tables])) / self.memory
        return float(self.model.getInfo().objective_function_value), worth, price
