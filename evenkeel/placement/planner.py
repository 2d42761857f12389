"""From a request to a plan."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from evenkeel.placement.layouts import Layout, Scope
from evenkeel.placement.limits import Watch
from evenkeel.placement.model import Mode, Runtime, Table
from evenkeel.placement.options import rank_load
from evenkeel.placement.placing import Placed, place, solve_and_place
from evenkeel.placement.plan import Budget, FusedModule, Placement, Plan, Status, TrivialPlan
from evenkeel.placement.problem import UNIT, Module, Problem, budgets, build_problem, modes_of
from evenkeel.placement.request import PlanRequest
from evenkeel.placement.search import Choice, Solution
from evenkeel.placement.shortage import explain_shortage
from evenkeel.placement.storage import BUCKET_ROWS, round_up, row_bytes
from evenkeel.placement.timing import fixed_seconds, kernel_seconds
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
    found = fastest(request, problem, watch.part(_SEARCH_SHARE), gap=gap, starts=starts)
    placed, solution = found.placed, found.solution
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
    gap = 0.0 if found.cost <= found.bound else 1 - found.bound / found.cost
    modules = _modules(request, problem, placed)
    good = gap <= max(request.solver.gap, _NO_GAP) * 1.001
    return replace(
        base,
        status=Status.OPTIMAL if good else Status.FEASIBLE,
        seconds=found.kernels,
        bound_seconds=found.kernel_bound,
        gap=gap,
        placements=_placements(request, problem, placed, modules),
        modules=tuple({module.name: module for module in modules.values()}.values()),
        hbm=_budget(request, 0, float(placed.use[0]), float(solution.prices[0])),
        host=_budget(request, 1, float(placed.use[1]), float(solution.prices[1])),
        host_seconds=_host_seconds(modules),
        step_seconds=None if request.step.dense_ms is None else found.cost,
        trivial=tuple(
            TrivialPlan(
                name=known.name, seconds=None if known.placed is None else _kernels(request, problem, known.placed)
            )
            for known in trivial
        ),
    )


@dataclass(frozen=True, slots=True)
class Fastest:
    """The placement with the shortest step that was found.

    Attributes:
        placed: It; `None` where none was found.
        kernels: Time of its kernels.
        kernel_bound: No plan's kernels are faster.
        cost: What is made small: the kernels' time, or beside a dense part of known time that of the step.
        bound: No plan's cost is less.
        solution: What the search over all modes says: whether anything fits, and the prices of the budgets.
    """

    placed: Placed | None
    kernels: float
    kernel_bound: float
    cost: float
    bound: float
    solution: Solution


def fastest(
    request: PlanRequest, problem: Problem, watch: Watch, *, gap: float = 0.0, starts: Sequence[Choice] = ()
) -> Fastest:
    """The placement with the shortest step, kernels and launches of modules included.

    Each mode in use is a module, whose kernels and launches take time whatever its rows do. So what is searched for is
    the fastest plan of each set of modes. A plan in all modes of a set and no others takes no less than what the search
    proves for that set and its modules; sets for which that is no less than a known plan takes are passed over.

    Args:
        request: What is planned.
        problem: Its options.
        watch: Once its time is up, the best found is returned with its bound.
        gap: Relative gap to prove.
        starts: Choices that are candidates.
    """
    costs = request.profile.costs(request.runtime)
    dense = None if request.step.dense_ms is None else request.step.dense_ms / 1e3
    kinds = sorted(modes_of(request))
    closed = dense is None and not (costs.module_kernels_s or costs.cache_kernels_s)
    placed, solution = solve_and_place(
        problem, request.topology, watch if closed else watch.part(0.5), gap=gap, starts=starts
    )
    if placed is None:
        return Fastest(None, math.inf, solution.bound, math.inf, solution.bound, solution)
    if closed:
        bound = min(solution.bound, placed.seconds)
        return Fastest(placed, placed.seconds, bound, placed.seconds, bound, solution)

    def step(host: float, kernels: float) -> float:
        return kernels if dense is None else max(host, dense + kernels)

    def cost(candidate: Placed) -> float:
        host = _host_seconds(_modules(request, problem, candidate))
        return step(host, _kernels(request, problem, candidate))

    modules = len({table.fuse_key for table in request.tables})

    def floor(modes: tuple[Mode, ...], seconds: float) -> tuple[float, float]:
        """What every plan in all of some modes takes at least: its step, and its kernels."""
        host, kernels = ([each(costs, mode) for mode in modes] for each in (fixed_seconds, kernel_seconds))
        own = seconds + max(sum(kernels), modules * min(kernels))
        return step(max(sum(host), modules * min(host)), own), own

    candidates = [placed]
    candidates += [c for c in (place(problem, request.topology, start, watch) for start in starts) if c is not None]
    best = min(candidates, key=cost)
    floors: list[tuple[float, float]] = []
    for modes in (each for size in range(1, len(kinds) + 1) for each in itertools.combinations(kinds, size)):
        least = floor(modes, solution.bound)
        if least[0] < cost(best) * (1 - gap) and len(modes) < len(kinds) and not watch.is_over():
            found, proved = solve_and_place(_only(problem, set(modes)), request.topology, watch.part(0.5), gap=gap)
            least = floor(modes, max(solution.bound, proved.bound))
            if found is not None:
                best = min(best, found, key=cost)
        floors.append(least)
    now, kernels = cost(best), _kernels(request, problem, best)
    return Fastest(
        best,
        kernels,
        min(kernels, *(own for _, own in floors)),
        now,
        min(now, *(whole for whole, _ in floors)),
        solution,
    )


def _kernels(request: PlanRequest, problem: Problem, placed: Placed) -> float:
    """Time of the kernels of a placement, those of its modules apart from rows included."""
    costs = request.profile.costs(request.runtime)
    modules = {module.name: module for module in _modules(request, problem, placed).values()}
    return placed.seconds + sum(kernel_seconds(costs, module.mode) for module in modules.values())


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
