"""From a solution for the average rank to a placement: shards that are not on all ranks get theirs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from evenkeel.placement.annealing import Annealing
from evenkeel.placement.assigning import Places, assign, columns_of_table
from evenkeel.placement.incumbent import Incumbent, Modules, Placed
from evenkeel.placement.layouts import Scope
from evenkeel.placement.limits import Limits, Watch
from evenkeel.placement.patterns import Patterns
from evenkeel.placement.placement_problem import PlacementProblem, Solution
from evenkeel.placement.ranks import loads
from evenkeel.placement.repacking import TOLERABLE, Repacking
from evenkeel.placement.request import PlanRequest
from evenkeel.placement.solver import solve

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_RUNG = 1.0005
_RUNGS = (0, 2, 8, 24, 60, 150, 300, 450)
"""Tighter budgets for the average rank that are tried until the shards fit on whole ranks."""
_PARTS = (1.0, 0.9, 0.7, 0.5, 0.35, 0.25)
"""Parts of a rank's HBM that a shard may take: the smaller they are, the better they fit."""
_ATTEMPTS = 3
_SHARE = 0.4
"""Of the time that is left, for the choice that shards are then put on ranks by."""
_ANNEALED = 0.5
"""Of the time that is left, for local searches from a placement."""
_HALVINGS = 6
_CLOSE = 0.003
"""Relative distance of two thresholds that are not worth another search between them."""
_MOST_COLUMNS, _NODE_COLUMNS = 12_000, 20_000_000
"""Columns of a program over everything at most, and columns times nodes of its search, which end alike anywhere."""
_FEW_COLUMNS = 1_500
"""Up to which such a program is soon solved."""
_LAST = 0.9
"""Of the time that is left, for that program where all else was tried."""
_MOST_SETS = 24
"""Sets of openings that are solved for one by one."""
_ROUNDED_COLUMNS, _ROUNDED_NODES = 4_000, 3_000
"""Of a program over the options in patterns."""
_NEIGHBOURS, _NEIGHBOUR_COLUMNS, _NODES = 10, 2_000, 200
"""Programs over some tables, the others fixed: how many, of how many columns and nodes of a search."""
_ALL_OF_THEM = 20
"""Times as many nodes where all tables are free."""
_SOME, _FEW = 12, 3
"""Options of a table that they choose from, where some tables are free and where all are."""
_ROUGH = 1e-4


def solve_and_place(
    request: PlanRequest, problem: PlacementProblem, limits: Limits, over: float = math.inf
) -> tuple[Placed | None, Solution]:
    """Solve, then find ranks for shards that are not on all of them, and options that suit both.

    `over` is the time of a placement that is known: where none can be faster, none is looked for.

    Returns:
        The placement, `None` where none was found, and the solution whose bound no placement is below.
    """
    watch = Watch(limits)
    search = _Search(request, problem, watch)
    first = solve(problem, limits.within(_SHARE * watch.left()) if search.movable else limits)
    if first.modules is None or first.bound >= over:
        return None, first
    search.prices = first.prices
    search.place(first.modules)
    if not search.movable:
        return search.best, first
    solution = search.run(replace(first, bound=max(first.bound, search.least_shard())), limits)
    return search.best, replace(solution, proved=solution.proved or search.has(search.enough(solution)))


def rate(request: PlanRequest, problem: PlacementProblem, modules: Modules, places: Places) -> Placed:
    """What a choice of modules and places comes to, whether it keeps the budgets or not."""
    return Incumbent(request, problem, Watch()).judge(modules, places)


class _Search(Repacking):
    """The steps of the search, each from the best placement so far."""

    def __init__(self, request: PlanRequest, problem: PlacementProblem, watch: Watch) -> None:
        super().__init__(request, problem, watch)
        self.patterns = Patterns.of(problem, self.whole, self.machines) if self.movable else None
        self.solved: set[int] = set()
        self.proved = False

    def enough(self, solution: Solution) -> float:
        """The time at which a plan is as good as is asked for."""
        return solution.bound * (1 + self.request.solver.gap)

    def run(self, first: Solution, limits: Limits) -> Solution:
        """All steps in turn, until the best placement is near the bound; the solution of the average rank with it."""
        steps: list[Callable[[float], float | None]] = [
            lambda enough: self.rungs(enough, limits, _PARTS[:1]),
            lambda _: self.thresholds(first.bound, limits),
            lambda enough: self.openings(enough, limits),
            self._small_program,
            lambda enough: self.rungs(enough, limits, _PARTS[:1]),
            self.prove,
            self.anneal,
            lambda enough: self.rungs(enough, limits, _PARTS[1:]),
            self.repack,
            self.prove,
        ]
        for step in steps:
            if self.has(self.enough(first)) or (self.proved and self.best is None):
                break
            first = replace(first, bound=max(first.bound, step(self.enough(first)) or 0.0))
        if not self.has(self.enough(first)) and not self.proved and self.columns() <= _MOST_COLUMNS:
            first = replace(first, bound=max(first.bound, self.program(_LAST)))
        if self.best is None:
            # Each shard fits on average: only a program over everything can tell that no placement does.
            return Solution(None, np.inf, np.inf if self.proved else first.bound, self.proved, first.prices)
        self.neighbours(self.enough(first))
        return first

    def thresholds(self, bound: float, limits: Limits) -> float:
        """The least time that a plan could take, by its heaviest shard: a bound.

        Among plans whose shards all take at most `t`, none is faster than the average rank of the best of them; that
        falls with `t`. No plan is faster than the `t` where both meet.
        """
        low, high = bound, self.best.seconds if self.best is not None else np.inf
        threshold, quick = bound * (1 + self.request.solver.gap), limits.at_most(_CLOSE / 10)
        for _ in range(_HALVINGS):
            if self.watch.is_over():
                break
            found = solve(self.below(threshold), quick.within(_SHARE / 2 * self.watch.left()))
            if found.modules is not None:
                self.place(found.modules)
            if found.bound <= threshold:
                high = threshold
            else:
                low = threshold
                high = min(high, found.bound)
            high = min(high, self.best.seconds if self.best is not None else np.inf)
            if high <= low * (1 + _CLOSE) or abs(found.bound / threshold - 1) <= _CLOSE:
                break
            threshold = math.sqrt(low * high) if np.isfinite(high) else 2 * low
        self.threshold = high
        return low

    def anneal(self, enough: float) -> None:
        """Local searches from the best placement, or a choice that did not fit; kinds of modules are closed in turn."""
        if self.watch.is_over():
            return
        annealing, watch = Annealing(self), self.watch.part(_ANNEALED)
        closed, tried = frozenset[int](), set[frozenset[int]]()
        for seed in range(annealing.runs):
            if self.has(enough) or watch.is_over():
                return
            best = self.best
            modules, places = (self.unplaced[0], {}) if best is None else (best.modules, best.places)
            ways = [closed, *(closed | {kind} for kind in annealing.kinds_in(modules))]
            barred = next((way for way in ways if way not in tried), closed)
            tried.add(barred)
            found = annealing.run(modules, places, enough if best is None else best.seconds, seed, barred, watch)
            if found is None:
                continue
            if not self.offer(*found):
                self.nearly.append(self.judge(*found))
            elif self.best is not best:
                closed = barred

    def rungs(self, enough: float, limits: Limits, parts: tuple[float, ...]) -> None:
        """Solves with smaller and smaller shards, under tighter and tighter budgets for the average rank."""
        over, common = self.threshold * (1 + _CLOSE), self.common
        for part in parts:
            problem = self.below(common + part * (over - common), part)
            for attempt in _RUNGS:
                if self.has(enough * (1 + (TOLERABLE if attempt >= _ATTEMPTS else 0))) or self.watch.is_over():
                    return
                tighter = problem.with_budget(*(_rung(float(budget), attempt) for budget in problem.budget))
                solution = solve(tighter, limits.within(_SHARE * self.watch.left()))
                if solution.modules is None or self.has(solution.bound):
                    break
                self.prices = solution.prices
                unplaced = len(self.unplaced)
                self.place(solution.modules)
                if len(self.unplaced) == unplaced:
                    break

    def openings(self, enough: float, limits: Limits) -> float:
        """Solves with one set of openings after the other, the most promising first; the bound that this proves."""
        if self.patterns is None:
            return 0.0
        self.patterns.raise_at(self.prices)
        watch, quick = self.watch.part(_SHARE), limits.at_most(_CLOSE / 10)
        for _ in range(_MOST_SETS):
            best = np.inf if self.best is None else self.best.seconds
            left = [number for number in self.patterns.faster(best * (1 - _CLOSE)) if number not in self.solved]
            if not left or self.has(enough) or watch.is_over():
                break
            self.solved.add(left[0])
            self._solve_set(self.patterns, left[0], quick, watch.part(_SHARE))
        self.proved = self.best is None and not np.isfinite(self.patterns.bound)
        return min(self.patterns.bound, np.inf if self.best is None else self.best.seconds)

    def _solve_set(self, patterns: Patterns, number: int, limits: Limits, watch: Watch) -> None:
        """The best choice with one set of openings whose shards take less than some time, which is then narrowed."""
        closed, fixed = patterns.closed(number), float(patterns.fixed[number])
        over = np.inf if self.best is None else self.best.seconds
        ask, modules = over, None
        for _ in range(_HALVINGS):
            dropped = [mask | (whole[0] > ask - fixed) for mask, whole in zip(closed, self.whole, strict=True)]
            found = solve(self.problem.without(dropped), limits.within(_SHARE * watch.left()))
            patterns.raise_to(number, min(found.bound, ask))
            patterns.raise_at(found.prices)
            if found.modules is not None:
                modules = found.modules
                self.place(modules)
            if found.bound <= ask:
                over = min(over, ask, np.inf if self.best is None else self.best.seconds)
            least = float(patterns.least[number])
            if over <= least * (1 + _CLOSE) or watch.is_over():
                break
            ask = math.sqrt(least * over) if np.isfinite(over) else 2 * least
        if modules is not None and not self.has(float(patterns.least[number]) * (1 + _CLOSE)):
            self._repack(modules, None, float(patterns.least[number]), watch)

    def prove(self, enough: float) -> float:
        """A bound from what each rank can hold; or, where no placement was found, whether that proves that none is."""
        del enough
        if self.patterns is None:
            return 0.0
        if self.best is None:
            self.proved = self.patterns.cannot_fit(self.watch.part(_SHARE))
            return 0.0
        self.patterns.prove(self.best.seconds, self.watch.part(_SHARE))
        self._round(self.patterns.hopeful())
        return min(self.patterns.bound, self.best.seconds)

    def _round(self, hopeful: list[BoolArray]) -> None:
        """A program over the options in patterns that together hold all tables, and those of the best placement."""
        assert self.best is not None, "a start"
        best = self.best
        for mask, mine in zip(hopeful, best.modules, strict=True):
            mask[np.arange(len(mine)), mine] = True
        problem = self.below(best.seconds)
        sizes = (
            columns_of_table(group, own, self.machines)
            for group, mask in zip(problem.groups, hopeful, strict=True)
            for own in mask
        )
        if sum(mask.sum() for mask in hopeful) == problem.num_tables or sum(sizes) > _ROUNDED_COLUMNS:
            return
        found = assign(
            problem,
            self.whole,
            hopeful,
            self.machines,
            start=(best.modules, best.places),
            gap=_CLOSE / 10,
            nodes=_ROUNDED_NODES,
            watch=self.watch.part(_SHARE),
        )
        if found.modules is not None:
            self.offer(found.modules, found.places)

    def columns(self) -> int:
        """Columns of a program over everything that may be in a better plan."""
        groups = self.below(np.inf if self.best is None else self.best.seconds).groups
        masks = ((group, mine) for group in groups for mine in np.isfinite(group.time))
        return sum(columns_of_table(group, mine, self.machines) for group, mine in masks)

    def _small_program(self, enough: float) -> float:
        """A program over everything, where it is soon solved."""
        del enough
        return self.program(_SHARE) if self.columns() <= _FEW_COLUMNS else 0.0

    def program(self, share: float) -> float:
        """A program over everything: the bound that it proves."""
        over = self.best.seconds if self.best is not None else np.inf
        problem = self.below(over)
        found = assign(
            problem,
            self.whole,
            [np.isfinite(group.time) for group in problem.groups],
            self.machines,
            start=None if self.best is None else (self.best.modules, self.best.places),
            gap=self.request.solver.gap,
            nodes=_NODE_COLUMNS // max(1, self.columns()),
            watch=self.watch.part(share),
        )
        # What HiGHS calls a plan may be a little over a budget, and then it has proved nothing.
        kept = found.modules is None or self.offer(found.modules, found.places)
        self.proved = found.proved and kept
        return min(found.bound, over)

    def neighbours(self, enough: float) -> None:
        """Programs over some tables at a time."""
        for seed in range(_NEIGHBOURS):
            if self.best is None or self.has(enough) or self.watch.is_over():
                break
            self._neighbour(seed)

    def _neighbour(self, seed: int) -> None:
        """Chooses again for some tables: all of them in the first turn, if few options of each are few enough."""
        assert self.best is not None, "a neighbour of something"
        best, groups = self.best, self.problem.groups
        rows = [(number, row) for number, group in enumerate(groups) for row in range(len(group.tables))]
        most = _SOME if seed else max(_FEW, _NEIGHBOUR_COLUMNS // (len(rows) * self.machines.ranks))
        kept = [self._some(number, best.modules, most) for number in range(len(groups))]
        free, columns = list[int](), 0
        for number, row in self._drawn(seed, rows) if seed else rows:
            size = columns_of_table(groups[number], kept[number][row], self.machines)
            if columns + size <= _NEIGHBOUR_COLUMNS * (1 if seed else 2):
                columns += size
                free.append(groups[number].tables[row])
        if not free or (not seed and len(free) < len(rows)):
            return
        found = assign(
            self.problem,
            self.whole,
            kept,
            self.machines,
            start=(best.modules, best.places),
            fixed=frozenset(groups[number].tables[row] for number, row in rows) - frozenset(free),
            gap=_ROUGH,
            nodes=_NODES if seed else _NODES * _ALL_OF_THEM,
            watch=self.watch.part(_SHARE),
        )
        if found.modules is not None:
            self.offer(found.modules, found.places)

    def _drawn(self, seed: int, rows: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Tables by chance, those of the slowest and the fastest rank, or of two ranks by chance, first."""
        assert self.best is not None, "ranks of something"
        best, local, groups = self.best, self.machines.local_ranks, self.problem.groups
        now = loads(self.pieces(best.modules), self.where(best), self.machines)
        order = np.argsort(now.seconds, kind="stable")
        draw = np.random.default_rng(seed)
        first = [int(order[-1]), int(order[0])] if seed % 2 else []
        ranks = set([*first, *draw.permutation(self.machines.ranks).tolist()][: 2 + seed % 2])
        near, others = list[tuple[int, int]](), list[tuple[int, int]]()
        for number, row in (rows[index] for index in draw.permutation(len(rows))):
            wide = groups[number].modules[int(best.modules[number][row])].layout.scope is Scope.HOST
            places = best.places.get(groups[number].tables[row], ())
            there = any((rank // local if wide else rank) in places for rank in ranks)
            (near if there else others).append((number, row))
        return near + others

    def _some(self, number: int, modules: Modules, most: int) -> BoolArray:
        """(tables, modules) the options of each table that cost least at the prices of memory, and what it has now."""
        group = self.problem.groups[number]
        fixed = np.array([module.fixed for module in group.modules])
        opening_of = group.openings()[0]
        opened = np.isin(opening_of, opening_of[modules[number]])
        # Time counts that of a whole shard a little: of two that cost the same the one that is spread evenly is easier.
        value = group.priced(self.prices) + 1e-3 * self.whole[number][0] + np.where(opened, 0.0, fixed)
        kept = np.zeros(group.time.shape, dtype=bool)
        order = np.argsort(value, axis=1, kind="stable")[:, :most]
        np.put_along_axis(kept, order, np.take_along_axis(np.isfinite(value), order, axis=1), axis=1)
        kept[np.arange(len(kept)), modules[number]] = True
        return kept


def _rung(budget: float, steps: int) -> float:
    """A somewhat smaller budget, on a ladder that all budgets share: what a smaller one finds, a larger one finds."""
    if not np.isfinite(budget) or budget <= 0:
        return budget
    return float(_RUNG ** (math.floor(math.log(budget) / math.log(_RUNG)) - steps))
