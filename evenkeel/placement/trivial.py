"""Plans that anybody writes in a minute: candidates of every search, and what a plan is seen beside."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from evenkeel.placement.layouts import Layout
from evenkeel.placement.limits import Watch
from evenkeel.placement.model import Mode
from evenkeel.placement.options import table_layouts
from evenkeel.placement.placing import Placed, place
from evenkeel.placement.problem import SLACK, Choice, Problem
from evenkeel.placement.request import PlanRequest

_Kind = tuple[Mode, float]
_ALL_HBM: _Kind = (Mode.HBM_ONLY, 1.0)
_ALL_HOST: _Kind = (Mode.HOST_ONLY, 0.0)


def trivial_placements(request: PlanRequest, problem: Problem, watch: Watch) -> dict[str, Placed | None]:
    """Trivial plans by name; `None` where one does not fit, or tables cannot be in it.

    All tables in HBM, in host memory, cached at the same ratio, and those in HBM with most lookups by the byte. All
    tables have the first layout that they allow, or all are cut into as many columns as they can be.
    """
    if not request.tables:
        return {}
    able = [table_layouts(request, table) for table in request.tables]
    first, narrowest = tuple(own[0] for own in able), tuple(max(own, key=lambda each: each.pieces) for own in able)
    found = [_alike(request, problem, watch, layouts) for layouts in dict.fromkeys((first, narrowest))]
    fitting = {name: [placed for each in found if (placed := each[name]) is not None] for name in found[0]}
    return {name: min(own, key=lambda placed: placed.seconds, default=None) for name, own in fitting.items()}


def _alike(
    request: PlanRequest, problem: Problem, watch: Watch, layouts: tuple[Layout, ...]
) -> dict[str, Placed | None]:
    number, first = len(layouts), _Layouts(request, problem, layouts)
    density = first.by_density()
    ratios = sorted({m.ratio for group in problem.groups for m in group.modules if m.mode is Mode.CACHING})

    def densest(count: int, others: _Kind) -> Choice | None:
        kinds = dict.fromkeys(range(number), others) | dict.fromkeys(density[:count], _ALL_HBM)
        return first.choice([kinds[index] for index in range(number)])

    # Those that are not in HBM: in host memory, or with caches where fused tables are either in HBM or cached.
    rest = [_ALL_HOST, *((Mode.CACHING, ratio) for ratio in ratios[:: max(1, len(ratios) // 4)])]
    dense = [_largest(problem, number + 1, lambda n, others=others: densest(n, others), watch) for others in rest]  # type: ignore[misc]
    choices = {
        "all in HBM": first.choice([_ALL_HBM] * number),
        "all in host memory": first.choice([_ALL_HOST] * number),
        "all cached alike": _largest(
            problem, len(ratios), lambda n: first.choice([(Mode.CACHING, ratios[n])] * number), watch
        ),
        "by lookups per byte": min((each for each in dense if each is not None), key=problem.cost, default=None),
    }
    return {
        name: None if choice is None else place(problem, request.topology, choice) for name, choice in choices.items()
    }


def _largest(problem: Problem, number: int, make: Callable[[int], Choice | None], watch: Watch) -> Choice | None:
    """The last of `number` choices, which take more and more HBM, that keeps the budgets."""
    low, high, best = 0, number - 1, None
    while low <= high and not watch.is_over():
        middle = (low + high) // 2
        choice = make(middle)
        if choice is not None and np.all(problem.usage(choice) <= problem.budget + SLACK):
            best, low = choice, middle + 1
        else:
            high = middle - 1
    return best


class _Layouts:
    """The modules of each table in one layout."""

    def __init__(self, request: PlanRequest, problem: Problem, layouts: tuple[Layout, ...]) -> None:
        self.request, self.problem, self.layouts = request, problem, layouts
        self.columns: list[dict[tuple[Layout, Mode, float], list[int]]] = []
        for group in problem.groups:
            self.columns.append({})
            for column, module in enumerate(group.modules):
                self.columns[-1].setdefault((module.layout, module.mode, module.ratio), []).append(column)

    def _able(self, number: int, row: int, kind: _Kind) -> list[int]:
        group = self.problem.groups[number]
        columns = self.columns[number].get((self.layouts[group.tables[row]], *kind), ())
        return [column for column in columns if np.isfinite(group.seconds[row, column])]

    def choice(self, kinds: list[_Kind]) -> Choice | None:
        """Each table in a mode at a ratio; `None` where one cannot be, or tables cannot agree."""
        groups = self.problem.groups
        able = [
            [self._able(number, row, kinds[table]) for row, table in enumerate(group.tables)]
            for number, group in enumerate(groups)
        ]
        if not all(columns for own in able for columns in own):
            return None
        # A shared cache is as wide as its widest table: of the widths that each can have, the largest least.
        agreed: dict[Hashable, Any] = {}
        pairs = list(zip(groups, able, strict=True))
        for group, own in pairs:
            for columns in own:
                for what, least in group.modules[columns[0]].agreements:
                    agreed[what] = max(agreed.get(what, least), least)
        found = []
        for group, own in pairs:
            fitting = [
                [c for c in columns if dict(group.modules[c].agreements).items() <= agreed.items()] for columns in own
            ]
            if not all(fitting):
                return None
            found.append(np.array([columns[0] for columns in fitting], dtype=np.int64))
        return tuple(found)

    def by_density(self) -> list[int]:
        """Tables by lookups for each byte of HBM that they take whole, most first."""
        density = np.zeros(len(self.layouts))
        for number, group in enumerate(self.problem.groups):
            for row, table in enumerate(group.tables):
                for column in self._able(number, row, _ALL_HBM):
                    density[table] = self.request.tables[table].ids_per_sample / max(1e-9, group.hbm[row, column])
        order: list[int] = np.argsort(-density, kind="stable").tolist()
        return order
