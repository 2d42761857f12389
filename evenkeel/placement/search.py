"""The search: Lagrangian prices on both budgets give a bound and a start, HiGHS finishes the core.

Under prices on HBM and host memory tables are independent but for what they agree on, which is gone through choice by
choice; no plan is faster than the priced optimum less the price of the budgets (weak duality, for any prices). The same
figures say of every option how fast a plan with it could be at most: options that are slower than a known plan are in
no better one, and the others are the core, a mixed-integer program.
"""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np
import numpy.typing as npt

from evenkeel.placement.limits import Watch
from evenkeel.placement.problem import SLACK, BoolArray, Choice, Problem, cheapest
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
_FIRST_CORE, _FIRST_GAP = 1_500, 1e-3
"""Options of the first core, and what it proves: it gives a choice by which the last one is small."""
_SHARE = 0.4
"""Of the time that is left, for a core that a larger one follows."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice of an option for each table.

    Attributes:
        choice: The options; `None` where no choice was found.
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


_NOTHING = Solution(None, np.inf, np.inf, True, np.zeros(2))


def solve(problem: Problem, watch: Watch, *, gap: float = 0.0, start: Choice | None = None) -> Solution:
    """The cheapest choice within both budgets on the average rank, to a relative gap, or the best found in time."""
    limited = problem.limited()
    if not np.isfinite(problem.least(limited.seconds)).all():
        return _NOTHING
    return _Search(limited, watch, gap).run(start)


class PricedGroup:
    """Tables that fuse, under prices. Of what they agree on, at most two things are gone through; others are relaxed.

    Attributes:
        tables: Those.
        options: What they may choose from.
    """

    def __init__(self, problem: Problem, group: int) -> None:
        """Finds the two things with most choices that no option has both of."""
        mine = problem.group == group
        self.problem, self.tables = problem, np.flatnonzero(mine)
        self.options = np.flatnonzero(mine[problem.table] & np.isfinite(problem.seconds))
        self.rows = np.searchsorted(self.tables, problem.table[self.options])
        terms, subject = problem.terms[self.options], problem.subject
        choices = np.bincount(subject[np.unique(terms[terms >= 0])], minlength=1)
        self.sizes, self.sides = [1, 1], [np.zeros_like(self.rows)] * 2
        """Of both things, the number of choices and one more, and what (options,) choose; the last is neither."""
        self.is_free = np.ones(len(self.options), dtype=bool)
        found = 0
        for what in np.argsort(-choices, kind="stable").tolist():
            about = (terms >= 0) & (np.append(subject, -1)[terms] == what)
            members, size = about.any(axis=1), int(choices[what]) + 1
            if size > 2 and found < 2 and self.is_free[members].all() and self.sizes[0] * size <= _MOST_PAIRS:
                self.sizes[found], self.sides[found] = size, np.full(len(self.options), size - 1)
                self.sides[found][members] = np.unique(terms[about], return_inverse=True)[1]
                self.is_free &= ~members
                found += 1
        self.in_second = self.sides[1] < self.sizes[1] - 1
        self.starts = np.searchsorted(self.rows, np.arange(len(self.tables)))
        self.regimes: list[tuple[BoolArray | None, float]] = [(None, float(problem.mixing[group]))]
        """What may not be chosen in each, and what it costs more: cached and other options, or either alone."""
        if problem.mixing[group]:
            cached = problem.cached[self.options]
            self.regimes += [(cached, 0.0), (~cached, 0.0)]

    def price(self, prices: FloatArray, rows: slice = slice(None)) -> tuple[float, IntArray]:
        """Least priced cost of some of the tables, infinite where they cannot agree, and the options of all of them."""
        best, opened = np.inf, np.zeros(len(self.options))
        for closed, more in self.regimes:
            priced, first, second = self._priced(prices, closed)
            totals = self._totals(first[rows], second[rows]) + more
            pair = np.unravel_index(int(totals.argmin()), totals.shape)
            if totals[pair] < best:
                chosen = np.where(self.in_second, self.sides[1] == pair[1], self.sides[0] == pair[0])
                best, opened = float(totals[pair]), np.where(chosen | self.is_free, priced, np.inf)
        return best, self.options[cheapest(opened, self.starts, self.rows)]

    def floors(self, prices: FloatArray) -> FloatArray:
        """(options,) no choice of the group with that option has a lower priced cost."""
        found: FloatArray = np.min([self._floors(prices, closed) + more for closed, more in self.regimes], axis=0)
        return found

    def _floors(self, prices: FloatArray, closed: BoolArray | None) -> FloatArray:
        """(options,) the same in a regime."""
        priced, first, second = self._priced(prices, closed)
        totals = self._totals(first, second)
        least = np.empty(first.shape), np.empty(second.shape)
        for part in self._blocks(len(first)):
            own = np.minimum(first[part, :, None], second[part, None, :])
            own[np.isinf(own)] = 0.0
            others = np.subtract(totals, own, out=own)  # least cost of all other tables
            least[0][part], least[1][part] = others.min(axis=2), others.min(axis=1)
        of_first, of_second = (each[self.rows, side] for each, side in zip(least, self.sides, strict=True))
        of_free = least[0].min(axis=1)[self.rows]
        found: FloatArray = priced + np.where(self.is_free, of_free, np.where(self.in_second, of_second, of_first))
        return found

    def _priced(self, prices: FloatArray, closed: BoolArray | None) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(options,) priced costs, and (tables, choices) least of each side; in the first also of what is free."""
        priced = self.problem.priced(prices)[self.options]
        priced = priced if closed is None else np.where(closed, np.inf, priced)
        found = []
        for side, size, out in zip(self.sides, self.sizes, (self.in_second, ~self.in_second), strict=True):
            least = np.full(len(self.tables) * size, np.inf)
            np.minimum.at(least, self.rows * size + side, np.where(out, np.inf, priced))
            found.append(least.reshape(-1, size))
        return priced, np.minimum(found[0], found[0][:, -1:]), found[1]

    def _totals(self, first: FloatArray, second: FloatArray) -> FloatArray:
        """(first, second) sums over tables for each pair of choices."""
        totals = np.zeros((first.shape[1], second.shape[1]))
        for part in self._blocks(len(first)):
            totals += np.minimum(first[part, :, None], second[part, None, :]).sum(axis=0)
        return totals

    def _blocks(self, rows: int) -> list[slice]:
        step = max(1, _BLOCK // (self.sizes[0] * self.sizes[1]))
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
        self.groups = [PricedGroup(problem, group) for group in range(len(problem.mixing))]
        self.limited = np.isfinite(problem.budget)
        dearest = -problem.least(-np.where(np.isfinite(problem.seconds), problem.seconds, 0.0))
        self.dearest = float(dearest.sum() + problem.mixing.sum()) * (1 + 1e-9) + 1e-12
        self.scale = np.where(self.limited, self.dearest / np.maximum(problem.budget, 1.0), 0.0)
        self.points: list[_Point] = []
        self.best: Choice | None = None
        self.cost = np.inf

    def run(self, start: Choice | None) -> Solution:
        """Prices, then cores."""
        if start is not None:
            self._offer(start)
        self._find_prices()
        best = max(self.points, key=lambda point: point.value)
        if best.value > self.dearest:
            return _NOTHING
        bound, proved = self._cores(best.value)
        if self.best is None:
            bound = np.inf if proved else bound
        return Solution(self.best, self.cost, min(bound, self.cost), proved, best.prices)

    def _evaluate(self, prices: FloatArray) -> _Point:
        """The dual at some prices."""
        found = [group.price(prices) for group in self.groups]
        least = tuple(own for own, _ in found)
        value = sum(least) - float(prices[self.limited] @ (self.problem.budget[self.limited] + SLACK))
        choice = np.zeros(self.problem.num_tables, dtype=np.int64)
        for group, (_, chosen) in zip(self.groups, found, strict=True):
            choice[group.tables] = chosen
        excess = np.where(self.limited, self.problem.usage(choice) - self.problem.budget - SLACK, -1.0)
        self._offer(choice)
        self.points.append(_Point(prices, value, excess, least))
        return self.points[-1]

    def _floors(self) -> FloatArray:
        """(options,) no choice with that option costs less, by any prices."""
        floors = np.where(np.isfinite(self.problem.seconds), -np.inf, np.inf)
        for point in sorted(self.points, key=lambda point: -point.value):
            for group, least in zip(self.groups, point.least, strict=True):
                if self.watch.is_over():
                    return floors
                better = group.floors(point.prices) + (point.value - least)
                floors[group.options] = np.maximum(floors[group.options], better)
        return floors

    def _find_prices(self) -> None:
        """The dual at more and more prices, by cutting planes: it is concave and piecewise linear in two prices."""
        free = self._evaluate(np.zeros(2))
        if np.all(free.excess <= 0) or free.value > self.dearest:
            return
        if self.best is None:
            self._evaluate(_STEEP * self.scale)
        model, infinity = Highs(output_flag=False), highspy.kHighsInf
        nothing = (0, np.zeros(0, dtype=np.int32), np.zeros(0))
        model.addCol(-1.0, -infinity, infinity, *nothing)
        for _ in range(2):
            model.addCol(0.0, 0.0, _MOST_PRICE, *nothing)
        fresh = list(self.points)
        while len(self.points) < _ITERATIONS and not self.watch.is_over():
            for point in fresh:  # the dual <= value + excess . (prices - here)
                row = np.array([1.0, *(-point.excess * self.scale)])
                side = point.value - float(point.excess @ point.prices)
                model.addRow(-infinity, side, len(row), np.arange(len(row), dtype=np.int32), row)
            model.run()
            upper, *prices = model.getSolution().col_value
            best = max(point.value for point in self.points)
            if upper - best <= _TOLERANCE * max(abs(best), abs(upper), 1e-12) or best > self.dearest:
                break
            fresh = [self._evaluate(np.maximum(0.0, np.array(prices)) * self.scale)]

    def _offer(self, choice: Choice) -> bool:
        """Takes a choice that keeps the budgets and is agreed on, if it is the best so far; whether it is allowed."""
        cost = self.problem.cost(choice)
        if not self.problem.fits(choice) or not np.isfinite(cost) or not self.problem.is_agreed(choice):
            return False
        if cost < self.cost:
            self.best, self.cost = choice, cost
        return True

    def _cores(self, bound: float) -> tuple[float, bool]:
        """Programs over more and more options; the bound that they prove, and whether that settles the search."""
        floors = self._floors()
        finite = np.sort(floors[np.isfinite(floors)])
        size = _FIRST_CORE + 3 * self.problem.num_tables
        while True:
            cutoff = self.dearest * (1 + 1e-6) if self.best is None else self.cost * (1 - self.gap)
            if bound >= cutoff:
                return bound, True
            reach = min(cutoff, float(finite[size]) if size < len(finite) else np.inf)
            kept = floors < reach
            is_all = reach >= cutoff
            if self.watch.is_over() or kept.sum() > MOST_COLUMNS:
                return bound, False
            watch = self.watch.part(1.0 if is_all else _SHARE)
            gap = self.gap / 2 if is_all else max(self.gap / 2, _FIRST_GAP)
            choice, floor, proved = solve_core(self.problem, kept, gap=gap, start=self.best, watch=watch)
            allowed = choice is None or self._offer(choice)
            if allowed:
                # What is outside of the core costs at least `reach`.
                bound = max(bound, min(floor, reach))
            if is_all:
                return bound, proved and allowed
            size *= 4
