"""What other budgets would buy: time against HBM and host memory, the next gigabyte, and who would use it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from evenkeel.placement.building import budgets
from evenkeel.placement.cases import Case, cases, fastest
from evenkeel.placement.incumbent import heaviest_use
from evenkeel.placement.invalid_input import require
from evenkeel.placement.limits import Limits, Watch
from evenkeel.placement.options import ratio_grid
from evenkeel.placement.plan import Plan
from evenkeel.placement.planner import plan
from evenkeel.placement.request import PlanRequest, with_time
from evenkeel.placement.shortage import smallest_hbm_bytes, smallest_host_bytes
from evenkeel.placement.solver import solve, usage

MAX_POINTS = 256
_SHARE = 0.4
"""Of the time that is left, for the plan of today."""
_CURVE_GAP = 1e-3
_CURVE_STEPS = 30
_GIB_UNITS = 1024.0
_LARGEST = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """The best that one size of a memory allows.

    Attributes:
        hbm_bytes: HBM of a rank, reservations included.
        host_bytes: Memory of a host, reservations included; `None` is unlimited.
        seconds: Time of a step; `None` where nothing fits.
        bound_seconds: No plan on the ratios of the curve, fewer than those of a plan, is faster.
    """

    hbm_bytes: int
    host_bytes: int | None
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
        host_curve: Time against the memory of a host, likewise; empty unless it was asked for.
        next_hbm_gib_saves_seconds: Time that one more GiB of HBM on every rank saves, by planning again.
        next_host_gib_saves_seconds: Time that one more GiB of memory on every host saves, by planning again.
        tables: The tables to which more HBM is worth most, best first.
    """

    plan: Plan
    curve: tuple[CurvePoint, ...]
    host_curve: tuple[CurvePoint, ...]
    next_hbm_gib_saves_seconds: float | None
    next_host_gib_saves_seconds: float | None
    tables: tuple[TableValue, ...]


def what_if(
    request: PlanRequest,
    *,
    points: int = 25,
    hbm_bytes: tuple[int, ...] = (),
    host_points: int = 0,
    should_stop: Callable[[], bool] | None = None,
) -> WhatIf:
    """Plan under other budgets.

    Args:
        request: The request at the budgets of today.
        points: Number of HBM sizes between the smallest that works and the largest that is of use.
        hbm_bytes: HBM sizes to plan for instead.
        host_points: Number of sizes of a host's memory, between the same two ends.
        should_stop: See `evenkeel.placement.planner.plan`.

    Raises:
        InvalidInputError: If a number of points or an HBM size makes no sense, or as for `plan`.
        SolveCancelledError: If `should_stop` answered true.
    """
    for name, number in (("points", points), ("host_points", host_points)):
        require(0 <= number <= MAX_POINTS, name, number, "is out of range", f"give 0 to {MAX_POINTS}")
    require(len(hbm_bytes) <= MAX_POINTS, "hbm_bytes", len(hbm_bytes), "is too many sizes", f"at most {MAX_POINTS}")
    for index, size in enumerate(hbm_bytes):
        require(0 <= size <= 2**53, f"hbm_bytes[{index}]", size, "is no HBM size", "give a number of bytes")
    watch = Watch(Limits(time_limit_s=request.solver.time_limit_s, should_stop=should_stop))
    base = plan(with_time(request, _SHARE * watch.left()), split=False, should_stop=should_stop)
    # A curve needs no fine grid, but the ratios of the plan itself, so that it passes through it.
    own = [p.ratio for p in base.placements if 0 < p.ratio < 1]
    steps = min(_CURVE_STEPS, request.solver.ratio_steps or _CURVE_STEPS)
    roomy = replace(request, topology=replace(request.topology, hbm_bytes=_LARGEST, host_bytes=None))
    grid = np.unique(np.concatenate([ratio_grid(len(request.tables), steps), own]))
    # Shards that no rank holds today may be held by larger ones.
    budget = budgets(request)
    asked_at = roomy if request.topology.hbm_bytes else request
    coarse = [case.given(lambda problem: problem.with_budget(*map(float, budget))) for case in cases(asked_at, grid)]
    limits = Limits(gap=max(_CURVE_GAP, request.solver.gap), exact_tables=0, should_stop=should_stop)
    saves: list[float | None] = [None, None]
    if base.seconds is not None:
        for resource in (0, 1):
            saves[resource] = _next(request, resource, base.seconds, limits.within(_SHARE / 2 * watch.left()))
    moment = limits.within(_SHARE / 2 * watch.left())
    now = (request.topology.hbm_bytes, request.topology.host_bytes)
    asked = [(size, now[1]) for size in sorted(set(hbm_bytes or _hbm_sizes(request, coarse, moment, points)))]
    on_hbm = len(asked)
    asked += [(now[0], size) for size in _host_sizes(request, coarse, moment, host_points)]
    found = [
        _point(request, coarse, *sizes, limits.within(watch.left() / (len(asked) - number)))
        for number, sizes in enumerate(asked)
    ]
    values = [TableValue(table=p.table, seconds_per_gib=p.seconds_per_gib) for p in base.placements]
    values.sort(key=lambda value: -value.seconds_per_gib)
    return WhatIf(
        plan=base,
        curve=_monotone(found[:on_hbm]),
        host_curve=_monotone(found[on_hbm:]),
        next_hbm_gib_saves_seconds=saves[0],
        next_host_gib_saves_seconds=saves[1],
        tables=tuple(value for value in values if value.seconds_per_gib > 0),
    )


def _hbm_sizes(request: PlanRequest, cases: Sequence[Case], limits: Limits, points: int) -> tuple[int, ...]:
    """HBM sizes between the least that works and the most that tables can take, more of them where they are small."""
    if not request.tables or not points or request.topology.hbm_bytes == 0:
        return (request.topology.hbm_bytes,) if points else ()
    found = fastest([case.given(lambda problem: problem.minimising(0)) for case in cases], limits)
    if found.modules is None:
        return ()
    least = found.cost
    groups = [[np.where(np.isfinite(g.time), g.hbm, 0.0) for g in case.problem.groups] for case in cases]
    most = max(sum(float(hbm.max(axis=1).sum()) for hbm in own) for own in groups)
    heaviest = max(heaviest_use(request, case.problem, 0) for case in cases)
    units = np.geomspace(max(least, 1.0), max(most, heaviest, least, 1.0), points)
    return tuple(smallest_hbm_bytes(request, math.ceil(unit)) for unit in units)


def _host_sizes(request: PlanRequest, cases: Sequence[Case], limits: Limits, points: int) -> tuple[int, ...]:
    """Sizes of a host's memory between the least that works and what the best plan without a limit takes."""
    if not request.tables or not points:
        return ()
    least, most = np.inf, 0.0
    for problem in (case.problem for case in cases):
        fewest = solve(problem.minimising(1), limits)
        best = solve(problem.with_budget(float(problem.budget[0]), np.inf), limits)
        if fewest.modules is not None and best.modules is not None:
            least, most = min(least, fewest.cost), max(most, float(usage(problem, best.modules)[1]))
    if not np.isfinite(least):
        return ()
    units = np.linspace(least, max(most, least), points)
    return tuple(sorted({smallest_host_bytes(request, math.ceil(unit)) for unit in units}))


def _point(
    request: PlanRequest, cases: Sequence[Case], hbm_bytes: int, host_bytes: int | None, limits: Limits
) -> CurvePoint:
    topology = replace(request.topology, hbm_bytes=hbm_bytes, host_bytes=host_bytes)
    budget = budgets(replace(request, topology=topology))
    found = fastest([case.given(lambda problem: problem.with_budget(*map(float, budget))) for case in cases], limits)
    if found.modules is None:
        return CurvePoint(hbm_bytes=hbm_bytes, host_bytes=host_bytes, seconds=None, bound_seconds=None)
    return CurvePoint(hbm_bytes=hbm_bytes, host_bytes=host_bytes, seconds=found.cost, bound_seconds=found.bound)


def _monotone(curve: list[CurvePoint]) -> tuple[CurvePoint, ...]:
    """A larger budget allows every plan of a smaller one: a point found slower takes the plan before it."""
    result: list[CurvePoint] = []
    for point in curve:
        last = result[-1].seconds if result else None
        worse = last is not None and (point.seconds is None or point.seconds > last)
        result.append(replace(point, seconds=last, bound_seconds=point.bound_seconds) if worse else point)
    return tuple(result)


def _next(request: PlanRequest, resource: int, seconds: float, limits: Limits) -> float | None:
    budget = budgets(request)
    if not np.isfinite(budget[resource]):
        return None
    topology, more = request.topology, float(budget[resource] + _GIB_UNITS)
    if resource:
        topology = replace(topology, host_bytes=smallest_host_bytes(request, more))
    elif topology.hbm_bytes:
        topology = replace(topology, hbm_bytes=smallest_hbm_bytes(request, more))
    found = fastest(cases(replace(request, topology=topology)), replace(limits, gap=1e-4, exact_tables=50))
    return max(0.0, seconds - found.cost) if found.modules is not None else 0.0
