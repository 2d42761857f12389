"""From a request to a plan."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from evenkeel.placement.invalid_input import InvalidInputError
from evenkeel.placement.layouts import Layout, Scope
from evenkeel.placement.limits import Watch
from evenkeel.placement.model import Mode, Runtime, Table
from evenkeel.placement.options import allowed_modes, rank_load
from evenkeel.placement.placing import Placed, solve_and_place
from evenkeel.placement.plan import Budget, FusedModule, Placement, Plan, Status, TrivialPlan
from evenkeel.placement.problem import UNIT, Group, Module, Problem, budgets, build_problem, modes_of
from evenkeel.placement.request import PlanRequest
from evenkeel.placement.search import PricedGroup, Solution
from evenkeel.placement.shortage import explain_shortage
from evenkeel.placement.storage import BUCKET_ROWS, round_up, row_bytes
from evenkeel.placement.timing import fixed_seconds
from evenkeel.placement.trivial import trivial_placements

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
        InvalidInputError: If a table has no placement that can run, or what tables are pinned to cannot be agreed on.
        SolveCancelledError: If `should_stop` answered true.
    """
    watch = Watch(request.solver.time_limit_s, should_stop=should_stop, clock=clock)
    problem = build_problem(request, watch=watch)
    _check_pins(request, problem)
    trivial = trivial_placements(request, problem, watch)
    gap = 0.0 if len(request.tables) <= EXACT_TABLES and not problem.has_shards else request.solver.gap
    starts = [placed for placed in trivial.values() if placed is not None]
    placed, solution, gap = fastest(request, problem, watch.part(_SEARCH_SHARE), gap=gap, starts=starts)
    if placed is None:
        found = _empty(request)
        if solution.proved:
            left = Watch(max(_MOMENT_S, watch.left()), should_stop=should_stop, clock=clock)
            found = replace(found, status=Status.INFEASIBLE, shortage=explain_shortage(request, problem, left))
        return found
    found = _plan_of(request, problem, placed)
    return replace(
        found,
        status=Status.OPTIMAL if gap <= max(request.solver.gap, _NO_GAP) * 1.001 else Status.FEASIBLE,
        bound_seconds=min(solution.bound, placed.seconds),
        gap=gap,
        hbm=replace(found.hbm, seconds_per_gib=float(solution.prices[0]) * 1024),
        host=replace(found.host, seconds_per_gib=float(solution.prices[1]) * 1024),
        trivial=tuple(
            TrivialPlan(name=name, seconds=None if known is None else _mixed(problem, known).seconds)
            for name, known in trivial.items()
        ),
    )


def trivial_plans(request: PlanRequest) -> dict[str, Plan]:
    """The plans that anybody writes in a minute, by name: those that fit. They have no bound.

    Raises:
        InvalidInputError: If a table has no placement that can run.
    """
    watch = Watch(request.solver.time_limit_s)
    problem = build_problem(request, watch=watch)
    placements = trivial_placements(request, problem, watch).items()
    return {name: _plan_of(request, problem, _mixed(problem, placed)) for name, placed in placements if placed}


def _check_pins(request: PlanRequest, problem: Problem) -> None:
    """Fused tables that are pinned to what cannot be agreed on are named."""
    for group in problem.groups:
        pinned = [request.tables[i].modes or request.tables[i].ratio is not None for i in group.tables]
        priced = PricedGroup(group)
        if not any(pinned) or math.isfinite(priced.price(np.zeros(2))[0]):
            continue
        low, high = 0, len(pinned)  # the fewest first tables that cannot agree
        while low + 1 < high:
            middle = (low + high) // 2
            agree = math.isfinite(priced.price(np.zeros(2), slice(middle))[0])
            low, high = (middle, high) if agree else (low, middle)
        index = group.tables[low]
        table = request.tables[index]
        others = (request.tables[i] for i, pin in zip(group.tables[:low], pinned, strict=False) if pin)
        what = f"contradicts {', '.join(map(_pins, others))}: {table.name!r} fuses with them, and fused tables share "
        remedy = "pin them alike, leave one open, or give one another group"
        given = [mode.value for mode in table.modes] if table.ratio is None else table.ratio
        field = f"tables[{index}].{'modes' if table.ratio is None else 'ratio'}"
        raise InvalidInputError(field, given, f"{what}their modes and ratios", remedy)


def _pins(table: Table) -> str:
    modes = [f"modes {'|'.join(mode.value for mode in table.modes)}"] if table.modes else []
    ratio = [] if table.ratio is None else [f"ratio {table.ratio:g}"]
    return f"{table.name!r} ({' '.join(modes + ratio)})"


def fastest(
    request: PlanRequest, problem: Problem, watch: Watch, *, gap: float, starts: Sequence[Placed] = ()
) -> tuple[Placed | None, Solution, float]:
    """The placement with the shortest step, what is proved of kernels, and the gap that is left.

    Without `dense_ms` kernels are the step. With it the host may bind, for which fewer modules are better.
    """
    dense_ms = request.step.dense_ms
    once = dense_ms is None and not any(group.mixing for group in problem.groups)
    part = watch if once else watch.part(0.5)
    placed, solution = solve_and_place(problem, request.topology, part, gap=gap, starts=starts)
    if placed is None:
        return None, solution, 0.0
    candidates = [_mixed(problem, each) for each in (placed, *starts)]
    placed, bound = _fastest_kernels(request, problem, candidates, solution.bound, watch, gap)
    cost, least = placed.seconds, bound
    if dense_ms is not None:
        placed, cost, least = _shortest_step(request, problem, [placed, *candidates], bound, watch, gap)
    return placed, replace(solution, bound=bound), 0.0 if cost <= least * (1 + _NO_GAP) else 1 - least / cost


def _mixed(problem: Problem, placed: Placed) -> Placed:
    """A placement whose time includes that of mixing."""
    return replace(placed, seconds=placed.seconds + problem.mixing(placed.choice))


def _fastest_kernels(
    request: PlanRequest, problem: Problem, candidates: list[Placed], bound: float, watch: Watch, gap: float
) -> tuple[Placed, float]:
    """The placement with the fastest kernels and a bound: groups in caches, without, and mixed compete.

    Of more than two groups those that cost most to mix are looked at.
    """
    best, floors = min(candidates, key=lambda each: each.seconds), []
    dearest = sorted((group for group in problem.groups if group.mixing), key=lambda group: -group.mixing)[:2]
    for kinds in itertools.product((None, True, False), repeat=len(dearest)):  # mixed, all cached, none
        cached = {group.tables: kind for group, kind in zip(dearest, kinds, strict=True) if kind is not None}
        mixing = sum(group.mixing for group in dearest if group.tables not in cached)
        least = bound + mixing
        if cached and least < best.seconds * (1 - gap) and not watch.is_over():

            def closed(group: Group, module: Module, cached: dict[tuple[int, ...], bool] = cached) -> bool:
                return cached.get(group.tables, module.mode is Mode.CACHING) is not (module.mode is Mode.CACHING)

            found, proved = solve_and_place(problem.without(closed), request.topology, watch.part(0.5), gap=gap)
            least = max(least, proved.bound + mixing)
            best = best if found is None else min(best, _mixed(problem, found), key=lambda each: each.seconds)
        floors.append(least)
    return best, min([best.seconds, *floors])


def _shortest_step(
    request: PlanRequest, problem: Problem, candidates: list[Placed], bound: float, watch: Watch, gap: float
) -> tuple[Placed, float, float]:
    """The placement with the shortest step, its time and a bound: the fastest kernels of each set of modes compete.

    A plan in all modes of a set and no others takes no less than is proved for kernels in that set, and launches a
    module of each, and of each table the cheapest that it may be in.
    """
    dense, costs = (request.step.dense_ms or 0.0) / 1e3, request.profile.costs(request.runtime)
    able = [(table.fuse_key, allowed_modes(request, table)) for table in request.tables]
    kinds = sorted(modes_of(request))

    def seconds(candidate: Placed) -> tuple[float, float]:
        host = _host_seconds(_modules(request, problem, candidate))
        return max(host, dense + candidate.seconds), candidate.seconds

    def launches(modes: tuple[Mode, ...]) -> float:
        fixed, fused = {mode: fixed_seconds(costs, mode) for mode in modes}, dict[object, float]()
        for key, own in able:
            least = min((fixed[mode] for mode in own if mode in fixed), default=math.inf)
            fused[key] = max(fused.get(key, 0.0), least)
        return max(sum(fixed.values()), sum(fused.values()))

    best = min(candidates, key=seconds)
    floors = []
    for modes in itertools.chain.from_iterable(itertools.combinations(kinds, n + 1) for n in range(len(kinds))):
        host, kernels = launches(modes), bound
        if max(host, dense + bound) < seconds(best)[0] * (1 - gap) and len(modes) < len(kinds) and not watch.is_over():
            fewer = problem.without(lambda _, module, modes=modes: module.mode not in modes)  # type: ignore[misc]
            found, proved = solve_and_place(fewer, request.topology, watch.part(0.5), gap=gap)
            kernels = max(bound, proved.bound)
            best = best if found is None else min(best, _mixed(problem, found), key=seconds)
        floors.append(max(host, dense + kernels))
    cost = seconds(best)[0]
    return best, cost, min([cost, *floors])


def _empty(request: PlanRequest) -> Plan:
    """A plan of nothing."""
    limits = [int(limit * UNIT) if math.isfinite(limit) else None for limit in budgets(request).tolist()]
    hbm, host = (Budget(limit_bytes=limit, used_bytes=0, seconds_per_gib=0.0) for limit in limits)
    has_gpu = request.topology.hbm_bytes > 0 and len(request.tables) > 0
    return Plan(
        status=Status.UNKNOWN,
        runtime=request.runtime,
        seconds=None,
        bound_seconds=None,
        gap=None,
        placements=(),
        modules=(),
        hbm=hbm,
        host=host,
        workspace_bytes=request.profile.costs(request.runtime).workspace_bytes if has_gpu else 0,
        hardware=request.profile.name,
    )


def _plan_of(request: PlanRequest, problem: Problem, placed: Placed) -> Plan:
    """A placement in full, of which nothing is proved."""
    modules, empty = _modules(request, problem, placed), _empty(request)
    host_seconds, dense_ms = _host_seconds(modules), request.step.dense_ms
    return replace(
        empty,
        status=Status.FEASIBLE,
        seconds=placed.seconds,
        placements=_placements(request, problem, placed, modules),
        modules=tuple({module.name: module for module in modules.values()}.values()),
        hbm=replace(empty.hbm, used_bytes=round(float(placed.use[0]) * UNIT)),
        host=replace(empty.host, used_bytes=round(float(placed.use[1]) * UNIT)),
        host_seconds=host_seconds,
        step_seconds=None if dense_ms is None else max(host_seconds, dense_ms / 1e3 + placed.seconds),
    )


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
    """The fused module of each table; tables in one have the same one.

    Row-wise tables share a ratio, those of a rank or host only their mode.
    """
    costs = request.profile.costs(request.runtime)
    members: dict[tuple[object, ...], dict[int, Module]] = {}
    held: dict[int, float] = {}
    for table, (number, row, column) in sorted(_chosen(problem, placed).items()):
        module, held[table] = problem.groups[number].modules[column], float(problem.groups[number].held[row, column])
        alike: tuple[object, ...] = (module.layout.scope, module.mode)
        if module.layout.scope is Scope.EVERYWHERE:
            alike = (module.layout, module.mode, module.ratio)
        members.setdefault((request.tables[table].fuse_key, alike), {})[table] = module
    found: dict[int, FusedModule] = {}
    used: set[str] = set()
    for mine in members.values():
        first, module = next(iter(mine.items()))
        stem = f"{request.tables[first].group}/{module.mode.value.lower()}".lstrip("/")
        name = next(n for n in itertools.chain([stem], (f"{stem}-{k}" for k in itertools.count(2))) if n not in used)
        used.add(name)
        ratio = module.ratio if len({each.ratio for each in mine.values()}) == 1 else None
        if any(held[index] != each.ratio for index, each in mine.items()):  # a shared cache: of its own tables
            rows = [request.tables[index].rows for index in mine]
            ratio = float(np.average([held[index] for index in mine], weights=rows))
        fused = FusedModule(
            name=name,
            mode=module.mode,
            ratio=ratio,
            tables=tuple(request.tables[index].name for index in mine),
            fixed_seconds=fixed_seconds(costs, module.mode),
        )
        found |= dict.fromkeys(mine, fused)
    return found


def _placements(
    request: PlanRequest, problem: Problem, placed: Placed, modules: dict[int, FusedModule]
) -> tuple[Placement, ...]:
    found = []
    local = request.topology.local_ranks
    for index, (number, row, column) in sorted(_chosen(problem, placed).items()):
        table, group = request.tables[index], problem.groups[number]
        module = group.modules[column]
        seconds, hbm, host = group.shard(row, column).tolist()
        load = rank_load(request, table, module.layout)
        ratio = modules[index].ratio
        rows = _cache_rows(request, table, module.layout, module.mode, float(group.held[row, column]))
        more = (group.hbm[row] * group.scale[1] - hbm) / 1024
        saved = seconds - group.seconds[row] * group.scale[0]
        helps = (more > 0) & (saved > 0)
        if module.mode is Mode.CACHING:
            miss_rate = float(load.keys.misses(np.array([float(rows * load.shards)]))[0])
        else:
            hit = request.profile.costs(request.runtime).hybrid_hit
            miss_rate = {Mode.HBM_ONLY: 0.0, Mode.HOST_ONLY: 1.0}.get(module.mode, 1 - hit * module.ratio)
        places = placed.places.get(index, ())
        if module.layout.scope is Scope.HOST:
            places = tuple(host * local + rank for host in places for rank in range(local))
        entry = Placement(
            table=table.name,
            mode=module.mode,
            ratio=module.ratio if ratio is None else ratio,
            sharding=module.layout.sharding,
            column_shards=module.layout.pieces,
            ranks=places,
            module=modules[index].name,
            hbm_bytes=round(hbm * UNIT),
            host_bytes=round(host * UNIT),
            hbm_value_bytes=_value_bytes(request, table, module, rows),
            cache_rows=rows,
            seconds=seconds,
            unique_keys=load.unique,
            miss_rate=miss_rate,
            seconds_per_gib=float((saved[helps] / more[helps]).max()) if helps.any() else 0.0,
        )
        found.append(entry)
    return tuple(found)


def _cache_rows(request: PlanRequest, table: Table, layout: Layout, mode: Mode, ratio: float) -> int:
    if mode is Mode.HOST_ONLY:
        return 0
    shard = layout.shard(table, request.topology)
    rows = shard.rows
    if request.runtime is Runtime.DYNAMICEMB:
        rows = int(round_up(-(-table.rows // shard.parts), BUCKET_ROWS))
    return rows if mode is Mode.HBM_ONLY else max(1, int(rows * ratio))


def _value_bytes(request: PlanRequest, table: Table, module: Module, rows: int) -> int:
    if request.runtime is not Runtime.DYNAMICEMB:
        return rows * module.layout.shard(table, request.topology).dim * table.value_bytes
    row = row_bytes(table, training=request.step.training)
    if module.mode not in (Mode.CACHING, Mode.HYBRID):
        return rows * row
    # DynamicEmb adds up the bytes of fused tables and takes their ratio: whole rows would make it a little too small.
    return math.ceil(_cache_rows(request, table, module.layout, Mode.HBM_ONLY, 1.0) * module.ratio * row)
