"""The exact solver: prices on both budgets, open modules by branch and bound, tables by a knapsack under them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from evenkeel.placement.combinations import Combinations, enumerate_combinations
from evenkeel.placement.dual import Dual, DualPoint, maximise_dual
from evenkeel.placement.knapsack import Knapsack, price_scale, solve_knapsack
from evenkeel.placement.layers import SLACK
from evenkeel.placement.milp import SolveCancelledError
from evenkeel.placement.placement_problem import Group, PlacementProblem, Solution

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_MOST_CANDIDATES = 5_000
_EXACT_TABLES = 50
DEFAULT_GAP = 1e-4
_DIRECTIONS = 13
_STEEP = 1e5


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a search may stop early.

    Attributes:
        gap: Relative gap to prove above `exact_tables` tables; up to those the optimum is proved.
        exact_tables: Number of tables up to which the optimum is proved whatever the gap.
        time_limit_s: Time after which the best found is returned with its gap.
        should_stop: Asked now and then; once true, the search raises `SolveCancelledError`.
        clock: Seconds, for the time limit.
    """

    gap: float = DEFAULT_GAP
    exact_tables: int = _EXACT_TABLES
    time_limit_s: float = 30.0
    should_stop: Callable[[], bool] | None = None
    clock: Callable[[], float] = time.monotonic


def solve(problem: PlacementProblem, limits: Limits | None = None) -> Solution:
    """The cheapest choice of modules within both budgets.

    Raises:
        SolveCancelledError: If `limits.should_stop` answered true.
    """
    limits = limits or Limits()
    if not problem.groups:
        return Solution((), 0.0, 0.0, True, np.zeros(2))
    return _Search(problem, limits).run()


class _Search:
    """State of one search."""

    def __init__(self, problem: PlacementProblem, limits: Limits, *, nested: bool = False) -> None:
        self.nested = nested
        self.problem = problem
        self.limits = limits
        self.deadline = limits.clock() + limits.time_limit_s
        self.gap = 0.0 if problem.num_tables <= limits.exact_tables else limits.gap
        self.bound_groups = [index for index, group in enumerate(problem.groups) if group.bound]
        self.free_groups = [index for index, group in enumerate(problem.groups) if not group.bound]
        self.combinations: list[Combinations] = [enumerate_combinations(problem.groups[g]) for g in self.bound_groups]
        self.free = _stack([_folded(problem.groups[g]) for g in self.free_groups])
        # For each visited price: the value of every combination of each bound group, and of all free groups.
        self.visited: list[tuple[FloatArray, list[FloatArray], float]] = []
        self.best_cost = np.inf
        self.best: tuple[IntArray, ...] | None = None

    def run(self) -> Solution:
        dual = self._dual()
        prices = dual.best.prices
        bound = dual.best.value
        dearest = self._dearest()
        if bound > dearest:
            return Solution(None, np.inf, np.inf, True, prices)
        proved = True
        if not self.bound_groups:
            free = self._knapsack((), np.inf)
            bound, proved = max(bound, free.bound), free.proved
        else:
            bound, proved = self._branch(bound)
        if self.best is None:
            return Solution(None, np.inf, np.inf if proved else bound, proved, prices)
        return Solution(self.best, self.best_cost, min(bound, self.best_cost), proved, prices)

    def _check(self) -> None:
        if self.limits.should_stop is not None and self.limits.should_stop():
            raise SolveCancelledError

    def _left(self) -> float:
        return self.deadline - self.limits.clock()

    def _dearest(self) -> float:
        """An upper bound on the cost of any choice at all."""
        total = 0.0
        for group in self.problem.groups:
            if not np.isfinite(group.time).any(axis=1).all():
                return -np.inf
            fixed = sum(module.fixed for module in group.modules) if group.bound else 0.0
            folded = group.time if group.bound else _folded(group).time
            total += fixed + float(np.where(np.isfinite(folded), folded, 0.0).max(axis=1).sum())
        return total * (1 + 1e-9) + 1e-12

    def _dual(self) -> Dual:
        budget = self.problem.budget
        finite = np.isfinite(budget)
        scale = price_scale(np.array([0.0, max(self._dearest(), 1e-12)]), budget)

        def evaluate(prices: FloatArray) -> DualPoint:
            self._check()
            value, use = -float(prices[finite] @ budget[finite]), np.zeros(2)
            free_value = 0.0
            if len(self.free.cost):
                priced = self.free.cost + prices[0] * self.free.use[0] + prices[1] * self.free.use[1]
                choice = priced.argmin(axis=1)
                items = np.arange(len(choice))
                free_value = float(priced[items, choice].sum())
                use += self.free.use[:, items, choice].sum(axis=1)
            per_group = []
            for combinations in self.combinations:
                priced = combinations.priced(prices)
                per_group.append(priced)
                best = int(priced.argmin())
                value += float(priced[best])
                if np.isfinite(priced[best]):
                    rows, chosen = np.arange(len(combinations.group.tables)), combinations.choice(best, prices)
                    use += [combinations.group.hbm[rows, chosen].sum(), combinations.group.host[rows, chosen].sum()]
            self.visited.append((prices, per_group, free_value))
            return DualPoint(prices, value + free_value, np.where(finite, use - budget, -1.0))

        dual = maximise_dual(evaluate, scale, iterations=40, cutoff=self._dearest())
        if self.bound_groups:
            # At prices without measure, combinations that cannot keep the budgets cost more than anything that can.
            for angle in np.linspace(0, np.pi / 2, _DIRECTIONS):
                evaluate(_STEEP * scale * [np.cos(angle), np.sin(angle)])
        return dual

    def _knapsack(self, open_modules: tuple[int, ...], cutoff: float) -> _Outcome:
        """The best choice under one combination of open modules of each bound group."""
        parts: list[Knapsack] = []
        columns: list[IntArray] = []
        fixed = 0.0
        for combinations, combination in zip(self.combinations, open_modules, strict=True):
            modules = np.array(combinations.open(combination))
            group = combinations.group
            fixed += float(combinations.fixed.ravel()[combination])
            use = np.stack([group.hbm[:, modules], group.host[:, modules]])
            parts.append(Knapsack(group.time[:, modules], use, np.zeros(2)))
            columns.append(modules)
        stacked = _stack_knapsacks([*parts, self.free] if len(self.free.cost) else parts, self.problem.budget)
        result = solve_knapsack(
            stacked,
            cutoff=min(cutoff, self.best_cost) - fixed,
            gap=self.gap / 2,
            time_limit_s=self._left,
            should_stop=self.limits.should_stop,
        )
        if result.choice is not None and result.cost + fixed < self.best_cost:
            self.best_cost = result.cost + fixed
            self.best = self._unstack(result.choice, columns)
        return _Outcome(result.bound + fixed, result.proved)

    def _unstack(self, choice: IntArray, columns: list[IntArray]) -> tuple[IntArray, ...]:
        modules: dict[int, IntArray] = {}
        start = 0
        for index, kept in zip(self.bound_groups, columns, strict=True):
            stop = start + len(self.problem.groups[index].tables)
            modules[index] = kept[choice[start:stop]]
            start = stop
        for index in self.free_groups:
            modules[index] = choice[start : start + 1]
            start += 1
        return tuple(modules[index] for index in range(len(self.problem.groups)))

    def _branch(self, dual_bound: float) -> tuple[float, bool]:
        """Every combination of open modules that could beat the best, in the order of their bounds."""
        for combination, floor in zip(*self._candidates(np.inf, 30)[:2], strict=True):
            self._check()
            if self.best is not None and floor >= self.best_cost - max(1e-12, self.gap) * abs(self.best_cost):
                break
            self._knapsack(combination, np.inf)
        if self.best is None and not self.nested and not self._feasible():
            return np.inf, True
        margin = max(1e-12, self.gap) * abs(self.best_cost) if self.best is not None else 0.0
        most = (
            _MOST_CANDIDATES if len(self.combinations) > 1 else max(_MOST_CANDIDATES, self.combinations[0].fixed.size)
        )
        candidates, floors, complete = self._candidates(self.best_cost - margin, most)
        lowest = dual_bound
        # Whatever was cut off above costs at least the cutoff.
        outstanding = self.best_cost - margin if self.gap else np.inf
        for position, (combination, floor) in enumerate(zip(candidates, floors, strict=True)):
            margin = max(1e-12, self.gap) * abs(self.best_cost) if self.best is not None else 0.0
            if floor >= self.best_cost - margin:
                outstanding = min(outstanding, floor)
                break
            if position and self._left() <= 0:
                return min(max(lowest, floor), outstanding, self.best_cost), False
            self._check()
            outcome = self._knapsack(combination, np.inf)
            outstanding = min(outstanding, max(outcome.bound, floor))
            if not outcome.proved:
                return min(max(lowest, floor), outstanding), False
        if not complete:
            outstanding = min(outstanding, self._horizon)
        if self.gap == 0.0 and complete:
            return self.best_cost, True
        return max(lowest, min(outstanding, self.best_cost)), complete or self.best_cost <= self._horizon

    def _feasible(self) -> bool:
        """Whether anything may fit: the least use of one budget under the other tells. A plan found so is kept."""
        for resource in range(2):
            if not np.isfinite(self.problem.budget[resource]):
                continue
            left = replace(self.limits, gap=1e-9, time_limit_s=max(0.1, self._left() / 4))
            least = _Search(self.problem.minimising(resource), left, nested=True).run()
            if least.bound > self.problem.budget[resource] + SLACK:
                return False
            if least.modules is not None and within_budget(self.problem, least.modules):
                cost = seconds(self.problem, least.modules)
                if cost < self.best_cost:
                    self.best_cost, self.best = cost, least.modules
                return True
        return True

    def _candidates(self, cutoff: float, most: int) -> tuple[list[tuple[int, ...]], list[float], bool]:
        """Joint combinations whose dual bound is below `cutoff`, in ascending order, `most` at each stage.

        Returns:
            The combinations, their bounds, and whether none was dropped for want of room.
        """
        budget = self.problem.budget + SLACK
        finite = np.isfinite(budget)
        paid = np.array([float(prices[finite] @ budget[finite]) for prices, _, _ in self.visited])
        free = np.array([value for _, _, value in self.visited])
        tables = [np.stack([values[g] for _, values, _ in self.visited]) for g in range(len(self.combinations))]
        least = [table.min(axis=1) for table in tables]
        everything = np.sum(least, axis=0) + free - paid
        partial, names = (free - paid)[:, None], np.zeros((1, 0), dtype=np.int64)
        floors = np.array([float(everything.max())])
        self._horizon, complete = np.inf, True
        for position, table in enumerate(tables):
            alone = (table + (everything - least[position])[:, None]).max(axis=0)
            usable = np.flatnonzero(alone < cutoff)
            rest = np.sum(least[position + 1 :], axis=0) if position + 1 < len(tables) else np.zeros(len(free))
            blocks = []
            for row in range(partial.shape[1]):
                floor = (partial[:, [row]] + table[:, usable] + rest[:, None]).max(axis=0)
                kept = np.flatnonzero(floor < cutoff)
                blocks.append((floor[kept], np.full(len(kept), row), usable[kept]))
            if not any(len(kept) for _, _, kept in blocks):
                return [], [], complete
            floors, parents, added = (np.concatenate(column) for column in zip(*blocks, strict=True))
            order = np.argsort(floors, kind="stable")
            if len(order) > most:
                self._horizon = min(self._horizon, float(floors[order[most]]))
                complete, order = False, order[:most]
            floors, parents, added = floors[order], parents[order], added[order]
            partial = partial[:, parents] + table[:, added]
            names = np.column_stack([names[parents], added])
        return [tuple(int(c) for c in row) for row in names], [float(floor) for floor in floors], complete


@dataclass(frozen=True, slots=True)
class _Outcome:
    bound: float
    proved: bool


def _folded(group: Group) -> Group:
    """A free group with the fixed time of its modules in the time of its only table."""
    fixed = np.array([module.fixed for module in group.modules])
    return Group(group.tables, group.modules, group.time + fixed, group.hbm, group.host, False)


def _stack(groups: list[Group]) -> Knapsack:
    parts = [Knapsack(g.time, np.stack([g.hbm, g.host]), np.zeros(2)) for g in groups]
    return _stack_knapsacks(parts, np.zeros(2))


def _stack_knapsacks(parts: list[Knapsack], budget: FloatArray) -> Knapsack:
    items = sum(len(part.cost) for part in parts)
    options = max((part.cost.shape[1] for part in parts), default=1)
    cost, use = np.full((items, options), np.inf), np.zeros((2, items, options))
    row = 0
    for part in parts:
        stop, width = row + len(part.cost), part.cost.shape[1]
        cost[row:stop, :width] = part.cost
        use[:, row:stop, :width] = part.use
        row = stop
    return Knapsack(cost, use, budget)


def within_budget(problem: PlacementProblem, modules: tuple[IntArray, ...]) -> bool:
    """Whether a choice keeps both budgets."""
    return bool(np.all(usage(problem, modules) <= problem.budget + SLACK))


def usage(problem: PlacementProblem, modules: tuple[IntArray, ...]) -> FloatArray:
    """(2,) HBM of the fullest rank and host memory that a choice takes, in units."""
    total = np.zeros(2)
    for group, chosen in zip(problem.groups, modules, strict=True):
        rows = np.arange(len(group.tables))
        total += [group.hbm[rows, chosen].sum(), group.host[rows, chosen].sum()]
    return total


def seconds(problem: PlacementProblem, modules: tuple[IntArray, ...]) -> float:
    """Cost of a choice."""
    total = 0.0
    for group, chosen in zip(problem.groups, modules, strict=True):
        total += float(group.time[np.arange(len(group.tables)), chosen].sum())
        total += sum(group.modules[int(module)].fixed for module in np.unique(chosen))
    return total
