"""The exact solver: prices on both budgets, open modules by branch and bound, tables by a knapsack under them.

Where the combinations of open modules are too many to be gone through, a mixed-integer program decides over all of
them at once: see `evenkeel.placement.joint`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from evenkeel.placement.candidates import Candidates, Visited, joint_candidates
from evenkeel.placement.combinations import Combinations, enumerate_combinations
from evenkeel.placement.dual import Dual, DualPoint, maximise_dual
from evenkeel.placement.halving import Halving, Outcome, Surroundings
from evenkeel.placement.joint import solve_joint, widest
from evenkeel.placement.knapsack import Knapsack, price_scale, solve_knapsack
from evenkeel.placement.layers import SLACK
from evenkeel.placement.limits import Limits, Watch
from evenkeel.placement.milp import MOST_COLUMNS
from evenkeel.placement.placement_problem import PlacementProblem, Solution
from evenkeel.placement.stacking import folded, sampled, stack, stack_knapsacks

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_MOST_CANDIDATES = 400
_FIRST_CANDIDATES = 30
_FIRST_MINIMISERS = 4
_COLUMNS = (2_000, 10_000, MOST_COLUMNS)
"""Columns of the programs over all groups, one after the other: each finds better choices, so that fewer matter."""
_SHARE = 0.3
"""Of the time that is left, for a step that another one follows."""
_SHARE_TO_FIT = 0.45
_SHARE_TO_HALVE = 0.7
_FEW_CUTS = 100
"""Where the optimum is to be proved, before programs are asked: those of few tables are soon solved."""
_ROUGH = 1e-4
_SAMPLES = 24
_SAMPLED_GAP = 1e-3
_MOST_SAMPLES = 300
_NEAR_SAMPLES = 1500
_NEAR = (0.7, 0.9, 1.0, 1.1, 1.4)
_FAR = (0.0, 0.3, 3.0, 30.0, 3e3)
_ANGLES = np.linspace(0, np.pi / 2, 13)
_TABLE_BYTES = 64 << 20
_ITERATIONS = 40
_STEEP = 1e5


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

    def __init__(self, problem: PlacementProblem, limits: Limits, *, enough: float | None = None) -> None:
        # A cost of interest: whether there is a choice that costs at most this is all that is asked for.
        self.enough = enough
        self.problem, self.limits = problem, limits
        self.watch = Watch(limits)
        self.gap = 0.0 if problem.num_tables <= limits.exact_tables else limits.gap
        self.bound_groups = [index for index, group in enumerate(problem.groups) if group.bound]
        self.free_groups = [index for index, group in enumerate(problem.groups) if not group.bound]
        self.combinations: list[Combinations] = [enumerate_combinations(problem.groups[g]) for g in self.bound_groups]
        self.free = stack([folded(problem.groups[g]) for g in self.free_groups])
        self.visited: list[Visited] = []
        size = 8 * (_ITERATIONS + len(_ANGLES)) * sum(c.fixed.size for c in self.combinations)
        self.keeps_visited = size <= _TABLE_BYTES
        # No choice with a module costs less than its floor.
        self.floors = [np.full(len(c.group.modules), -np.inf) for c in self.combinations]
        self.free_floor = np.full(self.free.cost.shape, -np.inf)
        self.minimisers: list[tuple[float, tuple[int, ...]]] = []
        self.best_cost = np.inf
        self.best: tuple[IntArray, ...] | None = None

    def run(self) -> Solution:
        dual = self._dual()
        prices = dual.best.prices
        bound = dual.best.value
        if bound > self._dearest():
            return Solution(None, np.inf, np.inf, True, prices)
        proved = True
        if not self.bound_groups:
            free = self._knapsack((), np.inf)
            bound, proved = max(bound, free.bound), free.proved
        else:
            bound, proved = self._branch(bound, prices)
        if self.best is None:
            return Solution(None, np.inf, np.inf if proved else bound, proved, prices)
        return Solution(self.best, self.best_cost, min(bound, self.best_cost), proved, prices)

    def _dearest(self) -> float:
        """An upper bound on the cost of any choice at all."""
        total = 0.0
        for group in self.problem.groups:
            if not np.isfinite(group.time).any(axis=1).all():
                return -np.inf
            fixed = float(group.openings()[1].sum()) if group.bound else 0.0
            time = group.time if group.bound else folded(group).time
            total += fixed + float(np.where(np.isfinite(time), time, 0.0).max(axis=1).sum())
        return total * (1 + 1e-9) + 1e-12

    def _dual(self) -> Dual:
        budget = self.problem.budget
        finite = np.isfinite(budget)
        scale = self.scale = price_scale(np.array([0.0, max(self._dearest(), 1e-12)]), budget)

        def evaluate(prices: FloatArray) -> DualPoint:
            self.watch.check()
            paid, use = float(prices[finite] @ budget[finite]), np.zeros(2)
            free_value, priced_free, choice = 0.0, np.zeros((0, 1)), np.zeros(0, dtype=np.int64)
            if len(self.free.cost):
                priced_free = self.free.cost + prices[0] * self.free.use[0] + prices[1] * self.free.use[1]
                choice = priced_free.argmin(axis=1)
                items = np.arange(len(choice))
                free_value = float(priced_free[items, choice].sum())
                use += self.free.use[:, items, choice].sum(axis=1)
            value = free_value - paid
            tables, least, by_module, minimiser, columns = [], [], [], [], []
            for combinations in self.combinations:
                priced = combinations.priced(prices)
                best = int(priced.argmin())
                minimiser.append(best)
                least.append(float(priced[best]))
                by_module.append(combinations.by_module(priced))
                value += least[-1]
                if np.isfinite(priced[best]):
                    rows, chosen = np.arange(len(combinations.group.tables)), combinations.choice(best, prices)
                    use += [combinations.group.hbm[rows, chosen].sum(), combinations.group.host[rows, chosen].sum()]
                    columns.append(chosen)
                if self.keeps_visited:
                    tables.append(priced)
            if np.isfinite(value):
                for floor, mine, lowest in zip(self.floors, by_module, least, strict=True):
                    np.maximum(floor, mine + (value - lowest), out=floor)
                if len(priced_free):
                    more = priced_free - priced_free.min(axis=1, keepdims=True)
                    np.maximum(self.free_floor, more + value, out=self.free_floor)
                if np.all(use <= budget + SLACK):
                    self._offer(self._in_order(columns, choice))
            self.minimisers.append((value, tuple(minimiser)))
            if self.keeps_visited:
                self.visited.append(Visited(prices, tables, free_value))
            return DualPoint(prices, value, np.where(finite, use - budget, -1.0))

        over = self.watch.is_over
        dual = maximise_dual(evaluate, scale, iterations=_ITERATIONS, cutoff=self._dearest(), is_over=over)
        if self.bound_groups:
            # At prices without measure, combinations that cannot keep the budgets cost more than anything that can.
            for angle in _ANGLES:
                if over():
                    break
                evaluate(_STEEP * scale * [np.cos(angle), np.sin(angle)])
        return dual

    def _knapsack(self, open_modules: tuple[int, ...], cutoff: float, watch: Watch | None = None) -> Outcome:
        """The best choice under one combination of open modules of each bound group."""
        parts: list[Knapsack] = []
        columns: list[IntArray] = []
        fixed = 0.0
        for combinations, combination in zip(self.combinations, open_modules, strict=True):
            modules = combinations.open(combination)
            group = combinations.group
            fixed += float(combinations.fixed.ravel()[combination])
            use = np.stack([group.hbm[:, modules], group.host[:, modules]])
            parts.append(Knapsack(group.time[:, modules], use, np.zeros(2)))
            columns.append(modules)
        stacked = stack_knapsacks([*parts, self.free] if len(self.free.cost) else parts, self.problem.budget)
        result = solve_knapsack(
            stacked,
            cutoff=min(cutoff, self.best_cost) - fixed,
            gap=self.gap / 2,
            watch=watch or self.watch,
        )
        if result.choice is not None and result.cost + fixed < self.best_cost:
            starts = np.cumsum([0, *(len(combinations.group.tables) for combinations in self.combinations)])
            chosen = [kept[result.choice[a:b]] for kept, a, b in zip(columns, starts, starts[1:], strict=False)]
            self.best_cost = result.cost + fixed
            self.best = self._in_order(chosen, result.choice[starts[-1] :])
        return Outcome(result.bound + fixed, result.proved)

    def _in_order(self, bound: list[IntArray], free: IntArray) -> tuple[IntArray, ...]:
        """Choices of the bound groups, and of the only table of each free one, in the order of the groups."""
        modules = dict(zip(self.bound_groups, bound, strict=True))
        modules |= {index: free[row : row + 1] for row, index in enumerate(self.free_groups)}
        return tuple(modules[index] for index in range(len(self.problem.groups)))

    def _offer(self, modules: tuple[IntArray, ...]) -> None:
        """Takes a choice that keeps the budgets, if it is the best so far."""
        cost = seconds(self.problem, modules)
        if cost < self.best_cost:
            self.best_cost, self.best = cost, modules

    def _cutoff(self) -> float:
        """Choices that cost this or more are of no interest."""
        return self.best_cost - self._margin() if self.best is not None else self._dearest()

    def _margin(self) -> float:
        """What a choice must save to be worth finding."""
        return max(1e-12, self.gap) * abs(self.best_cost) if self.best is not None else 0.0

    def _branch(self, bound: float, best_prices: FloatArray) -> tuple[float, bool]:
        """Every combination of open modules that could beat the best, one by one or in one program."""
        first = [names for _, names in sorted(self.minimisers, key=lambda found: -found[0])[:_FIRST_MINIMISERS]]
        if self.keeps_visited:
            candidates = self._candidates(np.inf, _FIRST_CANDIDATES)
            first = [names for names, floor in zip(candidates.names, candidates.floors, strict=True) if floor < np.inf]
        for number, combination in enumerate(dict.fromkeys(first)):
            if self.watch.is_over():
                return bound, False
            floor = candidates.floors[number] if self.keeps_visited else -np.inf
            if self.best is not None and floor >= self.best_cost - self._margin():
                break
            self._knapsack(combination, np.inf)
        if len(self.combinations) > 1 or self.best is None:
            self._from_samples(best_prices)
        if self._answered(bound):
            return bound, False
        if self.keeps_visited and self.best is not None:
            most = _MOST_CANDIDATES if len(self.combinations) > 1 else self.combinations[0].fixed.size
            candidates = self._candidates(self.best_cost - self._margin(), most)
            if candidates.complete:
                return self._go_through(candidates, bound)
        if self.best is None and self.enough is None and self._cannot_fit():
            return np.inf, True
        if self.keeps_visited and self.enough is None:
            bound, settled = self._halve(bound, best_prices)
            if settled:
                return bound, True
        return self._programs(bound)

    def _halve(self, bound: float, prices: FloatArray) -> tuple[float, bool]:
        """Parts what may be chosen where the dual mixes; the bound, and whether that settles the search."""
        watch = self.watch.part(_SHARE_TO_HALVE)
        around = Surroundings(
            combinations=self.combinations,
            free=self.free,
            budget=self.problem.budget,
            scale=self.scale,
            solve=lambda opened: self._knapsack(opened, np.inf, watch),
            offer=lambda bound, free: self._offer(self._in_order(bound, free)),
            cutoff=self._cutoff,
            most_cuts=_FEW_CUTS if self.gap == 0.0 else None,
            watch=watch,
        )
        found = Halving(around).run(bound, prices)
        if not found.proved:
            return max(bound, min(found.bound, self.best_cost)), False
        if self.best is None:
            return np.inf, True
        return self.best_cost if self.gap == 0.0 else max(bound, min(found.bound, self._cutoff())), True

    def _from_samples(self, best: FloatArray) -> None:
        """A choice made of samples: each bound group's best combinations at many prices, as options of one item."""
        directions = _STEEP * self.scale * np.array([[np.cos(a), np.sin(a)] for a in _ANGLES])
        near = min(_MOST_SAMPLES, max(_SAMPLES, _NEAR_SAMPLES // len(self.combinations)))
        prices = [(near, best * factor) for factor in _NEAR]
        prices += [(_SAMPLES, price) for price in (*(best * factor for factor in _FAR), *directions)]
        samples: list[dict[bytes, IntArray]] = [{} for _ in self.combinations]
        for most, price in prices:
            for combinations, found in zip(self.combinations, samples, strict=True):
                priced = combinations.priced(price)
                names = [int(name) for name in np.argsort(priced, kind="stable")[:most] if np.isfinite(priced[name])]
                found.update((chosen.tobytes(), chosen) for chosen in combinations.choices(names, price))
            if self.watch.is_over():
                break
        parts = [sampled(c.group, list(found.values())) for c, found in zip(self.combinations, samples, strict=True)]
        items = stack_knapsacks([*parts, self.free] if len(self.free.cost) else parts, self.problem.budget)
        choice = solve_knapsack(items, cutoff=self.best_cost, gap=_SAMPLED_GAP, watch=self.watch.part(_SHARE)).choice
        if choice is not None:
            options = choice[: len(samples)].tolist()
            bound = [list(found.values())[option] for found, option in zip(samples, options, strict=True)]
            self._offer(self._in_order(bound, choice[len(bound) :]))
            opened = (c.containing(mine) for c, mine in zip(self.combinations, bound, strict=True))
            self._knapsack(tuple(opened), np.inf)

    def _candidates(self, cutoff: float, most: int) -> Candidates:
        return joint_candidates(self.visited, self.problem.budget, cutoff, most, self.watch.is_over)

    def _go_through(self, candidates: Candidates, bound: float) -> tuple[float, bool]:
        """Solves under all combinations that could beat the best; the bound, and whether that settles the search."""
        # Whatever was cut off above costs at least the cutoff.
        outstanding = self.best_cost - self._margin() if self.gap else np.inf
        for position, (combination, floor) in enumerate(zip(candidates.names, candidates.floors, strict=True)):
            if floor >= self.best_cost - self._margin():
                outstanding = min(outstanding, floor)
                break
            if position and self.watch.is_over():
                return min(max(bound, floor), outstanding, self.best_cost), False
            outcome = self._knapsack(combination, np.inf)
            outstanding = min(outstanding, max(outcome.bound, floor))
            if not outcome.proved:
                return min(max(bound, floor), outstanding), False
        if self.gap == 0.0:
            return self.best_cost, True
        return max(bound, min(outstanding, self.best_cost)), True

    def _programs(self, bound: float) -> tuple[float, bool]:
        """Programs over more and more modules; the bound, and whether that settles the search."""
        floors = self._module_floors()
        for columns in _COLUMNS:
            cutoff = self._cutoff()
            kept = widest(self.problem, floors, cutoff, columns)
            left_out = [floor[~mask] for floor, mask in zip(floors, kept, strict=True)]
            whole = not any(bool((floor < cutoff).any()) for floor in left_out)
            watch = self.watch if whole else self.watch.part(_SHARE)
            gap = self.gap / 2 if whole else max(_ROUGH, self.gap)
            result = solve_joint(self.problem, kept, gap=gap, start=self.best, enough=self.enough, watch=watch)
            fits = result.modules is None or within_budget(self.problem, result.modules)
            if result.modules is not None and fits:
                self._offer(result.modules)
            elsewhere = min((float(floor.min()) for floor in left_out if len(floor)), default=np.inf)
            if self.best is None and whole and result.proved and fits:
                return np.inf, True
            bound = max(bound, min(result.bound, elsewhere, self.best_cost))
            if self.best is not None and bound >= self.best_cost - self._margin() * (1 + 1e-9):
                return bound, True
            if whole:
                exact = result.proved and fits
                return (self.best_cost if exact and self.gap == 0.0 else bound), exact
            if self._answered(bound):
                break
        return bound, False

    def _answered(self, bound: float) -> bool:
        """Whether it is known that there is a choice that costs little enough, or that there is none."""
        return self.enough is not None and (self.best_cost <= self.enough or bound > self.enough)

    def _cannot_fit(self) -> bool:
        """Whether the least use of one budget under the other is above it; a plan that is found so is kept."""
        for resource in range(2):
            if not np.isfinite(self.problem.budget[resource]) or self.watch.is_over():
                continue
            limits = self.limits.at_most(_ROUGH).within(_SHARE_TO_FIT * self.watch.left())
            budget = float(self.problem.budget[resource]) + SLACK
            least = _Search(self.problem.minimising(resource), limits, enough=budget).run()
            if least.bound > budget:
                return True
            if least.modules is not None and within_budget(self.problem, least.modules):
                self._offer(least.modules)
                return False
        return False

    def _module_floors(self) -> list[FloatArray]:
        """For each group, the floors of its modules."""
        found: dict[int, FloatArray] = dict(zip(self.bound_groups, self.floors, strict=True))
        for row, index in enumerate(self.free_groups):
            found[index] = self.free_floor[row, : len(self.problem.groups[index].modules)]
        return [found[index] for index in range(len(self.problem.groups))]


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
        opening_of, cost = group.openings()
        total += float(group.time[np.arange(len(group.tables)), chosen].sum())
        total += float(cost[np.unique(opening_of[chosen])].sum())
    return total
