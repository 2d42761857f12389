"""What other budgets would buy: time against HBM and host memory, the next gigabyte, and who would use it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from evenkeel.placement.fields import Length, Range, TimeIsUpError, require
from evenkeel.placement.hardware import MAX_BYTES
from evenkeel.placement.options import ratio_grid
from evenkeel.placement.placing import solve_and_place
from evenkeel.placement.plan import Plan
from evenkeel.placement.planner import fastest, plan_in_time
from evenkeel.placement.problem import Problem, budgets, build_problem
from evenkeel.placement.request import PlanRequest, Watch
from evenkeel.placement.shortage import smallest_bytes, with_memory

MAX_POINTS = 256
_SHARE = 0.4
"""Of the time that is left once the tables are priced, for the plan of today."""
_CURVE_GAP = 1e-3
_CURVE_STEPS = 30
_GIB_UNITS = 1024.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """The best that one size of a memory allows.

    Attributes:
        hbm_bytes: HBM of a rank, reservations included.
        host_bytes: Memory of a host, reservations included; `None` is unlimited.
        seconds: Kernel time of the fastest plan; `None` where nothing fits.
        bound_seconds: No plan on the ratios of the curve, fewer than those of a plan, has faster kernels.
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
        next_hbm_gib_saves_seconds: Kernel time that one more GiB of HBM on every rank saves, by planning again.
        next_host_gib_saves_seconds: Kernel time that one more GiB of memory on every host saves, by planning again.
        tables: The tables to which more HBM is worth most, best first.
        notice: What the time limit left out; empty where that is nothing.
    """

    plan: Plan
    curve: tuple[CurvePoint, ...]
    host_curve: tuple[CurvePoint, ...]
    next_hbm_gib_saves_seconds: float | None
    next_host_gib_saves_seconds: float | None
    tables: tuple[TableValue, ...]
    notice: str = ""


def what_if(
    request: PlanRequest,
    *,
    points: int | None = None,
    hbm_bytes: tuple[int, ...] = (),
    host_points: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> WhatIf:
    """Plan under other budgets. Sizes whose turn does not come within the time limit are left out of the curves.

    Args:
        request: The request at the budgets of today.
        points: Number of HBM sizes between the smallest that works and the largest that is of use, by default 25.
        hbm_bytes: HBM sizes to plan for instead.
        host_points: Number of sizes of a host's memory, between the same two ends.
        clock: Seconds, for the time limit.

    Raises:
        InvalidInputError: If a number of points or an HBM size makes no sense, or as for `plan`.
    """
    require(not (points and hbm_bytes), "points", points, "is not for sizes that are given", "give one of the two")
    points = 25 if points is None else points
    for name, number in (("points", points), ("host_points", host_points)):
        Range(0, MAX_POINTS).check(number, name)
    Length(0, MAX_POINTS).check(hbm_bytes, "hbm_bytes")
    for index, size in enumerate(hbm_bytes):
        Range(0, MAX_BYTES).check(size, f"hbm_bytes[{index}]")
    watch = Watch(request.solver.time_limit_s, clock=clock)
    base = plan_in_time(request, watch, _SHARE)
    saves: list[float | None] = [None, None]
    curves: dict[int, list[CurvePoint]] = {0: [], 1: []}
    with contextlib.suppress(TimeIsUpError):
        # A curve needs no fine grid, but the ratios of the plan itself, so that it passes through it.
        ratios = [p.ratio for p in base.placements if 0 < p.ratio < 1]
        steps = min(_CURVE_STEPS, request.solver.ratio_steps or _CURVE_STEPS)
        grid = np.unique(np.concatenate([ratio_grid(len(request.tables), steps), ratios]))
        problem = build_problem(request, grid, watch=watch)
        if base.seconds is not None:
            for resource in range(2):
                saves[resource] = _next(request, resource, base.seconds, watch.part(0.2))
        on_hbm = sorted(set(hbm_bytes)) or _sizes(request, problem, 0, points, watch.part(0.1))
        sizes = [(0, size) for size in on_hbm]
        sizes += [(1, size) for size in _sizes(request, problem, 1, host_points, watch.part(0.1))]
        for done, number in enumerate(_evenly(len(sizes))):
            if watch.is_over():
                break
            resource, size = sizes[number]
            part = watch.part(2 / (1 + len(sizes) - done))
            curves[resource].append(_point(request, problem, resource, size, part))
    wanted, found = (len(set(hbm_bytes)) or points) + host_points, len(curves[0]) + len(curves[1])
    late = f"time was over when {found} of {wanted} sizes were planned for: raise solver.time_limit_s or ask fewer"
    values = [TableValue(table=p.table, seconds_per_gib=p.seconds_per_gib) for p in base.placements]
    return WhatIf(
        plan=base,
        curve=_monotone(curves[0]),
        host_curve=_monotone(curves[1]),
        next_hbm_gib_saves_seconds=saves[0],
        next_host_gib_saves_seconds=saves[1],
        tables=tuple(v for v in sorted(values, key=lambda v: -v.seconds_per_gib) if v.seconds_per_gib > 0),
        notice=late if found < wanted and watch.is_over() else "",
    )


def _evenly(number: int) -> Iterable[int]:
    """All numbers below one, so that the first of them are spread evenly."""
    bits = max(1, (number - 1).bit_length())
    return sorted(range(number), key=lambda n: int(f"{n:0{bits}b}"[::-1], 2))


def _sizes(request: PlanRequest, problem: Problem, resource: int, points: int, watch: Watch) -> list[int]:
    """Sizes of HBM (0) or of a host's memory (1) between the least that works and what the best plan of all takes."""
    if not points:
        return []
    if not resource and not request.topology.hbm_bytes:
        return [0]
    budget = [np.inf if b == resource else float(problem.budget[b]) for b in range(2)]
    frugal, _ = solve_and_place(problem.minimising(resource), request.topology, watch.part(0.5), gap=_CURVE_GAP)
    best, _ = solve_and_place(problem.with_budget(*budget), request.topology, watch, gap=_CURVE_GAP)
    if frugal is None or best is None:
        return []
    least = max(1.0, float(frugal.use[resource]))
    units = np.geomspace(least, max(least, float(best.use[resource])), points)
    return sorted({smallest_bytes(request, resource, math.ceil(unit)) for unit in units})


def _point(request: PlanRequest, problem: Problem, resource: int, size: int, watch: Watch) -> CurvePoint:
    asked = replace(request, topology=with_memory(request.topology, resource, size))
    gap = max(_CURVE_GAP, request.solver.gap)
    placed, found, _ = fastest(asked, problem.with_budget(*map(float, budgets(asked))), watch, gap=gap)
    return CurvePoint(
        hbm_bytes=asked.topology.hbm_bytes,
        host_bytes=asked.topology.host_bytes,
        seconds=None if placed is None else placed.seconds,
        bound_seconds=None if placed is None else min(found.bound, placed.seconds),
    )


def _monotone(curve: list[CurvePoint]) -> tuple[CurvePoint, ...]:
    """A larger budget allows every plan of a smaller one: a point found slower takes the plan before it."""
    result: list[CurvePoint] = []
    for point in sorted(curve, key=lambda each: (each.hbm_bytes, each.host_bytes or 0)):
        last = result[-1].seconds if result else None
        worse = last is not None and (point.seconds is None or point.seconds > last)
        result.append(replace(point, seconds=last, bound_seconds=point.bound_seconds) if worse else point)
    return tuple(result)


def _next(request: PlanRequest, resource: int, seconds: float, watch: Watch) -> float | None:
    budget = budgets(request)
    if not np.isfinite(budget[resource]):
        return None
    asked = request
    if resource or request.topology.hbm_bytes:
        size = smallest_bytes(request, resource, float(budget[resource] + _GIB_UNITS))
        asked = replace(request, topology=with_memory(request.topology, resource, size))
    placed, _, _ = fastest(asked, build_problem(asked, watch=watch), watch, gap=request.solver.gap)
    return 0.0 if placed is None else max(0.0, seconds - placed.seconds)
