"""From a request to a plan."""

from __future__ import annotations

import itertools
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from evenkeel.placement.fields import InvalidInputError
from evenkeel.placement.hardware import Runtime
from evenkeel.placement.layouts import Layout, Scope
from evenkeel.placement.options import RankLoad, allowed_modes, fixed_seconds
from evenkeel.placement.placing import Placed, solve_and_place
from evenkeel.placement.plan import Budget, FusedModule, Placement, Plan, Status, TrivialPlan
from evenkeel.placement.problem import UNIT, Problem, build_problem
from evenkeel.placement.request import Mode, PlanRequest, Table, Watch
from evenkeel.placement.search import PricedGroup, Solution
from evenkeel.placement.shortage import explain_shortage
from evenkeel.placement.storage import bucket_rows, row_bytes
from evenkeel.placement.trivial import trivial_placements

EXACT_TABLES = 50
"""Up to as many tables on all ranks the optimum on the grid of ratios is proved, whatever the gap."""
_SEARCH_SHARE = 0.85
"""Of the time limit, for the search itself: what it left is for why nothing fits."""
_MOMENT_S = 0.2
_NO_GAP = 1e-8
"""What HiGHS proves is as near as that."""


def plan(request: PlanRequest, *, clock: Callable[[], float] = time.monotonic) -> Plan:
    """The fastest placement of all tables that keeps both budgets, or why there is none.

    Args:
        request: Tables, machines and the step.
        clock: Seconds, for the time limit.

    Raises:
        InvalidInputError: If a table has no placement that can run, or what tables are pinned to cannot be agreed on.
    """
    return plan_in_time(request, Watch(request.solver.time_limit_s, clock=clock))


def plan_in_time(request: PlanRequest, watch: Watch, share: float = 1.0) -> Plan:
    """The same by a watch: of what it has left once the tables are priced, the search takes a share."""
    problem = build_problem(request, watch=watch)
    _check_pins(request, problem)
    watch = watch.part(share)
    trivial = trivial_placements(request, problem, watch)
    gap = 0.0 if len(request.tables) <= EXACT_TABLES and not problem.has_shards else request.solver.gap
    starts = [placed for placed in trivial.values() if placed is not None]
    placed, solution, gap = fastest(request, problem, watch.part(_SEARCH_SHARE), gap=gap, starts=starts)
    found = _plan_of(request, problem, placed)
    if placed is None:
        if not solution.proved:
            return found
        shortage = explain_shortage(request, problem, watch.at_least(_MOMENT_S))
        return replace(found, status=Status.INFEASIBLE, shortage=shortage)
    return replace(
        found,
        status=Status.OPTIMAL if gap <= max(request.solver.gap, _NO_GAP) * 1.001 else Status.FEASIBLE,
        bound_seconds=min(solution.bound, placed.seconds),
        gap=gap,
        hbm=replace(found.hbm, seconds_per_gib=float(solution.prices[0]) * 1024),
        host=replace(found.host, seconds_per_gib=float(solution.prices[1]) * 1024),
        trivial=tuple(
            TrivialPlan(name=name, seconds=None if known is None else known.seconds) for name, known in trivial.items()
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
    return {name: _plan_of(request, problem, placed) for name, placed in placements if placed}


def _check_pins(request: PlanRequest, problem: Problem) -> None:
    """Fused tables that are pinned to what cannot be agreed on are named."""
    for number in range(len(problem.mixing)):
        priced = PricedGroup(problem, number)
        pinned = [request.tables[i].modes or request.tables[i].ratio is not None for i in priced.tables]
        if not any(pinned) or math.isfinite(priced.price(np.zeros(2))[0]):
            continue
        counts = range(1, len(pinned))  # of first tables, the most of which can agree
        low = bisect_left(counts, True, key=lambda count: math.isinf(priced.price(np.zeros(2), slice(count))[0]))
        index = int(priced.tables[low])
        table = request.tables[index]
        others = (request.tables[i] for i, pin in zip(priced.tables[:low], pinned, strict=False) if pin)
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
    part = watch if dense_ms is None else watch.part(0.5)
    placed, solution = solve_and_place(problem, request.topology, part, gap=gap, starts=starts)
    if placed is None:
        return None, solution, 0.0
    if problem.has_shards and placed.seconds > solution.bound * (1 + gap) and not part.is_over():
        # Ranks are found table by table; what is in these layouts is searched once more as a whole.
        alike = problem.without(problem.layout != problem.layout[placed.choice][problem.table])
        again, _ = solve_and_place(alike, request.topology, part, gap=gap, starts=[placed])
        placed = again or placed
    cost, least = placed.seconds, solution.bound
    if dense_ms is not None:
        placed, cost, least = _shortest_step(request, problem, [placed, *starts], solution.bound, watch, gap)
    return placed, solution, 0.0 if cost <= least * (1 + _NO_GAP) else 1 - least / cost


def _shortest_step(
    request: PlanRequest, problem: Problem, candidates: list[Placed], bound: float, watch: Watch, gap: float
) -> tuple[Placed, float, float]:
    """The placement with the shortest step, its time and a bound: the fastest kernels of each set of modes compete.

    A plan in all modes of a set and no others takes no less than is proved for kernels in that set, and launches a
    module of each, and of each table the cheapest that it may be in.
    """
    dense, costs = (request.step.dense_ms or 0.0) / 1e3, request.profile.costs(request.runtime)
    able = [(table.fuse_key, allowed_modes(request, table)) for table in request.tables]
    kinds = sorted({mode for _, own in able for mode in own})

    def seconds(candidate: Placed) -> tuple[float, float]:
        host = sum(module.fixed_seconds for module in _modules(request, problem, candidate))
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
            fewer = problem.without(~np.isin(problem.mode.astype(str), modes))
            found, proved = solve_and_place(fewer, request.topology, watch.part(0.5), gap=gap, starts=candidates)
            kernels = max(bound, proved.bound)
            best = best if found is None else min(best, found, key=seconds)
        floors.append(max(host, dense + kernels))
    cost = seconds(best)[0]
    return best, cost, min([cost, *floors])


def _plan_of(request: PlanRequest, problem: Problem, placed: Placed | None) -> Plan:
    """A placement in full, of which nothing is proved; a plan of nothing if there is none."""
    limits = [int(limit * UNIT) if math.isfinite(limit) else None for limit in problem.budget.tolist()]
    hbm, host = (
        Budget(limit_bytes=limit, used_bytes=round(units * UNIT), seconds_per_gib=0.0)
        for limit, units in zip(limits, (0.0, 0.0) if placed is None else placed.use.tolist(), strict=True)
    )
    modules = () if placed is None else _modules(request, problem, placed)
    host_seconds, dense_ms = sum(module.fixed_seconds for module in modules), request.step.dense_ms
    has_gpu = request.topology.hbm_bytes > 0
    return Plan(
        status=Status.UNKNOWN if placed is None else Status.FEASIBLE,
        runtime=request.runtime,
        seconds=None if placed is None else placed.seconds,
        bound_seconds=None,
        gap=None,
        placements=() if placed is None else _placements(request, problem, placed, modules),
        modules=modules,
        hbm=hbm,
        host=host,
        workspace_bytes=request.profile.costs(request.runtime).workspace_bytes if has_gpu else 0,
        hardware=request.profile.name,
        host_seconds=None if placed is None else host_seconds,
        step_seconds=None if placed is None or dense_ms is None else max(host_seconds, dense_ms / 1e3 + placed.seconds),
    )


def _modules(request: PlanRequest, problem: Problem, placed: Placed) -> tuple[FusedModule, ...]:
    """The fused modules of all tables.

    Row-wise tables share a ratio, those of a rank or host only their mode.
    """
    costs = request.profile.costs(request.runtime)
    members: dict[tuple[object, ...], list[int]] = {}
    for table, option in enumerate(placed.choice.tolist()):
        layout, mode, ratio = problem.layout[option], problem.mode[option], float(problem.ratio[option])
        alike = (layout, mode, ratio) if layout.scope is Scope.EVERYWHERE else (layout.scope, mode)
        members.setdefault((request.tables[table].fuse_key, alike), []).append(table)
    found: dict[str, FusedModule] = {}
    for mine in members.values():
        options = placed.choice[mine]
        mode, ratios, held = problem.mode[options[0]], problem.ratio[options], problem.held[options]
        stem = f"{request.tables[mine[0]].group}/{mode.value.lower()}".lstrip("/")
        name = next(n for n in itertools.chain([stem], (f"{stem}-{k}" for k in itertools.count(2))) if n not in found)
        shared = float(ratios[0]) if len(set(ratios.tolist())) == 1 else None
        if (held != ratios).any():  # a shared cache: of its own tables
            shared = float(np.average(held, weights=[request.tables[index].rows for index in mine]))
        found[name] = FusedModule(
            name=name,
            mode=mode,
            ratio=shared,
            tables=tuple(request.tables[index].name for index in mine),
            fixed_seconds=fixed_seconds(costs, mode),
        )
    return tuple(found.values())


def _placements(
    request: PlanRequest, problem: Problem, placed: Placed, modules: Iterable[FusedModule]
) -> tuple[Placement, ...]:
    found, module_of = [], {name: module for module in modules for name in module.tables}
    local = request.topology.local_ranks
    for index, (table, option) in enumerate(zip(request.tables, placed.choice.tolist(), strict=True)):
        layout, mode, own = problem.layout[option], problem.mode[option], float(problem.ratio[option])
        others = slice(*problem.starts[index : index + 2])
        seconds, hbm, host = problem.shards[option].tolist()
        load = RankLoad(request, table, layout)
        module = module_of[table.name]
        rows = int(problem.rows[option])
        more = (problem.shards[others, 1] - hbm) / 1024
        saved = seconds - problem.shards[others, 0]
        helps = (more > 0) & (saved > 0)
        if mode is Mode.CACHING:
            miss_rate = float(load.keys.misses(np.array([float(rows * load.parts)]))[0])
        else:
            hit = request.profile.costs(request.runtime).hybrid_hit
            miss_rate = {Mode.HBM_ONLY: 0.0, Mode.HOST_ONLY: 1.0}.get(mode, 1 - hit * own)
        places = placed.places.get(index, ())
        if layout.scope is Scope.HOST:
            places = tuple(host * local + rank for host in places for rank in range(local))
        entry = Placement(
            table=table.name,
            mode=mode,
            ratio=own if module.ratio is None else module.ratio,
            sharding=layout.sharding,
            column_shards=layout.pieces,
            ranks=places,
            module=module.name,
            hbm_bytes=round(hbm * UNIT),
            host_bytes=round(host * UNIT),
            hbm_value_bytes=_value_bytes(request, table, layout, mode, own, rows),
            cache_rows=rows,
            seconds=seconds,
            unique_keys=load.unique,
            miss_rate=miss_rate,
            seconds_per_gib=float((saved[helps] / more[helps]).max()) if helps.any() else 0.0,
        )
        found.append(entry)
    return tuple(found)


def _value_bytes(request: PlanRequest, table: Table, layout: Layout, mode: Mode, ratio: float, rows: int) -> int:
    if request.runtime is not Runtime.DYNAMICEMB:
        return rows * (table.dim // layout.pieces) * table.value_bytes
    row = row_bytes(table, training=request.step.training)
    if mode not in (Mode.CACHING, Mode.HYBRID):
        return rows * row
    # DynamicEmb adds up the bytes of fused tables and takes their ratio: whole rows would make it a little too small.
    return math.ceil(bucket_rows(table.rows, request.topology.ranks) * ratio * row)
