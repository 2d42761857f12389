"""What other budgets would buy: time against HBM, the next gigabyte, and the tables that would use it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from evenkeel.placement.invalid_input import require
from evenkeel.placement.limits import Limits, Watch
from evenkeel.placement.options import build_problem, ratio_grid
from evenkeel.placement.placement_problem import UNIT, PlacementProblem
from evenkeel.placement.plan import Plan
from evenkeel.placement.planner import plan
from evenkeel.placement.request import PlanRequest, with_time
from evenkeel.placement.shortage import smallest_hbm_bytes
from evenkeel.placement.solver import solve

MAX_POINTS = 256
_SHARE = 0.4
"""Of the time that is left, for the plan of today."""
_CURVE_GAP = 1e-3
_CURVE_STEPS = 30
_GIB_UNITS = 1024.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """The best that one HBM size allows.

    Attributes:
        hbm_bytes: HBM of a rank, reservations included.
        seconds: Time of a step; `None` where nothing fits.
        bound_seconds: No plan is faster.
    """

    hbm_bytes: int
    seconds: float | None
    bound_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableValue:
    """What more HBM is worth to one table.

    Attributes:
        table: Name of the table.
        seconds_per_gib: Time of a step that its best use of more HBM saves, per GiB.
    """

    table: str
    seconds_per_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The plan, and what other budgets would change.

    Attributes:
        plan: The plan under the budgets as given; its budgets carry the shadow prices.
        curve: Time against HBM, in ascending order of HBM.
        next_hbm_gib_saves_seconds: Time that one more GiB of HBM on every rank saves, by planning again.
        next_host_gib_saves_seconds: Time that one more GiB of memory on every host saves, by planning again.
        tables: The tables to which more HBM is worth most, best first.
    """

    plan: Plan
    curve: tuple[CurvePoint, ...]
    next_hbm_gib_saves_seconds: float | None
    next_host_gib_saves_seconds: float | None
    tables: tuple[TableValue, ...]


def what_if(
    request: PlanRequest,
    *,
    points: int = 25,
    hbm_bytes: tuple[int, ...] = (),
    should_stop: Callable[[], bool] | None = None,
) -> WhatIf:
    """Plan under other budgets.

    Args:
        request: The request at the budgets of today.
        points: Number of HBM sizes between the smallest that works and the largest that is of use.
        hbm_bytes: HBM sizes to plan for instead.
        should_stop: See `evenkeel.placement.planner.plan`.

    Raises:
        InvalidInputError: If a number of points or an HBM size makes no sense, or as for `plan`.
        SolveCancelledError: If `should_stop` answered true.
    """
    require(0 <= points <= MAX_POINTS, "points", points, "is out of range", f"give 0 to {MAX_POINTS}")
    require(len(hbm_bytes) <= MAX_POINTS, "hbm_bytes", len(hbm_bytes), "is too many sizes", f"at most {MAX_POINTS}")
    for index, size in enumerate(hbm_bytes):
        require(0 <= size <= 2**53, f"hbm_bytes[{index}]", size, "is no HBM size", "give a number of bytes")
    watch = Watch(Limits(time_limit_s=request.solver.time_limit_s, should_stop=should_stop))
    base = plan(with_time(request, _SHARE * watch.left()), split=False, should_stop=should_stop)
    problem = build_problem(request)
    # A curve needs no fine grid, but the ratios of the plan itself, so that it passes through it.
    own = [p.ratio for p in base.placements if 0 < p.ratio < 1]
    steps = min(_CURVE_STEPS, request.solver.ratio_steps or _CURVE_STEPS)
    coarse = build_problem(request, np.unique(np.concatenate([ratio_grid(len(request.tables), steps), own])))
    limits = Limits(gap=max(_CURVE_GAP, request.solver.gap), exact_tables=0, should_stop=should_stop)
    saves: list[float | None] = [None, None]
    if base.seconds is not None:
        for resource in (0, 1):
            saves[resource] = _next(problem, resource, base.seconds, limits.within(_SHARE / 2 * watch.left()))
    sizes = sorted(set(hbm_bytes or _sizes(request, coarse, limits.within(_SHARE / 2 * watch.left()), points)))
    curve = tuple(
        _point(request, coarse, size, limits.within(watch.left() / (len(sizes) - number)))
        for number, size in enumerate(sizes)
    )
    values = [TableValue(table=p.table, seconds_per_gib=p.seconds_per_gib) for p in base.placements]
    values.sort(key=lambda value: -value.seconds_per_gib)
    return WhatIf(
        plan=base,
        curve=_monotone(curve),
        next_hbm_gib_saves_seconds=saves[0],
        next_host_gib_saves_seconds=saves[1],
        tables=tuple(value for value in values if value.seconds_per_gib > 0),
    )


def _sizes(request: PlanRequest, problem: PlacementProblem, limits: Limits, points: int) -> tuple[int, ...]:
    if not request.tables or not points or request.topology.hbm_bytes == 0:
        return (request.topology.hbm_bytes,) if points else ()
    least = solve(problem.minimising(0), limits)
    if least.modules is None:
        return ()
    most = sum(float(np.where(np.isfinite(g.time), g.hbm, 0.0).max(axis=1).sum()) for g in problem.groups)
    units = np.geomspace(max(least.cost, 1.0), max(most, least.cost, 1.0), points)
    return tuple(smallest_hbm_bytes(request, math.ceil(unit)) for unit in units)


def _point(request: PlanRequest, problem: PlacementProblem, size: int, limits: Limits) -> CurvePoint:
    topology = replace(request.topology, hbm_bytes=size)
    workspace = request.profile.costs(request.runtime).workspace_bytes if request.tables else 0
    budget = max(0.0, (topology.hbm_budget - workspace) / UNIT)
    solution = solve(problem.with_budget(budget, float(problem.budget[1])), limits)
    if solution.modules is None:
        return CurvePoint(hbm_bytes=size, seconds=None, bound_seconds=None)
    return CurvePoint(hbm_bytes=size, seconds=solution.cost, bound_seconds=solution.bound)


def _monotone(curve: tuple[CurvePoint, ...]) -> tuple[CurvePoint, ...]:
    """A larger budget allows every plan of a smaller one: a point found slower takes the plan before it."""
    result: list[CurvePoint] = []
    for point in curve:
        last = result[-1].seconds if result else None
        worse = last is not None and (point.seconds is None or point.seconds > last)
        result.append(replace(point, seconds=last, bound_seconds=point.bound_seconds) if worse else point)
    return tuple(result)


def _next(problem: PlacementProblem, resource: int, seconds: float, limits: Limits) -> float | None:
    if not np.isfinite(problem.budget[resource]):
        return None
    budget = problem.budget.copy()
    budget[resource] += _GIB_UNITS
    solution = solve(
        problem.with_budget(float(budget[0]), float(budget[1])), replace(limits, gap=1e-4, exact_tables=50)
    )
    return max(0.0, seconds - solution.cost) if solution.modules is not None else 0.0
