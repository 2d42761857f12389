"""The multiple-choice knapsack over two budgets: one option for each item, least cost, both budgets kept."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from evenkeel.placement.dual import Dual, DualPoint, maximise_dual
from evenkeel.placement.layers import SLACK, prepare_layers, search_layers
from evenkeel.placement.limits import Watch
from evenkeel.placement.milp import MOST_COLUMNS, solve_milp

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


_FEW_CHOICES = 1024
_HISTORY_BYTES = 64 << 20
_MOST_PRICED = 100_000_000
_MOST_COMPARED = 300_000_000
_WIDTHS = ((100, True), (100, False), (1_000, False), (8_000, False))
"""States of each layered search, and whether it is confined to the options near the dual optimum."""
_AROUND = (0.0, 0.25, 0.5, 0.75, 1.0, 1.3, 2.0, 4.0)
"""Prices that bound states, over those of the dual optimum: once the large items are decided, others fit better."""


@dataclass(frozen=True, slots=True)
class Knapsack:
    """Items with options.

    Attributes:
        cost: (items, options); infinite where an item has no such option.
        use: (2, items, options) use of the budgets.
        budget: (2,) budgets; infinite where there is none.
    """

    cost: FloatArray
    use: FloatArray
    budget: FloatArray


@dataclass(frozen=True, slots=True)
class KnapsackResult:
    """A choice of options.

    Attributes:
        choice: (items,) chosen option of each item; `None` where none is feasible below the cutoff.
        cost: Its cost; infinite without a choice.
        bound: No feasible choice costs less, or less than the cutoff.
        proved: Whether the search ended by itself, not by its time limit.
    """

    choice: IntArray | None
    cost: float
    bound: float
    proved: bool


def without_dominated(problem: Knapsack, watch: Watch | None = None, block: int = 2_000_000) -> Knapsack:
    """The same problem, with every option gone that another option of its item matches or beats in everything.

    Where time is up before all items are looked at, the rest keep their options.
    """
    cost = problem.cost.copy()
    items, options = cost.shape
    if items * options * options > _MOST_COMPARED:
        return problem
    step = max(1, block // max(1, options * options))
    earlier = np.tri(options, options, -1, dtype=bool)
    for first in range(0, items, step):
        if watch is not None and watch.is_over():
            break
        rows = slice(first, first + step)
        measures = (problem.cost[rows], problem.use[0, rows], problem.use[1, rows])
        # [i, j, k]: option k is no worse than option j.
        no_worse = np.logical_and.reduce([m[:, None, :] <= m[:, :, None] for m in measures])
        equal = np.logical_and.reduce([m[:, None, :] == m[:, :, None] for m in measures])
        beaten = (no_worse & (~equal | earlier[None])) & np.isfinite(problem.cost[rows])[:, None, :]
        cost[rows][beaten.any(axis=2)] = np.inf
    return Knapsack(cost, problem.use, problem.budget)


def price(problem: Knapsack, prices: FloatArray) -> tuple[DualPoint, FloatArray, IntArray]:
    """The dual at `prices`, the priced cost of every option, and the minimiser."""
    priced = problem.cost + prices[0] * problem.use[0] + prices[1] * problem.use[1]
    choice = priced.argmin(axis=1)
    items = np.arange(len(choice))
    finite = np.isfinite(problem.budget)
    paid = float(prices[finite] @ problem.budget[finite])
    excess = np.where(finite, problem.use[:, items, choice].sum(axis=1) - problem.budget, -1.0)
    return DualPoint(prices, float(priced[items, choice].sum()) - paid, excess), priced, choice


def price_scale(cost: FloatArray, budget: FloatArray) -> FloatArray:
    """The natural size of prices: all of the cost for all of a budget."""
    finite = cost[np.isfinite(cost)]
    spread = float(np.ptp(finite)) if finite.size else 1.0
    return np.where(np.isfinite(budget), max(spread, 1e-12) / np.maximum(budget, 1.0), 0.0)


def solve_knapsack(
    problem: Knapsack,
    *,
    cutoff: float = np.inf,
    gap: float = 0.0,
    watch: Watch | None = None,
) -> KnapsackResult:
    """Solve exactly: dual prices, then HiGHS on the options whose reduced cost can matter.

    An option whose reduced cost at the dual optimum is above the gap between a feasible cost and the dual bound is in
    no better choice, so a program over the others proves the optimum of all.

    Args:
        problem: What to choose from.
        cutoff: Choices that cost this or more are of no interest.
        gap: Relative gap to prove.
        watch: Once its time is up, the best found is returned with its bound; a minute by default.

    Raises:
        SolveCancelledError: If the caller wants the search to stop.
    """
    if not len(problem.cost):
        return KnapsackResult(np.zeros(0, dtype=np.int64), 0.0, 0.0, True)
    watch = watch or Watch()
    if not np.isfinite(problem.cost).any(axis=1).all():
        return KnapsackResult(None, np.inf, np.inf, True)
    minimum = np.where(np.isfinite(problem.cost)[None], problem.use, np.inf).min(axis=2).sum(axis=1)
    if np.any(minimum > problem.budget + SLACK):
        return KnapsackResult(None, np.inf, np.inf, True)
    problem = without_dominated(problem, watch)
    # A bound above the dearest choice there is proves that no choice is feasible.
    dearest = float(np.where(np.isfinite(problem.cost), problem.cost, -np.inf).max(axis=1).sum())
    dearest += 1e-9 * abs(dearest) + 1e-12
    cutoff = min(cutoff, dearest)
    few = len(problem.cost) <= 24 and np.prod(np.isfinite(problem.cost).sum(axis=1, dtype=np.float64)) <= _FEW_CHOICES
    if few:
        return _try_all(problem, cutoff)
    incumbent = _Incumbent(problem, cutoff, watch)

    def evaluate(prices: FloatArray) -> DualPoint:
        point, _, choice = price(problem, prices)
        incumbent.offer(choice)
        return point

    dual = maximise_dual(evaluate, price_scale(problem.cost, problem.budget), cutoff=cutoff, is_over=watch.is_over)
    if dual.best.value >= cutoff:
        found = KnapsackResult(None, np.inf, dual.best.value, True)
    else:
        found = _finish(problem, dual, incumbent, gap, watch)
    return replace(found, bound=np.inf) if found.proved and found.bound >= dearest else found


def _try_all(problem: Knapsack, cutoff: float) -> KnapsackResult:
    """Every choice there is, where they are few."""
    options = [np.flatnonzero(np.isfinite(row)) for row in problem.cost]
    choices = np.stack([axis.ravel() for axis in np.meshgrid(*options, indexing="ij")], axis=1)
    items = np.arange(len(options))
    use = problem.use[:, items[None, :], choices].sum(axis=2)
    fits = np.all(use <= problem.budget[:, None] + SLACK, axis=0)
    cost = np.where(fits, problem.cost[items[None, :], choices].sum(axis=1), np.inf)
    best = int(cost.argmin())
    if not cost[best] < cutoff:
        return KnapsackResult(None, np.inf, float(min(cost[best], cutoff)) if fits.any() else np.inf, True)
    return KnapsackResult(choices[best], float(cost[best]), float(cost[best]), True)


class _Incumbent:
    """The best feasible choice so far."""

    def __init__(self, problem: Knapsack, cutoff: float, watch: Watch) -> None:
        self.problem = problem
        self.watch = watch
        self.choice: IntArray | None = None
        self.cost = cutoff

    def offer(self, choice: IntArray, *, improve: bool = False) -> bool:
        """Take `choice` if it is feasible and better; with `improve`, spend what budget it leaves first.

        Returns:
            Whether it keeps the budgets.
        """
        items = np.arange(len(choice))
        use = self.problem.use[:, items, choice].sum(axis=1)
        if improve and np.any(use > self.problem.budget + SLACK):
            choice = self._repair(choice.copy(), use)
            use = self.problem.use[:, items, choice].sum(axis=1)
        if np.any(use > self.problem.budget + SLACK):
            return False
        if improve:
            choice = self._spend(choice.copy(), use)
        cost = float(self.problem.cost[items, choice].sum())
        if cost < self.cost:
            self.choice, self.cost = choice.copy(), cost
        return True

    def _repair(self, choice: IntArray, use: FloatArray) -> IntArray:
        """Trade cost for what is over budget, at the best rate first, until nothing is over or nothing helps."""
        items = np.arange(len(choice))
        unit = np.where(np.isfinite(self.problem.budget), 1 / np.maximum(self.problem.budget, 1.0), 0.0)
        budget = np.where(np.isfinite(self.problem.budget), self.problem.budget, 0.0)
        for _ in range(min(400, 4 * len(choice))):
            over = float(unit @ np.maximum(0.0, use - budget))
            if over <= 1e-15 or self.watch.is_over():
                break
            more = self.problem.use - self.problem.use[:, items, choice][:, :, None]
            after = (use - budget)[:, None, None] + more
            left = unit[0] * np.maximum(0.0, after[0]) + unit[1] * np.maximum(0.0, after[1])
            paid = np.maximum(self.problem.cost - self.problem.cost[items, choice][:, None], 0.0)
            helps = (left < over) & np.isfinite(self.problem.cost)
            rate = np.where(helps, paid / np.where(helps, over - left, 1.0), np.inf)
            item, option = np.unravel_index(int(rate.argmin()), rate.shape)
            if not np.isfinite(rate[item, option]):
                break
            use = use + more[:, item, option]
            choice[item] = option
        return choice

    def _spend(self, choice: IntArray, use: FloatArray) -> IntArray:
        items = np.arange(len(choice))
        for _ in range(min(200, 2 * len(choice))):
            if self.watch.is_over():
                break
            saved = self.problem.cost[items, choice][:, None] - self.problem.cost
            more = self.problem.use - self.problem.use[:, items, choice][:, :, None]
            fits = np.all(use[:, None, None] + more <= self.problem.budget[:, None, None] + SLACK, axis=0)
            gain = np.where(fits, saved, 0.0)
            item, option = np.unravel_index(int(gain.argmax()), gain.shape)
            if gain[item, option] <= 0:
                break
            use = use + more[:, item, option]
            choice[item] = option
        return choice


def _finish(
    problem: Knapsack,
    dual: Dual,
    incumbent: _Incumbent,
    gap: float,
    watch: Watch,
) -> KnapsackResult:
    best = dual.best
    _, priced, choice = price(problem, best.prices)
    for point in sorted(dual.points, key=lambda p: -p.value)[:4]:
        incumbent.offer(price(problem, point.prices)[2], improve=True)
    items = np.arange(len(choice))
    reduced = priced - priced[items, choice][:, None]
    finite = np.sort(reduced[np.isfinite(reduced)])
    bound = best.value
    margin = max(1e-12 * abs(bound), gap * abs(bound))
    bound, settled = _search_layers(problem, dual, reduced, incumbent, margin, watch)
    if settled:
        return _result(incumbent, bound if gap > 0 else incumbent.cost)
    reach = float(finite[min(len(finite) - 1, 3 * len(choice) + 60)])
    while incumbent.cost - bound > margin:
        reach = min(reach, incumbent.cost - best.value)
        kept = reduced <= reach + 1e-12
        if np.count_nonzero(kept) > MOST_COLUMNS:
            return _result(incumbent, min(bound, incumbent.cost), proved=False)
        result = _core(problem, kept, incumbent, gap, watch)
        whole = bool(kept[np.isfinite(reduced)].all()) or reach >= incumbent.cost - best.value
        if not result.proved:
            return _result(incumbent, max(bound, result.bound) if whole else bound, proved=False)
        # Whatever is outside of the core costs at least the dual bound plus the reach.
        floor = np.inf if whole else best.value + reach
        bound = max(bound, min(result.bound, floor, incumbent.cost))
        if whole:
            break
        reach = 4 * reach if reach < finite[-1] else np.inf
    return _result(incumbent, min(bound, incumbent.cost))


def _search_layers(
    problem: Knapsack,
    dual: Dual,
    reduced: FloatArray,
    incumbent: _Incumbent,
    margin: float,
    watch: Watch,
) -> tuple[float, bool]:
    """Search wider and wider layers; the bound that they prove, and whether that settles the search."""
    best = dual.best
    prices = np.array([best.prices, *[point.prices for point in dual.points if point is not best][-24:]])
    spread = np.array([(a, b) for a in _AROUND for b in _AROUND])
    prices = np.unique(np.vstack([prices, best.prices * spread]), axis=0)
    prices = np.vstack([best.prices, prices])[: max(8, _MOST_PRICED // problem.cost.size)]
    finite = np.sort(reduced[np.isfinite(reduced)])
    # First only the options nearest to the dual optimum: the better the choice they give, the fewer options matter.
    near = float(finite[min(len(finite) - 1, 3 * len(reduced) + 60)])
    bound, held = best.value, _HISTORY_BYTES // (6 * len(reduced))
    for most_states, reach in _WIDTHS:
        cutoff = incumbent.cost - margin
        if cutoff <= bound:
            return bound, True
        if watch.is_over():
            break
        useful = reduced <= min(cutoff - best.value, near if reach else np.inf)
        layers = prepare_layers(problem.cost, problem.use, problem.budget, prices, useful)
        result = search_layers(layers, cutoff, most_states=min(most_states, held), is_over=watch.is_over)
        if result.choice is not None:
            incumbent.offer(result.choice, improve=not result.complete)
        if not reach or near >= cutoff - best.value:
            bound = max(bound, min(result.bound, incumbent.cost))
            if result.complete:
                return bound, True
    return bound, incumbent.cost - bound <= margin


def _result(incumbent: _Incumbent, bound: float, *, proved: bool = True) -> KnapsackResult:
    if incumbent.choice is None:
        return KnapsackResult(None, np.inf, bound if not proved else max(bound, incumbent.cost), proved)
    return KnapsackResult(incumbent.choice, incumbent.cost, bound, proved)


@dataclass(frozen=True, slots=True)
class _CoreResult:
    bound: float
    proved: bool


def _core(
    problem: Knapsack,
    kept: npt.NDArray[np.bool_],
    incumbent: _Incumbent,
    gap: float,
    watch: Watch,
) -> _CoreResult:
    """HiGHS over the kept options; a better choice goes to the incumbent."""
    item, option = np.nonzero(kept & np.isfinite(problem.cost))
    cost = problem.cost[item, option]
    # Items left with one option are constants.
    count = np.bincount(item, minlength=len(kept))
    free = count[item] > 1
    fixed_cost = float(cost[~free].sum())
    fixed_use = problem.use[:, item[~free], option[~free]].sum(axis=1)
    chosen = np.zeros(len(kept), dtype=np.int64)
    chosen[item[~free]] = option[~free]
    item, option, cost = item[free], option[free], cost[free]
    if not len(item):
        incumbent.offer(chosen)
        return _CoreResult(fixed_cost, True)
    _, row = np.unique(item, return_inverse=True)
    columns = np.arange(len(item))
    rows = int(row.max()) + 1
    limited = [b for b in range(2) if np.isfinite(problem.budget[b])]
    parts = [sp.csr_matrix((np.ones(len(item)), (row, columns)), shape=(rows, len(item)))]
    parts += [sp.csr_matrix(problem.use[b, item, option][None, :]) for b in limited]
    left = np.array([problem.budget[b] - fixed_use[b] for b in limited])
    scale = 1.0 / max(float(np.abs(cost).max()), 1e-300)
    start = None
    if incumbent.choice is not None:
        start = (incumbent.choice[item] == option).astype(np.float64)
        if not np.array_equal(np.bincount(row, weights=start), np.ones(rows)):
            start = None
    result = solve_milp(
        cost * scale,
        sp.vstack(parts).tocsr(),
        np.concatenate([np.ones(rows), np.full(len(limited), -np.inf)]),
        np.concatenate([np.ones(rows), left]),
        np.ones(len(item), dtype=bool),
        np.ones(len(item)),
        gap=gap,
        start=start,
        watch=watch,
    )
    fits = True
    if result.values is not None:
        taken = result.values > 0.5
        chosen[item[taken]] = option[taken]
        fits = incumbent.offer(chosen)
    bound = result.bound / scale + fixed_cost if np.isfinite(result.bound) else result.bound
    return _CoreResult(bound, result.proved and fits)
