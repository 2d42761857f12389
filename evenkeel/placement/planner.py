"""From a request to a plan."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from evenkeel.placement.building import budgets, build_problem, whole_shards
from evenkeel.placement.cases import cases, search
from evenkeel.placement.incumbent import Placed, can_be_placed
from evenkeel.placement.joint import solve_joint
from evenkeel.placement.layouts import Layout, Scope
from evenkeel.placement.limits import Limits, Watch
from evenkeel.placement.model import MAX_BYTES, Mode, Runtime, Table
from evenkeel.placement.options import rank_load
from evenkeel.placement.placement_problem import UNIT, Group, PlacementProblem
from evenkeel.placement.plan import Budget, FusedModule, Placement, Plan, Split, Status
from evenkeel.placement.request import PlanRequest
from evenkeel.placement.shortage import explain_shortage
from evenkeel.placement.solver import seconds as plan_seconds
from evenkeel.placement.solver import usage
from evenkeel.placement.storage import BUCKET_ROWS, round_up, row_bytes

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

GIB = float(1 << 30)
_SEARCH_SHARE = 0.8
"""Of the time limit, for the search itself: what it left is for why nothing fits, or for what splitting saves."""
_MOMENT_S = 0.2
_NO_GAP = 1e-8
"""What HiGHS proves is as near as that."""
_SPLIT_GAP, _SPLIT_RATIOS, _SPLIT_COLUMNS, _MOST_SPLIT, _SPLIT_NODES = 1e-3, (4, 24), 1_500, 4_000, 100
"""For what splitting saves: gap, ratios of a table at least and at most, columns aimed at and at most, and nodes."""


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
    all_cases = cases(request, watch=watch)
    case, placed, solution = search(all_cases, limits.within(_SEARCH_SHARE * watch.left()))
    request, problem = case.request, case.problem
    limits = limits.within(max(_MOMENT_S, watch.left()))
    if placed is None:
        shortage = explain_shortage(all_cases, limits) if solution.proved else None
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
    bound = min(solution.bound, placed.seconds)
    gap = 0.0 if placed.seconds <= bound or placed.seconds == 0 else 1 - bound / placed.seconds
    good = solution.proved and gap <= max(request.solver.gap, _NO_GAP) * 1.001
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
        split=_split(request, problem, placed, limits) if split else None,
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


Openings = dict[tuple[int, tuple[object, ...]], str]


def _module_names(request: PlanRequest, problem: PlacementProblem, modules: tuple[IntArray, ...]) -> Openings:
    """Names of the openings of each group."""
    names: Openings = {}
    used: set[str] = set()
    for index, (group, chosen) in enumerate(zip(problem.groups, modules, strict=True)):
        for module in dict.fromkeys(int(m) for m in chosen):
            if (index, group.modules[module].opening) in names:
                continue
            owner = request.tables[group.tables[0]].group
            stem = f"{owner}/{group.modules[module].mode.value.lower()}".lstrip("/")
            name, number = stem, 2
            while name in used:
                name, number = f"{stem}-{number}", number + 1
            used.add(name)
            names[index, group.modules[module].opening] = name
    return names


def _modules(
    request: PlanRequest, problem: PlacementProblem, modules: tuple[IntArray, ...], names: Openings
) -> tuple[FusedModule, ...]:
    result = []
    for (index, opening), name in names.items():
        group = problem.groups[index]
        members = [row for row, m in enumerate(modules[index]) if group.modules[int(m)].opening == opening]
        info = [group.modules[int(modules[index][row])] for row in members]
        ratios = {module.ratio for module in info}
        ratio = ratios.pop() if len(ratios) == 1 else None
        tables = tuple(request.tables[group.tables[row]].name for row in members)
        fused = FusedModule(name=name, mode=info[0].mode, ratio=ratio, tables=tables, fixed_seconds=info[0].fixed)
        result.append(fused)
    return tuple(result)


def _placements(
    request: PlanRequest, problem: PlacementProblem, placed: Placed, names: Openings
) -> tuple[Placement, ...]:
    found: dict[int, Placement] = {}
    worth = _worth_of_hbm(request, problem, placed.modules)
    for index, (group, chosen) in enumerate(zip(problem.groups, placed.modules, strict=True)):
        for row, position in enumerate(group.tables):
            module = int(chosen[row])
            info, table = group.modules[module], request.tables[position]
            seconds, hbm, host = whole_shards(request, info.layout).tolist()
            load = rank_load(request, table, info.layout)
            rows = _cache_rows(request, table, info.layout, info.mode, info.ratio)
            found[position] = Placement(
                table=table.name,
                mode=info.mode,
                ratio=info.ratio,
                sharding=info.layout.sharding,
                column_shards=info.layout.pieces,
                ranks=_ranks(request, info.layout, placed.places.get(position, ())),
                module=names[index, info.opening],
                hbm_bytes=round(float(group.hbm[row, module]) * UNIT * hbm),
                host_bytes=round(float(group.host[row, module]) * UNIT * host),
                hbm_value_bytes=_value_bytes(request, table, info.layout, info.mode, info.ratio),
                cache_rows=rows,
                seconds=float(group.time[row, module]) * seconds,
                unique_keys=load.unique,
                miss_rate=_miss_rate(request, table, info.layout, info.mode, info.ratio, rows),
                seconds_per_gib=worth[position],
            )
    return tuple(found[position] for position in range(len(request.tables)))


def _worth_of_hbm(request: PlanRequest, problem: PlacementProblem, modules: tuple[IntArray, ...]) -> dict[int, float]:
    """Seconds that each table's best use of more HBM saves on a rank that holds it, by the GiB."""
    found: dict[int, float] = {}
    for group, chosen in _with_room(request, problem, modules):
        scale = np.array([whole_shards(request, module.layout) for module in group.modules]).T
        moves = _Moves(group, chosen)
        for row, position in enumerate(group.tables):
            module, seconds, hbm = int(chosen[row]), group.time[row] * scale[0], group.hbm[row] * scale[1]
            more = (hbm - hbm[module]) / 1024
            saved = seconds[module] - seconds - moves.seconds(module)
            helps = (more > 0) & (saved > 0)
            found[position] = float((saved[helps] / more[helps]).max()) if helps.any() else 0.0
    return found


def _with_room(
    request: PlanRequest, problem: PlacementProblem, modules: tuple[IntArray, ...]
) -> list[tuple[Group, IntArray]]:
    """The groups, with what they chose, beside all that larger ranks would have to choose from."""
    today = list(zip(problem.groups, modules, strict=True))
    if not can_be_placed(problem) or not request.topology.hbm_bytes:
        return today
    larger = replace(request.topology, hbm_bytes=MAX_BYTES)
    found = []
    for (group, mine), roomy in zip(today, build_problem(replace(request, topology=larger)).groups, strict=True):
        column = {module: number for number, module in enumerate(roomy.modules)}
        found.append((roomy, np.array([column[group.modules[module]] for module in mine.tolist()], dtype=np.int64)))
    return found


class _Moves:
    """What else it costs if one table of a group moves to another module, beside its own time."""

    def __init__(self, group: Group, chosen: IntArray) -> None:
        kinds: dict[object, int] = {}
        self.kind = np.array([kinds.setdefault((m.layout, m.mode), len(kinds)) for m in group.modules], dtype=np.int64)
        self.side = np.array([m.side for m in group.modules], dtype=np.int64)
        self.opening, self.fixed = group.openings()
        self.tables = np.bincount(self.opening[chosen], minlength=len(self.fixed)) * group.bound

    def seconds(self, module: int) -> FloatArray:
        """(modules,) fixed time that a step gains by a move from `module`; infinite where a table cannot move alone.

        To another ratio of its own mode its module moves as a whole, at no fixed time.
        """
        others = self.tables - (self.tables > 0) * (np.arange(len(self.fixed)) == self.opening[module])
        there = others[self.opening] > 0
        entered = np.where(there, 0.0, self.fixed[self.opening])
        apart = (self.side >= 0) & np.isin(self.side, self.side[there]) & ~there
        gained = np.where(apart, np.inf, entered) - (0.0 if there[module] else self.fixed[self.opening[module]])
        return np.where(self.kind == self.kind[module], 0.0, gained)


def _ranks(request: PlanRequest, layout: Layout, places: tuple[int, ...]) -> tuple[int, ...]:
    """Ranks of each piece of a table in turn."""
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


def _split(request: PlanRequest, problem: PlacementProblem, placed: Placed, limits: Limits) -> Split | None:
    """The same plan with as many modules, each of its own ratio, as pay for their fixed time.

    Shards on single ranks or hosts stay where they are: their ratios are their own already.
    """
    if not any(group.bound for group in problem.groups):
        return None
    few = min(_SPLIT_RATIOS[1], max(_SPLIT_RATIOS[0], _SPLIT_COLUMNS // (2 * len(request.tables))))
    kept = [_thinned(group, mine, few) for group, mine in zip(problem.groups, placed.modules, strict=True)]
    columns = sum(int(np.isfinite(g.time[:, mask]).sum()) for g, mask in zip(problem.groups, kept, strict=True))
    nothing = Split(seconds=placed.seconds, saves_seconds=0.0, modules=())
    if columns > _MOST_SPLIT or not any(any(m.side >= 0 for m in group.modules) for group in problem.groups):
        return nothing
    groups, stay = [], []
    for group, mine in zip(problem.groups, placed.modules, strict=True):
        groups.append(replace(group, modules=tuple(replace(module, side=-1) for module in group.modules)))
        here = np.array([module.layout.scope is not Scope.EVERYWHERE for module in group.modules])
        closed = np.where(here[mine][:, None], True, here[None, :])
        closed[np.arange(len(mine)), mine] = False
        stay.append(closed)
    # The average rank and host stand for all of them: they have no more room than the fullest.
    fullest = placed.use - usage(problem, placed.modules)
    free = PlacementProblem(tuple(groups), problem.budget - fullest).without(stay)
    found = solve_joint(free, kept, gap=_SPLIT_GAP, start=placed.modules, nodes=_SPLIT_NODES, watch=Watch(limits))
    if found.modules is None:
        return nothing
    saved = plan_seconds(problem, placed.modules) - plan_seconds(free, found.modules)
    if saved <= _SPLIT_GAP * placed.seconds:
        return nothing
    modules: list[FusedModule] = []
    for group, mine in zip(free.groups, found.modules, strict=True):
        members: dict[tuple[object, ...], list[int]] = {}
        for row, module in enumerate(mine.tolist()):
            own = group.modules[module].opening
            members.setdefault(own if group.bound else (row,), []).append(row)
        for rows in members.values():
            info = [group.modules[int(mine[row])] for row in rows]
            fused = FusedModule(
                name=f"{info[0].mode.value.lower()}-{len(modules) + 1}",
                mode=info[0].mode,
                ratio=info[0].ratio if len({module.ratio for module in info}) == 1 else None,
                tables=tuple(request.tables[group.tables[row]].name for row in rows),
                fixed_seconds=info[0].fixed,
            )
            modules.append(fused)
    return Split(seconds=placed.seconds - saved, saves_seconds=saved, modules=tuple(modules))


def _thinned(group: Group, mine: IntArray, most: int) -> npt.NDArray[np.bool_]:
    """(modules,) some ratios of each layout and mode, the ends and those in use among them."""
    kept = np.zeros(len(group.modules), dtype=bool)
    kept[mine] = True
    by_kind: dict[tuple[object, ...], list[int]] = {}
    for index, module in enumerate(group.modules):
        by_kind.setdefault((module.layout, module.mode), []).append(index)
    for members in by_kind.values():
        few = np.linspace(0, len(members) - 1, min(len(members), most)).round().astype(np.int64)
        kept[np.array(members)[few]] = True
    return kept
