"""Plans that anybody writes in a minute: candidates of every search, and what a plan is seen beside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from evenkeel.placement.access import BoolArray
from evenkeel.placement.layouts import Layout
from evenkeel.placement.options import table_layouts
from evenkeel.placement.placing import Placed, place
from evenkeel.placement.problem import SLACK, Choice, Problem
from evenkeel.placement.request import Mode, PlanRequest, Watch


def trivial_placements(request: PlanRequest, problem: Problem, watch: Watch) -> dict[str, Placed | None]:
    """Trivial plans by name; `None` where one does not fit, or tables cannot be in it.

    All tables in HBM, in host memory, cached at the same ratio, and those in HBM with most lookups by the byte. All
    tables have the first layout that they allow, or all are cut into as many columns as they can be. Each is there
    whatever time is left, the last one best where some is.
    """
    able = [table_layouts(request, table) for table in request.tables]
    first = tuple((own[0],) for own in able)
    cut = [max(own, key=lambda each: each.pieces).sharding for own in able]
    narrowest = tuple(tuple(each for each in own if each.sharding is way) for own, way in zip(able, cut, strict=True))
    found = [_alike(request, problem, watch, layouts) for layouts in dict.fromkeys((first, narrowest))]
    fitting = {name: [placed for each in found if (placed := each[name]) is not None] for name in found[0]}
    return {name: min(own, key=lambda placed: placed.seconds, default=None) for name, own in fitting.items()}


def _alike(
    request: PlanRequest, problem: Problem, watch: Watch, layouts: tuple[tuple[Layout, ...], ...]
) -> dict[str, Placed | None]:
    """Trivial plans in some layouts of each table: the narrowest that the tables can agree on."""
    number = len(layouts)
    pairs = zip(problem.layout.tolist(), problem.table.tolist(), strict=True)
    able = np.isfinite(problem.seconds) & np.array([layout in layouts[table] for layout, table in pairs])
    ratios = np.unique(problem.ratio[problem.cached])
    kinds = np.where(problem.cached, 2 + np.searchsorted(ratios, problem.ratio), -1)
    # Of the smallest caches some tables may not have any: those must hold the keys of a step.
    common = [n for n in range(len(ratios)) if len(np.unique(problem.table[able & (kinds == 2 + n)])) == number]
    kinds[problem.mode == Mode.HBM_ONLY], kinds[problem.mode == Mode.HOST_ONLY] = 0, 1
    lookups = np.array([table.ids_per_sample for table in request.tables])
    whole = np.where(able & (kinds == 0), lookups[problem.table] / np.maximum(1e-9, problem.hbm), 0.0)
    turn = np.argsort(np.argsort(problem.least(-whole), kind="stable"))

    def alike(kind: int) -> Choice | None:
        return _agreeing(problem, able & (kinds == kind))

    def densest(others: int, count: int) -> Choice | None:
        return _agreeing(problem, able & (kinds == np.where(turn < count, 0, others)[problem.table]))

    # Those that are not in HBM: in host memory, or with caches where fused tables are either in HBM or cached.
    rest = [1, *range(2, 2 + len(ratios), max(1, len(ratios) // 4))]
    in_hbm = alike(0)  # which tables may agree on where they agree on no mixture
    dense: list[Choice | None] = [in_hbm] if in_hbm is not None and problem.fits(in_hbm) else []
    for others in rest:
        if not dense or not watch.is_over():
            dense.append(_largest(problem, number + 1, partial(densest, others)))
    choices = {
        "all in HBM": in_hbm,
        "all in host memory": alike(1),
        "all cached alike": _largest(problem, len(common), lambda n: alike(2 + common[n])),
        "by lookups per byte": min((each for each in dense if each is not None), key=problem.cost, default=None),
    }
    return {
        name: None if choice is None else place(problem, request.topology, choice) for name, choice in choices.items()
    }


def _largest(problem: Problem, number: int, make: Callable[[int], Choice | None]) -> Choice | None:
    """The last of `number` choices, which take more and more HBM, that keeps its budget, if it keeps both."""
    low, high, best = 0, number - 1, None
    while low <= high:
        middle = (low + high) // 2
        choice = make(middle)
        if choice is not None and problem.usage(choice)[0] <= problem.budget[0] + SLACK:
            best, low = choice, middle + 1
        else:
            high = middle - 1
    return best if best is not None and problem.fits(best) else None


def _agreeing(problem: Problem, able: BoolArray) -> Choice | None:
    """The first able option of each table that agrees with the others'; `None` where tables cannot agree.

    A shared cache is as wide as its widest table: of the widths that each can have, the largest least.
    """
    terms, subject = problem.terms, problem.subject
    first = problem.cheapest(np.where(able, -problem.pieces, np.inf))
    least = terms[first][terms[first] >= 0]
    agreed = np.full(len(subject), -1)
    np.maximum.at(agreed, subject[least], least)
    chosen = np.append(agreed[subject], -1)  # the last one is that of no agreement
    agreeing = able & (chosen[terms] == terms).all(axis=1)
    first = problem.cheapest(np.where(agreeing, -problem.pieces, np.inf))
    return first if agreeing[first].all() else None
