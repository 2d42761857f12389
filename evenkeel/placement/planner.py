"""From a request to a plan."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from evenkeel.placement.layouts import Layout, Scope
from evenkeel.placement.limits import Watch
from evenkeel.placement.model import Mode, Runtime, Table
from evenkeel.placement.options import rank_load
from evenkeel.placement.placing import Placed, solve_and_place
from evenkeel.placement.plan import Budget, FusedModule, Placement, Plan, Status, TrivialPlan
from evenkeel.placement.problem import UNIT, Module, Problem, budgets, build_problem, modes_of
from evenkeel.placement.request import PlanRequest
from evenkeel.placement.shortage import explain_shortage
from evenkeel.placement.storage import BUCKET_ROWS, round_up, row_bytes
from evenkeel.placement.timing import fixed_seconds
from evenkeel.placement.trivial import trivial_plans

FloatArray = npt.NDArray[np.float64]

EXACT_TABLES = 50
"""Up to as many tables on all ranks the optimum on the grid of ratios is proved, whatever the gap."""
_SEARCH_SHARE = 0.85
"""Of the time limit, for the search itself: what it left is for why nothing fits."""
_MOMENT_S = 0.2
_NO_GAP = 1e-8
"""What HiGHS proves is as near as that."""


def plan(
    request: PlanRequest,
    *,
    should_stop: Callable[[], bool] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Plan:
    """The fastest placement of all tables that keeps both budgets, or why there is none.

    Args:
        request: Tables, machines and the step.
        should_stop: Asked now and then; once true, planning is given up.
        clock: Seconds, for the time limit.

    Raises:
        InvalidInputError: If a table has no placement that can run.
        SolveCancelledError: If `should_stop` answered true.
    """
    watch = Watch(request.solver.time_limit_s, should_stop=should_stop, clock=clock)
    problem = build_problem(request, watch=watch)
    trivial = trivial_plans(request, problem, watch)
    exact = len(request.tables) <= EXACT_TABLES and not problem.has_shards
    gap = 0.0 if exact else request.solver.gap
    starts = [known.placed.choice for known in trivial if known.placed is not None]
    placed, solution = solve_and_place(problem, request.topology, watch.part(_SEARCH_SHARE), gap=gap, starts=starts)
    base = Plan(
        status=Status.UNKNOWN,
        runtime=request.runtime,
        seconds=None,
        bound_seconds=None,
        gap=None,
        placements=(),
        modules=(),
        hbm=_budget(request, 0, 0.0, 0.0),
        host=_budget(request, 1, 0.0, 0.0),
        workspace_bytes=_workspace(request),
        hardware=request.profile.name,
    )
    if placed is None:
        if not solution.proved:
            return base
        left = Watch(max(_MOMENT_S, watch.left()), should_stop=should_stop, clock=clock)
        return replace(base, status=Status.INFEASIBLE, shortage=explain_shortage(request, problem, left))
    bound = min(solution.bound, placed.seconds)
    placed, objective = _step(request, problem, placed, bound, watch, gap)
    closed = objective.cost <= objective.bound * (1 + _NO_GAP)
    gap = 0.0 if closed else 1 - objective.bound / objective.cost
    modules = _modules(request, problem, placed)
    good = gap <= max(request.solver.gap, _NO_GAP) * 1.001
    return replace(
        base,
        status=Status.OPTIMAL if good else Status.FEASIBLE,
        seconds=placed.seconds,
        bound_seconds=bound,
        gap=gap,
        placements=_placements(request, problem, placed, modules),
        modules=tuple({module.name: module for module in modules.values()}.values()),
        hbm=_budget(request, 0, float(placed.use[0]), float(solution.prices[0])),
        host=_budget(request, 1, float(placed.use[1]), float(solution.prices[1])),
        host_seconds=_host_seconds(modules),
        step_seconds=None if request.step.dense_ms is None else objective.cost,
        trivial=tuple(
            TrivialPlan(name=known.name, seconds=None if known.placed is None else known.placed.seconds)
            for known in trivial
        ),
    )


@dataclass(frozen=True, slots=True)
class _Objective:
    """What is made fast, and a bound on it."""

    cost: float
    bound: float


def _step(
    request: PlanRequest, problem: Problem, placed: Placed, bound: float, watch: Watch, gap: float
) -> tuple[Placed, _Objective]:
    """The placement with the shortest step: where the host binds, fewer modules may be worth slower kernels."""
    if request.step.dense_ms is None:
        return placed, _Objective(placed.seconds, bound)
    dense = request.step.dense_ms / 1e3

    def seconds(candidate: Placed) -> float:
        return max(_host_seconds(_modules(request, problem, candidate)), dense + candidate.seconds)

    costs = request.profile.costs(request.runtime)
    fused: dict[object, list[float]] = {}
    for table in request.tables:
        able = [fixed_seconds(costs, mode) for mode in modes_of(replace(request, tables=(table,)))]
        fused.setdefault(table.fuse_key, []).append(min(able))
    least = max(sum(max(own) for own in fused.values()), dense + bound)
    best, kinds = placed, sorted(modes_of(request))
    for size in range(1, len(kinds)):
        for allowed in itertools.combinations(kinds, size):
            if seconds(best) <= least * (1 + request.solver.gap) or watch.is_over():
                break
            fewer = _only(problem, set(allowed))
            found, _ = solve_and_place(fewer, request.topology, watch.part(0.5), gap=gap)
            if found is not None and seconds(found) < seconds(best):
                best = found
    return best, _Objective(seconds(best), least)


def _only(problem: Problem, modes: set[Mode]) -> Problem:
    groups = []
    for group in problem.groups:
        closed = np.array([module.mode not in modes for module in group.modules])
        groups.append(replace(group, seconds=np.where(closed[None, :], np.inf, group.seconds)))
    return Problem(tuple(groups), problem.budget)


def _workspace(request: PlanRequest) -> int:
    has_gpu = request.topology.hbm_bytes > 0 and len(request.tables) > 0
    return request.profile.costs(request.runtime).workspace_bytes if has_gpu else 0


def _budget(request: PlanRequest, resource: int, use: float, price: float) -> Budget:
    limit = float(budgets(request)[resource])
    return Budget(
        limit_bytes=int(limit * UNIT) if math.isfinite(limit) else None,
        used_bytes=round(use * UNIT),
        seconds_per_gib=price * 1024,
    )


def _opening(module: Module) -> tuple[object, ...]:
    """Equal for tables that run as one: row-wise ones share a ratio, those of a rank or host only their mode."""
    if module.layout.scope is Scope.EVERYWHERE:
        return (module.layout, module.mode, module.ratio)
    return (module.layout.scope, module.mode)


def _chosen(problem: Problem, placed: Placed) -> dict[int, tuple[int, int, int]]:
    """Group, row and module of each table."""
    return {
        table: (number, row, int(mine[row]))
        for number, (group, mine) in enumerate(zip(problem.groups, placed.choice, strict=True))
        for row, table in enumerate(group.tables)
    }


def _host_seconds(modules: dict[int, FusedModule]) -> float:
    """Launches and waiting of the host for all modules."""
    return sum({module.name: module.fixed_seconds for module in modules.values()}.values())


def _modules(request: PlanRequest, problem: Problem, placed: Placed) -> dict[int, FusedModule]:
    """The fused module of each table; tables in one have the same one."""
    costs = request.profile.costs(request.runtime)
    members: dict[tuple[object, ...], list[int]] = {}
    chosen = _chosen(problem, placed)
    for index, table in enumerate(request.tables):
        number, _, module = chosen[index]
        members.setdefault((table.fuse_key, _opening(problem.groups[number].modules[module])), []).append(index)
    found: dict[int, FusedModule] = {}
    used: set[str] = set()
    for indices in members.values():
        own = [problem.groups[number].modules[module] for number, _, module in (chosen[i] for i in indices)]
        stem = f"{request.tables[indices[0]].group}/{own[0].mode.value.lower()}".lstrip("/")
        name = next(n for n in itertools.chain([stem], (f"{stem}-{k}" for k in itertools.count(2))) if n not in used)
        used.add(name)
        fused = FusedModule(
            name=name,
            mode=own[0].mode,
            ratio=own[0].ratio if len({each.ratio for each in own}) == 1 else None,
            tables=tuple(request.tables[index].name for index in indices),
            fixed_seconds=fixed_seconds(costs, own[0].mode),
        )
        found |= dict.fromkeys(indices, fused)
    return found


def _placements(
    request: PlanRequest, problem: Problem, placed: Placed, modules: dict[int, FusedModule]
) -> tuple[Placement, ...]:
    found = []
    chosen = _chosen(problem, placed)
    for index, table in enumerate(request.tables):
        number, row, column = chosen[index]
        group = problem.groups[number]
        module = group.modules[column]
        seconds, hbm, host = group.shard(row, column).tolist()
        load = rank_load(request, table, module.layout)
        rows = _cache_rows(request, table, module.layout, module.mode, module.ratio)
        more = (group.hbm[row] * group.scale[1] - hbm) / 1024
        saved = seconds - group.seconds[row] * group.scale[0]
        helps = (more > 0) & (saved > 0)
        entry = Placement(
            table=table.name,
            mode=module.mode,
            ratio=module.ratio,
            sharding=module.layout.sharding,
            column_shards=module.layout.pieces,
            ranks=_ranks(request, module.layout, placed.places.get(index, ())),
            module=modules[index].name,
            hbm_bytes=round(hbm * UNIT),
            host_bytes=round(host * UNIT),
            hbm_value_bytes=_value_bytes(request, table, module.layout, module.mode, module.ratio),
            cache_rows=rows,
            seconds=seconds,
            unique_keys=load.unique,
            miss_rate=_miss_rate(request, table, module.layout, module.mode, module.ratio, rows),
            seconds_per_gib=float((saved[helps] / more[helps]).max()) if helps.any() else 0.0,
        )
        found.append(entry)
    return tuple(found)


def _ranks(request: PlanRequest, layout: Layout, places: tuple[int, ...]) -> tuple[int, ...]:
    """Ranks of each piece of a table one after the other."""
    local = request.topology.local_ranks
    if layout.scope is Scope.HOST:
        return tuple(host * local + rank for host in places for rank in range(local))
    return places


def _cache_rows(request: PlanRequest, table: Table, layout: Layout, mode: Mode, ratio: float) -> int:
    if mode is Mode.HOST_ONLY:
        return 0
    shard = layout.shard(table, request.topology)
    rows = shard.rows
    if request.runtime is Runtime.DYNAMICEMB:
        rows = int(round_up(-(-table.rows // shard.parts), BUCKET_ROWS))
    return rows if mode is Mode.HBM_ONLY else max(1, int(rows * ratio))


def _value_bytes(request: PlanRequest, table: Table, layout: Layout, mode: Mode, ratio: float) -> int:
    rows = _cache_rows(request, table, layout, mode, ratio)
    if request.runtime is not Runtime.DYNAMICEMB:
        return rows * layout.shard(table, request.topology).dim * table.value_bytes
    row = row_bytes(table, training=request.step.training)
    if mode not in (Mode.CACHING, Mode.HYBRID):
        return rows * row
    # DynamicEmb adds up the bytes of fused tables and takes their ratio: whole rows would make it a little too small.
    return math.ceil(_cache_rows(request, table, layout, Mode.HBM_ONLY, 1.0) * ratio * row)


def _miss_rate(request: PlanRequest, table: Table, layout: Layout, mode: Mode, ratio: float, rows: int) -> float:
    if mode is Mode.CACHING:
        load = rank_load(request, table, layout)
        return float(load.keys.misses(np.array([float(rows * load.shards)]))[0])
    hit = request.profile.costs(request.runtime).hybrid_hit
    return {Mode.HBM_ONLY: 0.0, Mode.HOST_ONLY: 1.0}.get(mode, 1 - hit * ratio)
