"""From a request to a plan."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from evenkeel.placement.limits import Limits, Watch
from evenkeel.placement.model import Mode, Runtime, Sharding, Table
from evenkeel.placement.options import budgets, build_problem, rank_load, shards_of, without_rank
from evenkeel.placement.placement_problem import UNIT, PlacementProblem, Solution
from evenkeel.placement.placing import Placed, heaviest_shard, single_rank_tables, solve_and_place
from evenkeel.placement.plan import Budget, FusedModule, Placement, Plan, Split, Status
from evenkeel.placement.request import PlanRequest
from evenkeel.placement.shortage import explain_shortage
from evenkeel.placement.solver import solve
from evenkeel.placement.storage import BUCKET_ROWS, round_up, row_bytes

IntArray = npt.NDArray[np.int64]

GIB = float(1 << 30)
_SEARCH_SHARE = 0.8
"""Of the time limit, for the search itself: what it left is for why nothing fits, or for what splitting saves."""
_MOMENT_S = 0.2


def plan(
    request: PlanRequest,
    *,
    split: bool = True,
    should_stop: Callable[[], bool] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Plan:
    """The fastest placement of all tables that keeps both budgets, or why there is none.

    Args:
        request: Tables, machines and the step.
        split: Whether to say what splitting fused groups would buy.
        should_stop: Asked now and then; once true, planning is given up.
        clock: Seconds, for the time limit.

    Raises:
        InvalidInputError: If a table has no placement that can run.
        SolveCancelledError: If `should_stop` answered true.
    """
    limits = Limits(
        gap=request.solver.gap, time_limit_s=request.solver.time_limit_s, should_stop=should_stop, clock=clock
    )
    watch = Watch(limits)
    problem = build_problem(request, watch=watch)
    placed, solution = None, Solution(None, np.inf, np.inf, True, np.zeros(2))
    if not without_rank(request, problem):
        placed, solution = solve_and_place(request, problem, limits.within(_SEARCH_SHARE * watch.left()))
    limits = limits.within(max(_MOMENT_S, watch.left()))
    if placed is None:
        shortage = explain_shortage(request, problem, limits) if solution.proved else None
        status = Status.INFEASIBLE if solution.proved else Status.UNKNOWN
        empty = _budgets(request, np.zeros(2), np.zeros(2))
        return Plan(
            status=status,
            runtime=request.runtime,
            seconds=None,
            bound_seconds=None,
            gap=None,
            placements=(),
            modules=(),
            hbm=empty[0],
            host=empty[1],
            workspace_bytes=_workspace(request),
            hardware=request.profile.name,
            shortage=shortage,
        )
    bound = min(max(solution.bound, heaviest_shard(request, problem)), placed.seconds)
    gap = 0.0 if placed.seconds <= bound or placed.seconds == 0 else 1 - bound / placed.seconds
    good = solution.proved and gap <= max(request.solver.gap, 1e-9) * 1.001
    hbm, host = _budgets(request, placed.use, solution.prices)
    names = _module_names(request, problem, placed.modules)
    return Plan(
        status=Status.OPTIMAL if good else Status.FEASIBLE,
        runtime=request.runtime,
        seconds=placed.seconds,
        bound_seconds=bound,
        gap=gap,
        placements=_placements(request, problem, placed, names),
        modules=_modules(request, problem, placed.modules, names),
        hbm=hbm,
        host=host,
        workspace_bytes=_workspace(request),
        hardware=request.profile.name,
        split=_split(request, problem, placed.seconds, limits) if split else None,
    )


def _workspace(request: PlanRequest) -> int:
    has_gpu = request.topology.hbm_bytes > 0 and len(request.tables) > 0
    return request.profile.costs(request.runtime).workspace_bytes if has_gpu else 0


def _budgets(
    request: PlanRequest, use: npt.NDArray[np.float64], prices: npt.NDArray[np.float64]
) -> tuple[Budget, Budget]:
    limit = budgets(request)
    limits = [None if not np.isfinite(value) else int(value * UNIT) for value in limit]
    hbm, host = (
        Budget(limit_bytes=limits[b], used_bytes=round(float(use[b]) * UNIT), seconds_per_gib=float(prices[b]) * 1024)
        for b in range(2)
    )
    return hbm, host


def _module_names(
    request: PlanRequest, problem: PlacementProblem, modules: tuple[IntArray, ...]
) -> dict[tuple[int, int], str]:
    names: dict[tuple[int, int], str] = {}
    used: set[str] = set()
    for index, (group, chosen) in enumerate(zip(problem.groups, modules, strict=True)):
        for module in dict.fromkeys(int(m) for m in chosen):
            owner = request.tables[group.tables[0]].group
            stem = f"{owner}/{group.modules[module].mode.value.lower()}".lstrip("/")
            name, number = stem, 2
            while name in used:
                name, number = f"{stem}-{number}", number + 1
            used.add(name)
            names[index, module] = name
    return names


def _modules(
    request: PlanRequest, problem: PlacementProblem, modules: tuple[IntArray, ...], names: dict[tuple[int, int], str]
) -> tuple[FusedModule, ...]:
    result = []
    for (index, module), name in names.items():
        group = problem.groups[index]
        members = np.array(group.tables)[modules[index] == module]
        info = group.modules[module]
        tables = tuple(request.tables[int(table)].name for table in members)
        fused = FusedModule(name=name, mode=info.mode, ratio=info.ratio, tables=tables, fixed_seconds=info.fixed)
        result.append(fused)
    return tuple(result)


def _placements(
    request: PlanRequest, problem: PlacementProblem, placed: Placed, names: dict[tuple[int, int], str]
) -> tuple[Placement, ...]:
    found: dict[int, Placement] = {}
    for index, (group, chosen) in enumerate(zip(problem.groups, placed.modules, strict=True)):
        for row, position in enumerate(group.tables):
            module = int(chosen[row])
            info, table = group.modules[module], request.tables[position]
            more = (group.hbm[row] - group.hbm[row, module]) / 1024
            saved = group.time[row, module] - group.time[row]
            helps = (more > 0) & (saved > 0) & np.isfinite(group.time[row])
            copies = table.column_shards
            single = table.sharding in (Sharding.TABLE_WISE, Sharding.COLUMN_WISE)
            whole = request.topology.ranks / copies if single else 1.0
            hosts = request.topology.ranks / request.topology.local_ranks / copies if single else 1.0
            load = rank_load(request, table)
            rows = _cache_rows(request, table, info.mode, info.ratio)
            found[position] = Placement(
                table=table.name,
                mode=info.mode,
                ratio=info.ratio,
                sharding=table.sharding,
                ranks=placed.ranks.get(position, ()),
                module=names[index, module],
                hbm_bytes=round(float(group.hbm[row, module]) * UNIT * whole),
                host_bytes=round(float(group.host[row, module]) * UNIT * hosts),
                hbm_value_bytes=_value_bytes(request, table, info.mode, info.ratio),
                cache_rows=rows,
                seconds=float(group.time[row, module]) * whole,
                unique_keys=load.unique,
                miss_rate=_miss_rate(request, table, info.mode, info.ratio, rows),
                seconds_per_gib=float((saved[helps] / more[helps]).max()) if helps.any() else 0.0,
            )
    return tuple(found[position] for position in range(len(request.tables)))


def _cache_rows(request: PlanRequest, table: Table, mode: Mode, ratio: float) -> int:
    if mode is Mode.HOST_ONLY:
        return 0
    rows, _, shards = shards_of(table, request.topology.ranks)
    if request.runtime is Runtime.DYNAMICEMB:
        rows = int(round_up(-(-table.rows // shards), BUCKET_ROWS))
    return rows if mode is Mode.HBM_ONLY else max(1, int(rows * ratio))


def _value_bytes(request: PlanRequest, table: Table, mode: Mode, ratio: float) -> int:
    rows = _cache_rows(request, table, mode, ratio)
    if request.runtime is Runtime.DYNAMICEMB:
        return rows * row_bytes(table, training=request.step.training)
    _, dim, _ = shards_of(table, request.topology.ranks)
    return rows * dim * table.value_bytes


def _miss_rate(request: PlanRequest, table: Table, mode: Mode, ratio: float, rows: int) -> float:
    if mode is Mode.CACHING:
        load = rank_load(request, table)
        return float(load.keys.misses(np.array([float(rows * load.shards)]))[0])
    hit = request.profile.costs(request.runtime).hybrid_hit
    return {Mode.HBM_ONLY: 0.0, Mode.HOST_ONLY: 1.0}.get(mode, 1 - hit * ratio)


def _split(request: PlanRequest, problem: PlacementProblem, seconds: float, limits: Limits) -> Split | None:
    """Every table free, then those that chose alike put together again."""
    if not any(group.bound for group in problem.groups) or single_rank_tables(request):
        return None
    apart = problem.unbound()
    # An estimate is enough here: the plan itself does not hang on it.
    solution = solve(apart, limits.at_most(1e-3))
    if solution.modules is None:
        return None
    together: dict[tuple[object, ...], list[int]] = {}
    total = 0.0
    for group, chosen in zip(apart.groups, solution.modules, strict=True):
        table, module = group.tables[0], group.modules[int(chosen[0])]
        total += float(group.time[0, int(chosen[0])])
        together.setdefault((request.tables[table].fuse_key, module.mode, module.ratio, module.fixed), []).append(table)
    total += sum(float(key[3]) for key in together if isinstance(key[3], float))
    if total >= seconds:
        return Split(seconds=seconds, saves_seconds=0.0, modules=())
    modules = []
    for number, ((_, mode, ratio, fixed), tables) in enumerate(together.items(), start=1):
        assert isinstance(mode, Mode)
        assert isinstance(ratio, float)
        assert isinstance(fixed, float)
        names = tuple(request.tables[table].name for table in tables)
        name = f"{mode.value.lower()}-{number}"
        modules.append(FusedModule(name=name, mode=mode, ratio=ratio, tables=names, fixed_seconds=fixed))
    return Split(seconds=total, saves_seconds=seconds - total, modules=tuple(modules))
