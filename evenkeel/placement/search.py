"""The search: Lagrangian prices on both budgets give a bound and a start, HiGHS finishes the core.

Under prices on HBM and host memory tables are independent but for what they agree on, which is gone through choice by
choice; no plan is faster than the priced optimum less the price of the budgets (weak duality, for any prices). The same
figures say of every option how fast a plan with it could be at most: options that are slower than a known plan are in
no better one, and the others are the core, a mixed-integer program: HiGHS solves it on one thread, without a word, and
always alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np
import scipy.sparse as sp

from evenkeel.placement.access import BoolArray, FloatArray, IntArray
from evenkeel.placement.problem import SLACK, Choice, Problem, cheapest
from evenkeel.placement.request import Watch

_MOST_PAIRS = 1 << 16
_BLOCK = 1 << 20
_ITERATIONS = 40
_TOLERANCE = 1e-7
_MOST_PRICE = 1e5
"""In units of (all of the cost) per (all of a budget): far above any that an optimum needs."""
_STEEP = 1e4
"""Prices in the same units at which hardly anything but memory counts."""
_FIRST_CORE, _FIRST_GAP = 1.5, 1e-3
"""Options a table of the first core, and what it proves: it gives a choice by which the last one is small."""
_SHARE = 0.4
"""Of the time that is left, for a core that a larger one follows."""
MOST_COLUMNS = 50_000
"""Options of a program at most: HiGHS takes some 8 kB of memory for each."""
_FINER = 1e3
"""What the largest cost is scaled to: HiGHS takes a point that is better by less than 1e-6 for no better."""
_ROUNDING = 1e-6


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
        size = int(_FIRST_CORE * self.problem.num_tables)
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


class Highs(highspy.Highs):
    """A solver that prints nothing, is deterministic, and runs beside whatever else of the process uses HiGHS."""

    def __init__(self, **options: float | str) -> None:
        """Sets options; presolve has called points optimal that were up to 13 % from the optimum."""
        super().__init__()  # type: ignore[no-untyped-call]
        fixed: dict[str, float | str] = {"threads": 1, "parallel": "off", "random_seed": 0, "presolve": "off"}
        for option, value in (fixed | options).items():
            self.setOptionValue(option, value)

    def enableCallbacks(self) -> None:  # noqa: N802
        """Silence it first: HiGHS 1.16 prints its name and licence at the first call, which this is."""
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()  # type: ignore[no-untyped-call]

    def run(self) -> highspy.HighsStatus:
        """Solve.

        All solvers of a process share one pool of threads. HiGHS refuses to run where the rest of the program has made
        it with another number of threads than these; it is then used as it is.
        """
        status: highspy.HighsStatus = super().run()
        if status == highspy.HighsStatus.kError:
            self.setOptionValue("threads", 0)
            status = super().run()
        return status


def solve_core(
    problem: Problem, kept: BoolArray, *, gap: float, start: Choice | None, watch: Watch
) -> tuple[Choice | None, float, bool]:
    """The cheapest choice among those of the (options,) that are `kept`, to a relative gap.

    Returns:
        The options, `None` where none were found; what no such choice costs less than, infinite where there is none;
        and whether the program was solved to its gap, or proved to have no solution.
    """
    if len(np.unique(problem.table[kept])) < problem.num_tables:
        return None, np.inf, True
    program = _Program(problem, kept)
    solver = Highs(mip_rel_gap=gap, mip_abs_gap=1e-12, time_limit=max(0.01, watch.wall_left()))
    solver.passModel(program.model())
    if start is not None and (values := program.values(start)) is not None:
        point = highspy.HighsSolution()
        point.col_value = values.tolist()
        solver.setSolution(point)
    for event in (solver.cbMipInterrupt, solver.cbSimplexInterrupt):
        event.subscribe(lambda call: call.interrupt() if watch.is_over() else None)
    solver.run()
    proved = solver.getModelStatus() in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kInfeasible)
    info = solver.getInfo()
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None, np.inf if proved else -np.inf, proved
    values = np.array(solver.getSolution().col_value)
    cost, claimed = float(program.costs @ values) - program.free, float(info.objective_function_value) / program.scale
    if abs(claimed - cost) > _ROUNDING * (1 / program.scale + abs(cost)):
        # The objective is not that of the point: whatever else is said is in doubt.
        return program.choice(values), -np.inf, False
    return program.choice(values), min(float(info.mip_dual_bound) / program.scale, cost), proved


class _Program:
    """Columns: which option each table takes, then what is chosen of all that there is more than one choice for."""

    def __init__(self, problem: Problem, kept: BoolArray) -> None:
        self.problem, self.options = problem, np.flatnonzero(kept)
        self.table = problem.table[self.options]
        terms = problem.terms[self.options]
        subject, open_terms = problem.subject, np.unique(terms[terms >= 0])
        open_terms = open_terms[np.bincount(subject[open_terms])[subject[open_terms]] > 1]
        self.subject = np.unique(subject[open_terms], return_inverse=True)[1]
        """Of each further column, the number of what it is about."""
        column = np.full(len(subject) + 1, -1)  # the last one is that of no agreement
        column[open_terms] = len(self.options) + np.arange(len(open_terms))
        # Groups that cost more mixed: whether they have caches, and whether they have others, of which one is free.
        mixing = problem.mixing[problem.group[self.table]]
        dear, kind = np.unique(
            (2 * problem.group[self.table] + problem.cached[self.options])[mixing > 0], return_inverse=True
        )
        kinds = np.full(len(self.options), -1)
        kinds[mixing > 0] = len(self.options) + len(open_terms) + kind
        self.links = np.concatenate([column[terms], kinds[:, None]], axis=1)
        """(options, most) columns that each can be taken with only; -1 for none."""
        self.free = float(problem.mixing[np.unique(dear // 2)].sum())
        none = np.zeros(len(open_terms) + len(dear))
        self.costs = np.concatenate([problem.seconds[self.options], none[: len(open_terms)], problem.mixing[dear // 2]])
        self.uses = [np.concatenate([use[self.options], none]) for use in (problem.hbm, problem.host)]
        self.scale = _FINER / max(float(np.abs(self.costs).max(initial=0.0)), 1e-300)

    def model(self) -> highspy.HighsLp:
        """What HiGHS solves: an option for each table, one choice for each agreement, both budgets kept."""
        columns, number = len(self.costs), len(self.options)
        parts: list[tuple[sp.csr_matrix, float, float]] = [(_matrix(self.table, np.arange(number), columns), 1.0, 1.0)]
        if len(self.subject):
            chosen = np.arange(number, number + len(self.subject))
            parts.append((_matrix(self.subject, chosen, columns), -np.inf, 1.0))
        for link in self.links.T:
            linked = np.flatnonzero(link >= 0)
            if len(linked):  # a table's options that need a choice are taken only if the choice is made
                pairs, row = np.unique(np.stack([self.table[linked], link[linked]]), axis=1, return_inverse=True)
                taken = _matrix(row.ravel(), linked, columns)
                parts.append((taken - _matrix(np.arange(pairs.shape[1]), pairs[1], columns), -np.inf, 0.0))
        for use, budget in zip(self.uses, self.problem.budget.tolist(), strict=True):
            if np.isfinite(budget):
                parts.append((sp.csr_matrix(use[None, :]), -np.inf, budget + SLACK / 2))
        matrix = sp.vstack([part for part, _, _ in parts]).tocsc()
        sides = np.array([(low, high) for part, low, high in parts for _ in range(part.shape[0])])
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = columns, matrix.shape[0]
        model.col_cost_, model.offset_ = self.costs * self.scale, -self.free * self.scale
        model.col_lower_, model.col_upper_ = np.zeros(columns), np.ones(columns)
        model.row_lower_ = np.where(np.isneginf(sides[:, 0]), -highspy.kHighsInf, sides[:, 0])
        model.row_upper_ = sides[:, 1]
        model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        model.a_matrix_.start_, model.a_matrix_.index_ = matrix.indptr, matrix.indices
        model.a_matrix_.value_ = matrix.data.astype(np.float64)
        model.integrality_ = [highspy.HighsVarType.kInteger] * columns
        return model

    def values(self, choice: Choice) -> FloatArray | None:
        """(columns,) the values that stand for a choice; `None` where an option of it is not in the program."""
        values = np.zeros(len(self.costs))
        taken = np.flatnonzero(choice[self.table] == self.options)
        links = self.links[taken]
        values[taken] = values[links[links >= 0]] = 1.0
        return values if len(taken) == len(choice) else None

    def choice(self, values: FloatArray) -> Choice:
        """The option of each table."""
        return self.options[values[: len(self.options)] > 0.5]


def _matrix(rows: IntArray | FloatArray, columns: IntArray | list[int], width: int) -> sp.csr_matrix:
    """Ones in some rows and columns."""
    rows = np.asarray(rows, dtype=np.int64)
    return sp.csr_matrix((np.ones(len(rows)), (rows, columns)), shape=(int(rows.max()) + 1, width))
