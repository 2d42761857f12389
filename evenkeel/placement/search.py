"""The search: Lagrangian prices on both budgets give a bound and a start, HiGHS finishes the core.

Under prices on HBM and host memory tables are independent but for what they agree on, which is gone through choice by
choice; no plan is faster than the priced optimum less the price of the budgets (weak duality, for any prices). The same
figures say of every option how fast a plan with it could be at most: options that are slower than a known plan are in
no better one, and the others are the core, a mixed-integer program.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import highspy
import numpy as np
import numpy.typing as npt

from evenkeel.placement.limits import Watch
from evenkeel.placement.problem import SLACK, Choice, Group, Problem
from evenkeel.placement.program import MOST_COLUMNS, Highs, solve_core

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_MOST_PAIRS = 1 << 16
_BLOCK = 1 << 20
_ITERATIONS = 40
_TOLERANCE = 1e-7
_MOST_PRICE = 1e5
"""In units of (all of the cost) per (all of a budget): far above any that an optimum needs."""
_STEEP = 1e4
"""Prices in the same units at which hardly anything but memory counts."""
_BISECTIONS = 8
_FIRST_CORE, _FIRST_GAP = 1_500, 1e-3
"""Options of the first core, and what it proves: it gives a choice by which the last one is small."""
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


def solve(problem: Problem, watch: Watch, *, gap: float = 0.0, start: Choice | None = None) -> Solution:
    """The cheapest choice within both budgets on the average rank, to a relative gap, or the best found in time."""
    return _Search(problem.limited(), watch, gap).run(start)


class PricedGroup:
    """A group under prices. Of what its tables agree on, at most two things are gone through; others are relaxed."""

    def __init__(self, group: Group) -> None:
        """Finds the two things with most choices that no module has both of."""
        self.group = group
        axes: dict[Hashable, dict[Hashable, list[int]]] = {}
        for column in np.flatnonzero(np.isfinite(group.seconds).any(axis=0)).tolist():
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
                side = np.full((size, max(map(len, choices.values()))), len(group.modules), dtype=np.int64)
                for number, members in enumerate(choices.values()):
                    side[number, : len(members)] = members
                self.sides.append(side)
        self.sides += [np.full((1, 1), len(group.modules), dtype=np.int64)] * (2 - len(self.sides))
        self.free = np.array([m for m in range(len(group.modules)) if m not in taken], dtype=np.int64)

    def price(self, prices: FloatArray, rows: slice = slice(None)) -> tuple[float, IntArray]:
        """Least priced cost of some of the tables, infinite where they cannot agree, and the modules that have it."""
        priced = self._priced(prices)[rows]
        first, second = self._sides_of(priced)
        totals = self._totals(first, second)
        best = np.unravel_index(int(totals.argmin()), totals.shape)
        opened = np.concatenate([self.free, *(side[number] for side, number in zip(self.sides, best, strict=True))])
        chosen = opened[priced[:, opened].argmin(axis=1)]
        return float(totals[best]), np.minimum(chosen, len(self.group.modules) - 1)

    def floors(self, prices: FloatArray) -> FloatArray:
        """(tables, modules) no choice of the group with that module for that table has a lower priced cost."""
        priced = self._priced(prices)
        first, second = self._sides_of(priced)
        totals = self._totals(first, second)
        floors = np.full(priced.shape, np.inf)
        for part in self._blocks(len(priced)):
            own = np.minimum(first[part, :, None], second[part, None, :])
            own[np.isinf(own)] = 0.0
            others = np.subtract(totals, own, out=own)  # least cost of all other tables
            leasts = others.min(axis=2), others.min(axis=1)
            floors[part, self.free] = leasts[1].min(axis=1)[:, None]
            for side, least in zip(self.sides, leasts, strict=True):
                for number, members in enumerate(side[:-1]):
                    floors[part, members] = least[:, number : number + 1]
        return (floors + priced)[:, :-1]

    def _priced(self, prices: FloatArray) -> FloatArray:
        """(tables, modules + 1) priced costs; the last is infinite, for what is not there."""
        priced = self.group.seconds + prices[0] * self.group.hbm + prices[1] * self.group.host
        return np.concatenate([priced, np.full((len(priced), 1), np.inf)], axis=1)

    def _sides_of(self, priced: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(tables, choices) least of each table by the choice of either side; in the first also of what is free."""
        free = priced[:, [*self.free, -1]].min(axis=1)
        first, second = (priced[:, side].min(axis=2) for side in self.sides)
        return np.minimum(first, free[:, None]), second

    def _totals(self, first: FloatArray, second: FloatArray) -> FloatArray:
        """(first, second) sums over tables for each pair of choices."""
        totals = np.zeros((first.shape[1], second.shape[1]))
        for part in self._blocks(len(first)):
            totals += np.minimum(first[part, :, None], second[part, None, :]).sum(axis=0)
        return totals

    def _blocks(self, rows: int) -> list[slice]:
        step = max(1, _BLOCK // (len(self.sides[0]) * len(self.sides[1])))
        return [slice(first, first + step) for first in range(0, rows, step)]


@dataclass(frozen=True, slots=True)
class _Point:
    """The dual at some prices: a bound on every cost that keeps the budgets, and use less budget, its supergradient."""

    prices: FloatArray
    value: float
    excess: FloatArray
    least: tuple[float, ...]
    """Priced cost of each group."""


class _Search:
    """State of one search."""

    def __init__(self, problem: Problem, watch: Watch, gap: float) -> None:
        self.problem, self.watch, self.gap = problem, watch, gap
        self.groups = [PricedGroup(group) for group in problem.groups]
        self.limited = np.isfinite(problem.budget)
        finite = [np.where(np.isfinite(group.seconds), group.seconds, 0.0) for group in problem.groups]
        self.dearest = float(sum(seconds.max(axis=1).sum() for seconds in finite)) * (1 + 1e-9) + 1e-12
        self.scale = np.where(self.limited, self.dearest / np.maximum(problem.budget, 1.0), 0.0)
        self.points: list[_Point] = []
        self.best: Choice | None = None
        self.cost = np.inf

    def run(self, start: Choice | None) -> Solution:
        """Prices, then cores."""
        none = Solution(None, np.inf, np.inf, True, np.zeros(2))
        if any(not np.isfinite(group.seconds).any(axis=1).all() for group in self.problem.groups):
            return none
        self.watch.is_over()
        if start is not None:
            self._offer(start)
        self._find_prices()
        best = max(self.points, key=lambda point: point.value)
        if best.value > self.dearest:
            return none
        if self.cost > best.value * (1 + self.gap):
            self._towards(best.prices)
        bound, proved = self._cores(best.value)
        if self.best is None:
            bound = np.inf if proved else bound
        return Solution(self.best, self.cost, min(bound, self.cost), proved, best.prices)

    def _evaluate(self, prices: FloatArray) -> _Point:
        """The dual at some prices."""
        found = [group.price(prices) for group in self.groups]
        least = tuple(own for own, _ in found)
        value = sum(least) - float(prices[self.limited] @ (self.problem.budget[self.limited] + SLACK))
        if not np.isfinite(value):
            self.points.append(_Point(prices, np.inf, np.zeros(2), least))
            return self.points[-1]
        choice = tuple(chosen for _, chosen in found)
        excess = np.where(self.limited, self.problem.usage(choice) - self.problem.budget - SLACK, -1.0)
        if np.all(excess <= 0):
            self._offer(choice)
        self.points.append(_Point(prices, value, excess, least))
        return self.points[-1]

    def _floors(self) -> list[FloatArray]:
        """(tables, modules) of each group: no choice with that module for that table costs less, by any prices."""
        floors = [np.full(group.seconds.shape, -np.inf) for group in self.problem.groups]
        for point in sorted(self.points, key=lambda point: -point.value):
            for floor, group, least in zip(floors, self.groups, point.least, strict=True):
                if self.watch.is_over():
                    return floors
                np.maximum(floor, group.floors(point.prices) + (point.value - least), out=floor)
        return floors

    def _find_prices(self) -> None:
        """The dual at more and more prices, by cutting planes: it is concave and piecewise linear in two prices."""
        if np.all(self._evaluate(np.zeros(2)).excess <= 0):
            return
        if self.best is None:
            self._evaluate(_STEEP * self.scale)
        model, infinity = Highs(output_flag=False), highspy.kHighsInf
        nothing = (0, np.zeros(0, dtype=np.int32), np.zeros(0))
        model.addCol(-1.0, -infinity, infinity, *nothing)
        for _ in range(2):
            model.addCol(0.0, 0.0, _MOST_PRICE, *nothing)
        added = 0
        while len(self.points) < _ITERATIONS and not self.watch.is_over():
            for point in self.points[added:]:  # the dual <= value + excess . (prices - here)
                row = np.array([1.0, *(-point.excess * self.scale)])
                side = point.value - float(point.excess @ point.prices)
                model.addRow(-infinity, side, 3, np.arange(3, dtype=np.int32), row)
            added = len(self.points)
            model.run()
            upper, *prices = model.getSolution().col_value
            best = max(point.value for point in self.points)
            if upper - best <= _TOLERANCE * max(abs(best), abs(upper), 1e-12) or best > self.dearest:
                break
            self._evaluate(np.maximum(0.0, np.array(prices)) * self.scale)

    def _offer(self, choice: Choice) -> bool:
        """Takes a choice that keeps the budgets and is agreed on, if it is the best so far; whether it is allowed."""
        cost = self.problem.cost(choice)
        fits = bool(np.all(self.problem.usage(choice) <= self.problem.budget + SLACK))
        if not fits or not np.isfinite(cost) or not self.problem.is_agreed(choice):
            return False
        if cost < self.cost:
            self.best, self.cost = choice, cost
        return True

    def _towards(self, prices: FloatArray) -> None:
        """Looks for a choice that fits at prices a little above those of the optimum."""
        low, high = 0.0, 1.0
        for _ in range(_BISECTIONS):
            if self.watch.is_over():
                return
            middle = 1e-6 if low == 0 and high == 1 else float(np.sqrt(max(low, 1e-9) * high))
            point = self._evaluate(prices + middle * (_STEEP * self.scale - prices))
            low, high = (low, middle) if np.all(point.excess <= 0) else (middle, high)

    def _cores(self, bound: float) -> tuple[float, bool]:
        """Programs over more and more options; the bound that they prove, and whether that settles the search."""
        floors = self._floors()
        finite = np.sort(np.concatenate([floor[np.isfinite(floor)] for floor in floors] or [np.zeros(1)]))
        size = _FIRST_CORE + 3 * self.problem.num_tables
        while True:
            cutoff = self.dearest * (1 + 1e-6) if self.best is None else self.cost * (1 - self.gap)
            if bound >= cutoff:
                return bound, True
            reach = min(cutoff, float(finite[size]) if size < len(finite) else np.inf)
            kept = [floor < reach for floor in floors]
            is_all = reach >= cutoff
            if self.watch.is_over() or sum(int(mask.sum()) for mask in kept) > MOST_COLUMNS:
                return bound, False
            watch = self.watch.part(1.0 if is_all else _SHARE)
            gap = self.gap / 2 if is_all else max(self.gap / 2, _FIRST_GAP)
            core = solve_core(self.problem, kept, gap=gap, start=self.best, watch=watch)
            allowed = core.choice is None or self._offer(core.choice)
            if allowed:
                # What is outside of the core costs at least `reach`.
                bound = max(bound, min(core.bound, reach))
            if is_all:
                return bound, core.proved and allowed
            size *= 4
