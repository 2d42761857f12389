"""Plans that anybody writes in a minute: candidates of every search, and what a plan is seen beside."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evenkeel.placement.layouts import Layout
from evenkeel.placement.limits import Watch
from evenkeel.placement.model import Mode
from evenkeel.placement.options import table_layouts
from evenkeel.placement.placing import Placed, place
from evenkeel.placement.problem import SLACK, Problem
from evenkeel.placement.request import PlanRequest
from evenkeel.placement.search import Choice, cost_of, is_agreed, usage

IntArray = npt.NDArray[np.int64]

ALL_HBM, ALL_HOST, ALL_CACHED, BY_DENSITY = (
    "all in HBM",
    "all in host memory",
    "all cached alike",
    "by lookups per byte",
)
_MOST_HBM = (Mode.HBM_ONLY, 1.0)
_ALL_HOST = (Mode.HOST_ONLY, 0.0)


@dataclass(frozen=True, slots=True)
class Trivial:
    """A trivial plan.

    Attributes:
        name: What it is called.
        placed: Its choice on ranks; `None` where it does not fit, or tables cannot be in it.
    """

    name: str
    placed: Placed | None


def trivial_plans(request: PlanRequest, problem: Problem, watch: Watch) -> tuple[Trivial, ...]:
    """All tables in HBM, in host memory, cached at the same ratio, and those in HBM with most lookups by the byte.

    Each table has the first layout that it allows.
    """
    if not request.tables:
        return ()
    first = _Layouts(request, problem)
    density = _density(request, problem, first)

    def densest(count: int, others: tuple[Mode, float]) -> Choice | None:
        kinds = [others] * len(request.tables)
        for index in density[:count]:
            kinds[index] = _MOST_HBM
        return first.choice(kinds)

    def by_density(others: tuple[Mode, float]) -> Choice | None:
        return _largest(problem, every + 1, lambda number: densest(number, others), watch)

    ratios = first.ratios
    every = len(request.tables)
    # Those that are not in HBM: in host memory, or with caches where fused tables are either in HBM or cached.
    rest = [_ALL_HOST, *((Mode.CACHING, ratio) for ratio in ratios[:: max(1, len(ratios) // 4)])]
    dense = [choice for choice in map(by_density, rest) if choice is not None]
    found = {
        ALL_HBM: first.choice([_MOST_HBM] * every),
        ALL_HOST: first.choice([_ALL_HOST] * every),
        ALL_CACHED: _largest(problem, len(ratios), lambda n: first.choice([(Mode.CACHING, ratios[n])] * every), watch),
        BY_DENSITY: min(dense, key=lambda choice: cost_of(problem, choice), default=None),
    }
    topology = request.topology
    return tuple(
        Trivial(name, None if choice is None else place(problem, topology, choice, watch))
        for name, choice in found.items()
    )


def _largest(problem: Problem, number: int, make: Callable[[int], Choice | None], watch: Watch) -> Choice | None:
    """The last of `number` choices, which take more and more HBM, that keeps the budgets."""
    low, high, best = 0, number - 1, None
    while low <= high and not watch.is_over():
        middle = (low + high) // 2
        choice = make(middle)
        if choice is not None and np.all(usage(problem, choice) <= problem.budget + SLACK):
            best, low = choice, middle + 1
        else:
            high = middle - 1
    return best


class _Layouts:
    """The modules of each table in the first layout that it allows."""

    def __init__(self, request: PlanRequest, problem: Problem) -> None:
        self.problem = problem
        layouts = [table_layouts(request, table)[0] for table in request.tables]
        self.columns: list[dict[tuple[Layout, Mode, float], list[int]]] = []
        ratios: set[float] = set()
        for group in problem.groups:
            columns: dict[tuple[Layout, Mode, float], list[int]] = {}
            for column, module in enumerate(group.modules):
                columns.setdefault((module.layout, module.mode, module.ratio), []).append(column)
            self.columns.append(columns)
            ratios |= {module.ratio for module in group.modules if module.mode is Mode.CACHING}
        self.ratios = sorted(ratios)
        self.layouts = layouts

    def choice(self, kinds: list[tuple[Mode, float]]) -> Choice | None:
        """Each table in a mode at a ratio; `None` where one cannot be, or tables cannot agree."""
        agreed: dict[Hashable, Hashable] = {}
        rows: list[list[list[int]]] = []
        for group, columns in zip(self.problem.groups, self.columns, strict=True):
            mine = []
            for row, table in enumerate(group.tables):
                able = [
                    column
                    for column in columns.get((self.layouts[table], *kinds[table]), ())
                    if np.isfinite(group.seconds[row, column])
                ]
                if not able:
                    return None
                mine.append(able)
                # A shared cache is as wide as its widest table: of the widths that each can have, the largest least.
                for what, least in group.modules[able[0]].agreements:
                    agreed[what] = max(agreed.get(what, least), least)  # type: ignore[call-overload]
            rows.append(mine)
        found = []
        for group, mine in zip(self.problem.groups, rows, strict=True):
            taken = [
                next((c for c in able if all(agreed[w] == a for w, a in group.modules[c].agreements)), -1)
                for able in mine
            ]
            if -1 in taken:
                return None
            found.append(np.array(taken, dtype=np.int64))
        choice = tuple(found)
        return choice if is_agreed(self.problem, choice) else None


def _density(request: PlanRequest, problem: Problem, first: _Layouts) -> list[int]:
    """Tables by lookups for each byte of HBM that they take whole, most first."""
    size = np.full(len(request.tables), np.inf)
    for group, columns in zip(problem.groups, first.columns, strict=True):
        for row, table in enumerate(group.tables):
            for column in columns.get((first.layouts[table], *_MOST_HBM), ()):
                size[table] = max(1e-9, float(group.hbm[row, column]))
    lookups = np.array([table.ids_per_sample for table in request.tables])
    order: list[int] = np.argsort(-lookups / size, kind="stable").tolist()
    return order
