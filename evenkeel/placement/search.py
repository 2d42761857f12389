"""The search: Lagrangian prices on both budgets give a bound and a start, HiGHS finishes the core.

Under prices on HBM and host memory tables are independent but for what they agree on, which is gone through choice by
choice; no plan is faster than the priced optimum less the price of the budgets (weak duality, for any prices). The same
figures say of every option how fast a plan with it could be at most: options that are slower than a known plan are in
no better one, and the others are the core, a mixed-integer program.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from evenkeel.placement.dual import DualPoint, maximise_dual
from evenkeel.placement.limits import Watch
from evenkeel.placement.milp import MOST_COLUMNS, solve_milp
from evenkeel.placement.problem import SLACK, Group, Problem

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Choice = tuple[IntArray, ...]
"""For each group, the module of each of its tables."""

_MOST_PAIRS = 1 << 16
_BLOCK = 1 << 20
_ITERATIONS = 40
_BISECTIONS = 8
_STEEP = 1e4
"""Prices at which hardly anything but memory counts."""
_FIRST_CORE = 1_500
_SHARE = 0.4
"""Of the time that is left, for a core that a larger one follows."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice of a module for each table.

    Attributes:
        choice: The modules; `None` where no choice was found.
        cost: Seconds a step, or units of a budget; infinite without a choice.
        bound: No choice costs less; infinite where there is none.
        proved: Whether the search ended by itself, not by its time limit.
        prices: (2,) cost that one more unit of each budget saves, at the optimum of the dual.
    """

    choice: Choice | None
    cost: float
    bound: float
    proved: bool
    prices: FloatArray


def cost_of(problem: Problem, choice: Choice) -> float:
    """The cost of a choice on the average rank."""
    return float(
        sum(g.seconds[np.arange(len(mine)), mine].sum() for g, mine in zip(problem.groups, choice, strict=True))
    )


def usage(problem: Problem, choice: Choice) -> FloatArray:
    """(2,) HBM and host memory of a choice on the average rank and host, in units."""
    use = np.zeros(2)
    for group, mine in zip(problem.groups, choice, strict=True):
        rows = np.arange(len(mine))
        use += [group.hbm[rows, mine].sum(), group.host[rows, mine].sum()]
    return use


def is_agreed(problem: Problem, choice: Choice) -> bool:
    """Whether tables agree on what they must agree on."""
    agreed: dict[Hashable, Hashable] = {}
    for group, mine in zip(problem.groups, choice, strict=True):
        for module in np.unique(mine).tolist():
            for what, chosen in group.modules[module].agreements:
                if agreed.setdefault(what, chosen) != chosen:
                    return False
    return True


def solve(problem: Problem, watch: Watch, *, gap: float = 0.0, start: Choice | None = None) -> Solution:
    """The cheapest choice within both budgets on the average rank.

    Args:
        problem: What to choose from.
        watch: Once its time is up, the best found is returned with its bound.
        gap: Relative gap to prove.
        start: A choice to start from.

    Raises:
        SolveCancelledError: If the caller wants the search to stop.
    """
    return _Search(problem.limited(), watch, gap).run(start)


class _PricedGroup:
    """A group under prices. Of what its tables agree on, at most two things are gone through; others are relaxed."""

    def __init__(self, group: Group) -> None:
        self.group = group
        axes: dict[Hashable, dict[Hashable, list[int]]] = {}
        usable = np.isfinite(group.seconds).any(axis=0)
        for column in np.flatnonzero(usable).tolist():
            for what, choice in group.modules[column].agreements:
                axes.setdefault(what, {}).setdefault(choice, []).append(column)
        self.sides: list[IntArray] = []
        taken: set[int] = set()
        pairs = 1
        for choices in sorted(axes.values(), key=len, reverse=True):
            columns = {column for members in choices.values() for column in members}
            size = len(choices) + 1
            if len(choices) > 1 and len(self.sides) < 2 and not columns & taken and pairs * size <= _MOST_PAIRS:
                pairs *= size
                taken |= columns
                most = max(map(len, choices.values()))
                side = np.full((size, most), len(group.modules), dtype=np.int64)
                for number, members in enumerate(choices.values()):
                    side[number, : len(members)] = members
                self.sides.append(side)
        self.free = np.array([m for m in range(len(group.modules)) if m not in taken], dtype=np.int64)

    def price(self, prices: FloatArray) -> tuple[float, IntArray, FloatArray]:
        """Least priced cost, the modules that have it, and (tables, modules) the least with each of them chosen."""
        group = self.group
        priced = group.seconds + prices[0] * group.hbm + prices[1] * group.host
        padded = np.concatenate([priced, np.full((len(priced), 1), np.inf)], axis=1)
        rows = np.arange(len(priced))
        if not self.sides:
            chosen = priced.argmin(axis=1)
            least = priced[rows, chosen]
            value = float(least.sum())
            return value, chosen, value + (priced - least[:, None] if np.isfinite(value) else priced)
        free = padded[:, self.free].min(axis=1) if len(self.free) else np.full(len(priced), np.inf)
        by = [padded[:, side].min(axis=2) for side in self.sides]
        floors = np.full(priced.shape, np.inf)
        if len(by) == 1:
            low = np.minimum(free[:, None], by[0])
            totals = low.sum(axis=0)
            best = (int(totals.argmin()),)
            value = float(totals[best])
            rest = np.where(np.isfinite(totals), totals - np.where(np.isfinite(low), low, 0.0), np.inf)
            floors[:, self.free] = priced[:, self.free] + rest.min(axis=1)[:, None]
            for number, members in enumerate(self.sides[0][:-1]):
                own = members[members < len(group.modules)]
                floors[:, own] = priced[:, own] + rest[:, number : number + 1]
        else:
            pairs = self._pairs(free, *by)
            best = np.unravel_index(int(pairs.argmin()), pairs.shape)  # type: ignore[assignment]
            value = float(pairs[best])
            floors[:, self.free] = value
            for side, lows in zip(self.sides, (pairs.min(axis=1), pairs.min(axis=0)), strict=True):
                for number, members in enumerate(side[:-1]):
                    floors[:, members[members < len(group.modules)]] = lows[number]
            floors[~np.isfinite(priced)] = np.inf
        opened = np.concatenate([self.free, *(side[number] for side, number in zip(self.sides, best, strict=True))])
        chosen = opened[padded[:, opened].argmin(axis=1)]
        return value, np.minimum(chosen, len(group.modules) - 1), floors

    def _pairs(self, free: FloatArray, first: FloatArray, second: FloatArray) -> FloatArray:
        """(first, second) sums over tables of the least of what is open."""
        total = np.zeros((first.shape[1], second.shape[1]))
        first = np.minimum(first, free[:, None])
        step = max(1, _BLOCK // total.size)
        for row in range(0, len(free), step):
            part = slice(row, row + step)
            total += np.minimum(first[part, :, None], second[part, None, :]).sum(axis=0)
        return total


class _Search:
    """State of one search."""

    def __init__(self, problem: Problem, watch: Watch, gap: float) -> None:
        self.problem, self.watch = problem, watch
        self.gap = gap
        self.priced = [_PricedGroup(group) for group in problem.groups]
        self.floors = [np.full(group.seconds.shape, -np.inf) for group in problem.groups]
        self.limited = np.isfinite(problem.budget)
        finite = [np.where(np.isfinite(group.seconds), group.seconds, 0.0) for group in problem.groups]
        self.dearest = float(sum(seconds.max(axis=1).sum() for seconds in finite)) * (1 + 1e-9) + 1e-12
        self.best: Choice | None = None
        self.cost = np.inf

    def run(self, start: Choice | None) -> Solution:
        """Prices, then cores."""
        if any(not np.isfinite(group.seconds).any(axis=1).all() for group in self.problem.groups):
            return Solution(None, np.inf, np.inf, True, np.zeros(2))
        if start is not None:
            self._offer(start)
        scale = np.where(self.limited, self.dearest / np.maximum(self.problem.budget, 1.0), 0.0)
        steep = _STEEP * scale
        self.watch.check()
        frugal = self._evaluate(np.zeros(2))
        if self.best is None and np.any(frugal.excess > 0):
            frugal = self._evaluate(steep)
        dual = maximise_dual(
            self._evaluate, scale, iterations=_ITERATIONS, cutoff=self.dearest, is_over=self.watch.is_over
        )
        prices, bound = dual.best.prices, dual.best.value
        if max(bound, frugal.value) > self.dearest:
            return Solution(None, np.inf, np.inf, True, prices)
        if self.cost > bound * (1 + self.gap):
            self._towards(prices, steep)
        bound, proved = self._cores(bound)
        if self.best is None:
            return Solution(None, np.inf, np.inf if proved else bound, proved, prices)
        return Solution(self.best, self.cost, min(bound, self.cost), proved, prices)

    def _evaluate(self, prices: FloatArray) -> DualPoint:
        """The dual at some prices; floors and the best choice follow."""
        found = [group.price(prices) for group in self.priced]
        values = np.array([value for value, _, _ in found])
        limited = self.limited
        value = float(values.sum()) - float(prices[limited] @ (self.problem.budget[limited] + SLACK))
        if not np.isfinite(value):
            return DualPoint(prices, np.inf, np.zeros(2))
        for floor, own, (_, _, mine) in zip(self.floors, values, found, strict=True):
            np.maximum(floor, mine + (value - own), out=floor)
        choice = tuple(chosen for _, chosen, _ in found)
        excess = np.where(limited, usage(self.problem, choice) - self.problem.budget - SLACK, -1.0)
        if np.all(excess <= 0):
            self._offer(choice)
        return DualPoint(prices, value, excess)

    def _offer(self, choice: Choice) -> bool:
        """Takes a choice that keeps the budgets and is agreed on, if it is the best so far; whether it is allowed."""
        cost = cost_of(self.problem, choice)
        fits = np.all(usage(self.problem, choice) <= self.problem.budget + SLACK)
        if not fits or not np.isfinite(cost) or not is_agreed(self.problem, choice):
            return False
        if cost < self.cost:
            self.best, self.cost = choice, cost
        return True

    def _towards(self, prices: FloatArray, steep: FloatArray) -> None:
        """Looks for a choice that fits at prices a little above those of the optimum."""
        low, high = 0.0, 1.0
        for _ in range(_BISECTIONS):
            if self.watch.is_over():
                return
            middle = 1e-6 if low == 0 and high == 1 else float(np.sqrt(max(low, 1e-9) * high))
            point = self._evaluate(prices + middle * (steep - prices))
            low, high = (low, middle) if np.all(point.excess <= 0) else (middle, high)

    def _cores(self, bound: float) -> tuple[float, bool]:
        """Programs over more and more options; the bound that they prove, and whether that settles the search."""
        finite = np.sort(np.concatenate([floor[np.isfinite(floor)] for floor in self.floors] or [np.zeros(1)]))
        size = _FIRST_CORE + 3 * self.problem.num_tables
        while True:
            cutoff = self.dearest * (1 + 1e-6) if self.best is None else self.cost * (1 - self.gap)
            if bound >= cutoff:
                return bound, True
            if self.watch.is_over():
                return bound, False
            reach = min(cutoff, float(finite[min(size, len(finite) - 1)]) if size < len(finite) else np.inf)
            kept = [floor < reach for floor in self.floors]
            is_all = reach >= cutoff
            if sum(int(mask.sum()) for mask in kept) > MOST_COLUMNS:
                return bound, False
            watch = self.watch.part(1.0 if is_all else _SHARE)
            core = solve_core(self.problem, kept, gap=self.gap / 2, start=self.best, watch=watch)
            allowed = core.choice is None or self._offer(core.choice)
            if allowed:
                # What is outside of the core costs at least `reach`.
                bound = max(bound, min(core.bound, reach))
            if is_all:
                if core.choice is None and self.best is None and core.proved:
                    return np.inf, True
                return min(bound, self.cost), core.proved and allowed
            size *= 4


@dataclass(frozen=True, slots=True)
class Core:
    """Outcome of a program over some options.

    Attributes:
        choice: The modules; `None` where none was found.
        bound: No choice among the options costs less; infinite where there is none.
        proved: Whether the program was solved to its gap, or proved to have no solution.
    """

    choice: Choice | None
    bound: float
    proved: bool


def solve_core(problem: Problem, kept: list[BoolArray], *, gap: float, start: Choice | None, watch: Watch) -> Core:
    """The cheapest choice among (tables, modules) kept options of each group, in HiGHS."""
    if not all(mask.any(axis=1).all() for mask in kept):
        return Core(None, np.inf, True)
    program = _Program(problem, kept)
    scale = 1.0 / max(float(np.abs(program.costs).max(initial=0.0)), 1e-300)
    matrix, low, high = program.constraints()
    columns = len(program.costs)
    result = solve_milp(
        program.costs * scale,
        matrix,
        low,
        high,
        np.ones(columns, dtype=bool),
        np.ones(columns),
        gap=gap,
        start=None if start is None else program.values(start),
        watch=watch,
    )
    bound = result.bound / scale if np.isfinite(result.bound) else result.bound
    return Core(None if result.values is None else program.choice(result.values), bound, result.proved)


class _Program:
    """Columns say which option a table takes, and which of its choices each agreement is; the budgets come last."""

    def __init__(self, problem: Problem, kept: list[BoolArray]) -> None:
        self.problem = problem
        self.cells = [np.nonzero(mask) for mask in kept]
        self.firsts = np.cumsum([0, *(len(rows) for rows, _ in self.cells)]).tolist()
        choices: dict[Hashable, dict[Hashable, int]] = {}
        for group, (_, modules) in zip(problem.groups, self.cells, strict=True):
            for module in np.unique(modules).tolist():
                for what, choice in group.modules[module].agreements:
                    choices.setdefault(what, {}).setdefault(choice, 0)
        self.agreed: dict[tuple[Hashable, Hashable], int] = {}
        self._rows = 0
        self._entries: list[tuple[IntArray, IntArray, FloatArray]] = []
        self._sides: list[tuple[FloatArray, FloatArray]] = []
        costs = [g.seconds[cells] for g, cells in zip(problem.groups, self.cells, strict=True)]
        for what, names in choices.items():
            if len(names) > 1:
                first = self.firsts[-1] + len(self.agreed)
                self.agreed |= {(what, choice): first + number for number, choice in enumerate(names)}
                self._add(np.zeros(len(names), dtype=np.int64), first + np.arange(len(names)), 1.0, -np.inf, 1.0)
        self.costs = np.concatenate([*costs, np.zeros(len(self.agreed))])
        for number, group in enumerate(problem.groups):
            self._add_group(number, group)

    def _add_group(self, number: int, group: Group) -> None:
        rows, modules = self.cells[number]
        columns = self.firsts[number] + np.arange(len(rows))
        self._add(rows, columns, 1.0, 1.0, 1.0)
        for slot in range(max((len(module.agreements) for module in group.modules), default=0)):
            slots = [m.agreements[slot] if slot < len(m.agreements) else None for m in group.modules]
            column_of = np.array([-1 if a is None else self.agreed.get(a, -1) for a in slots], dtype=np.int64)[modules]
            linked = np.flatnonzero(column_of >= 0)
            if not len(linked):
                continue
            pairs, link = np.unique(np.stack([rows[linked], column_of[linked]]), axis=1, return_inverse=True)
            link = link.ravel()
            where = np.concatenate([link, np.arange(pairs.shape[1])])
            values = np.concatenate([np.ones(len(link)), -np.ones(pairs.shape[1])])
            self._add(where, np.concatenate([columns[linked], pairs[1]]), values, -np.inf, 0.0)

    def _add(self, row: IntArray, column: IntArray, value: FloatArray | float, low: float, high: float) -> None:
        number = int(row.max()) + 1
        self._entries.append((row + self._rows, column, np.broadcast_to(np.asarray(value, dtype=float), row.shape)))
        self._sides.append((np.full(number, low), np.full(number, high)))
        self._rows += number

    def constraints(self) -> tuple[sp.csr_matrix, FloatArray, FloatArray]:
        """The matrix, and the lower and upper side of each of its rows."""
        row, column, value = (np.concatenate(part) for part in zip(*self._entries, strict=True))
        low, high = (np.concatenate(part) for part in zip(*self._sides, strict=True))
        matrix = sp.csr_matrix((value, (row, column)), shape=(self._rows, len(self.costs)))
        pairs = list(zip(self.problem.groups, self.cells, strict=True))
        none = np.zeros(len(self.agreed))
        uses = [
            np.concatenate([*(g.hbm[c] for g, c in pairs), none]),
            np.concatenate([*(g.host[c] for g, c in pairs), none]),
        ]
        limited = [b for b in range(2) if np.isfinite(self.problem.budget[b])]
        stacked = sp.vstack([matrix, *(sp.csr_matrix(uses[b][None, :]) for b in limited)]).tocsr()
        budget = self.problem.budget[limited] + SLACK / 2
        return stacked, np.concatenate([low, np.full(len(limited), -np.inf)]), np.concatenate([high, budget])

    def values(self, choice: Choice) -> FloatArray | None:
        """(columns,) the values that stand for a choice; `None` where a column for it is missing."""
        values = np.zeros(len(self.costs))
        for number, (group, (rows, modules), mine) in enumerate(
            zip(self.problem.groups, self.cells, choice, strict=True)
        ):
            taken = mine[rows] == modules
            if taken.sum() < len(group.tables):
                return None
            values[self.firsts[number] : self.firsts[number + 1]] = taken
            for module in np.unique(mine).tolist():
                for agreement in group.modules[module].agreements:
                    if agreement in self.agreed:
                        values[self.agreed[agreement]] = 1.0
        return values

    def choice(self, values: FloatArray) -> Choice:
        """For each group, the module of each of its tables."""
        found = []
        for number, (group, (rows, modules)) in enumerate(zip(self.problem.groups, self.cells, strict=True)):
            taken = values[self.firsts[number] : self.firsts[number + 1]] > 0.5
            mine = np.zeros(len(group.tables), dtype=np.int64)
            mine[rows[taken]] = modules[taken]
            found.append(mine)
        return tuple(found)
