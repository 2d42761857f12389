"""From a request to the optimisation problem: groups of tables that fuse, and the modules that they choose from."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from evenkeel.placement.combinations import enumerate_combinations
from evenkeel.placement.invalid_input import InvalidInputError, require
from evenkeel.placement.layers import SLACK
from evenkeel.placement.layouts import ROW_WISE, Layout, Scope
from evenkeel.placement.limits import Watch
from evenkeel.placement.model import Mode, Runtime, Table
from evenkeel.placement.options import PAGE, TableOptions, allowed_modes, ratio_grid, table_layouts, table_options
from evenkeel.placement.placement_problem import UNIT, Group, Module, PlacementProblem
from evenkeel.placement.request import PlanRequest
from evenkeel.placement.timing import fixed_seconds

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_MOST_COMPARED = 400
"""Options of one table and opening that are compared with each other, at most."""
_COARSE = ((30, 40), (150, 20), (np.inf, 10))
"""Ratios of layouts that are one of several, by the number of tables; each table has a ratio of its own there."""


def build_problem(
    request: PlanRequest, grid: FloatArray | None = None, *, watch: Watch | None = None
) -> PlacementProblem:
    """The optimisation problem of `request`, whose sequence tables are cut each at a width of its own: see `cases`.

    Raises:
        InvalidInputError: If the modes or the ratio of a table leave it no placement, if those of tables that fuse
            contradict each other, or if `watch` says that time is up.
        SolveCancelledError: If `watch` says so.
    """
    if grid is None:
        grid = ratio_grid(len(request.tables), request.solver.ratio_steps)
    by_key: dict[object, list[int]] = {}
    widest: dict[object, int] = {}
    choices = [table_layouts(request, table) for table in request.tables]
    for index, table in enumerate(request.tables):
        for layout in choices[index]:
            if Mode.CACHING in allowed_modes(request, table, layout) and table.ratio not in (0, 1):
                shared = _shared_cache(table, layout)
                widest[shared] = max(widest.get(shared, 0), layout.shard(table, request.topology).dim)
        by_key.setdefault(table.fuse_key, []).append(index)
    groups = tuple(_group(request, tuple(indices), grid, choices, widest, watch) for indices in by_key.values())
    return PlacementProblem(groups, budgets(request))


def budgets(request: PlanRequest) -> FloatArray:
    """(2,) units that tables may use: HBM of a rank without the runtime's workspace, and memory of a host."""
    topology = request.topology
    workspace = request.profile.costs(request.runtime).workspace_bytes if request.tables else 0
    hbm = max(0, topology.hbm_budget - workspace) if topology.hbm_bytes else 0
    host = np.inf if topology.host_budget is None else topology.host_budget // PAGE * PAGE / UNIT
    return np.array([hbm // PAGE * PAGE / UNIT, host])


def whole_shards(request: PlanRequest, layout: Layout) -> FloatArray:
    """(3,) what to multiply the time, HBM and memory of a table's options by, to have those of one shard.

    Time and HBM are those of the rank, or of each rank of the host, that the shard is on; memory is that of its host.
    A table that is everywhere has what it has.
    """
    if layout.scope is Scope.EVERYWHERE:
        return np.ones(3)
    places = layout.places(request.topology) / layout.pieces
    hosts = request.topology.ranks // request.topology.local_ranks / layout.pieces
    return np.array([places, places, hosts])


def _in_time(request: PlanRequest, watch: Watch | None) -> None:
    if watch is not None and watch.is_over():
        what = f"is over before the placements of {len(request.tables)} tables are priced"
        remedy = "give more time, fewer tables or fewer ratio_steps"
        raise InvalidInputError("solver.time_limit_s", request.solver.time_limit_s, what, remedy)


def _shared_cache(table: Table, layout: Layout) -> object:
    """What is equal for tables whose caches may be one: TorchRec fuses tables that are spread alike."""
    return (table.fuse_key, layout.sharding)


def _group(
    request: PlanRequest,
    indices: tuple[int, ...],
    grid: FloatArray,
    layouts: list[tuple[Layout, ...]],
    widest: dict[object, int],
    watch: Watch | None,
) -> Group:
    tables = [request.tables[index] for index in indices]
    held = [(t.ratio, index) for t, index in zip(tables, indices, strict=True) if t.ratio and t.ratio < 1]
    pinned = {ratio: index for ratio, index in held if layouts[index] == (ROW_WISE,)}
    most = 2 if request.runtime is Runtime.DYNAMICEMB else 1
    if len(pinned) > most:
        raise _contradiction(request, sorted(pinned.values())[: most + 1])
    own = np.unique(np.concatenate([grid, [ratio for ratio, _ in held]]))
    coarse = np.unique(np.concatenate([_thinned(grid, len(request.tables)), [ratio for ratio, _ in held]]))
    options: list[TableOptions] = []
    for index, table in zip(indices, tables, strict=True):
        _in_time(request, watch)
        parts = []
        for layout in layouts[index]:
            ratios = own if layout == ROW_WISE or len(layouts[index]) == 1 else coarse
            parts.append(table_options(request, table, ratios, layout, widest.get(_shared_cache(table, layout), 0)))
        usable = any(part.modes for part in parts)
        what = "modes" if table.modes else "ratio"
        remedy = "allow another mode or ratio, or lower samples_per_rank or prefetch_depth"
        given = [mode.value for mode in table.modes] if table.modes else table.ratio
        require(usable, f"tables[{index}].{what}", given, "leaves the table no placement that can run", remedy)
        options.append(_worthwhile(request, _joined(parts)))
    group = _arrays(request, indices, options)
    pinned_any = any(table.modes or table.ratio is not None for table in tables)
    if group.bound and pinned_any and (rows := enumerate_combinations(group).conflict()):
        raise _contradiction(request, [indices[row] for row in rows])
    return group


def _thinned(grid: FloatArray, tables: int) -> FloatArray:
    most = next(steps for limit, steps in _COARSE if tables <= limit)
    return grid if len(grid) <= most else grid[np.unique(np.linspace(0, len(grid) - 1, most).round().astype(np.int64))]


def _joined(parts: list[TableOptions]) -> TableOptions:
    layouts = tuple(layout for part in parts for layout in part.layouts)
    modes = tuple(mode for part in parts for mode in part.modes)
    names = ("ratios", "time", "hbm", "host")
    return TableOptions(layouts, modes, *(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _arrays(request: PlanRequest, indices: tuple[int, ...], options: list[TableOptions]) -> Group:
    """The group of some tables: a column for each layout, mode and ratio that one of them has."""
    costs = request.profile.costs(request.runtime)
    named = [list(zip(o.layouts, o.modes, o.ratios.tolist(), strict=True)) for o in options]
    keys = sorted({key for own in named for key in own}, key=lambda key: (key[0].scope, key[0].sharding, *_order(key)))
    modules = tuple(Module(m, r, fixed_seconds(costs, m), _side(request.runtime, m, lay), lay) for lay, m, r in keys)
    where = {key: column for column, key in enumerate(keys)}
    shape = (len(indices), len(modules))
    time, hbm, host = np.full(shape, np.inf), np.zeros(shape), np.zeros(shape)
    for row, (option, own) in enumerate(zip(options, named, strict=True)):
        columns = [where[key] for key in own]
        time[row, columns], hbm[row, columns], host[row, columns] = option.time, option.hbm / UNIT, option.host / UNIT
    return Group(indices, modules, time, hbm, host, bound=len(indices) > 1)


def _order(key: tuple[Layout, Mode, float]) -> tuple[object, ...]:
    layout, mode, ratio = key
    return (layout.pieces, mode, ratio)


def _worthwhile(request: PlanRequest, options: TableOptions) -> TableOptions:
    """The options whose shards fit on a rank and its host, unless none does, and that no other one beats."""
    layouts = list(dict.fromkeys(options.layouts))
    if len(layouts) == 1 and layouts[0].scope is Scope.EVERYWHERE:
        return options
    layout_of = np.array([layouts.index(layout) for layout in options.layouts], dtype=np.int64)
    scale = np.array([whole_shards(request, layout) for layout in layouts]).reshape(-1, 3)[layout_of]
    figures = np.stack([options.time, options.hbm / UNIT, options.host / UNIT], axis=1)
    whole, budget = figures * scale, budgets(request)
    everywhere = np.array([layout.scope is Scope.EVERYWHERE for layout in layouts], dtype=bool)[layout_of]
    kept = np.all(whole[:, 1:] <= budget + SLACK, axis=1) | everywhere
    if not kept.any():
        kept[:] = True
    if len(layouts) > 1:
        measures = np.concatenate([figures, whole], axis=1)
        named = zip(options.layouts, options.modes, options.ratios.tolist(), strict=True)
        runs: dict[tuple[object, ...], list[int]] = {}
        for option, (layout, mode, ratio) in enumerate(named):
            if kept[option]:
                runs.setdefault(Module(mode, ratio, 0.0, 0, layout).opening, []).append(option)
        for options_of_run in runs.values():
            if 1 < len(options_of_run) <= _MOST_COMPARED:
                own = np.array(options_of_run)
                kept[own[_beaten(measures[own])]] = False
    return options.only(np.flatnonzero(kept))


def _beaten(measures: FloatArray) -> npt.NDArray[np.bool_]:
    """Which of (options, measures) another one is no worse than in everything, the first of equal ones excepted."""
    no_worse = np.all(measures[None, :, :] <= measures[:, None, :], axis=2)
    equal = no_worse & no_worse.T
    earlier = np.tri(len(measures), k=-1, dtype=bool)
    beaten: npt.NDArray[np.bool_] = (no_worse & (~equal | earlier)).any(axis=1)
    return beaten


def _contradiction(request: PlanRequest, indices: list[int]) -> InvalidInputError:
    """Tables that fuse share one ratio a kind of storage: other pins contradict each other."""
    index, table = indices[-1], request.tables[indices[-1]]
    others = ", ".join(_pins(request.tables[i]) for i in indices[:-1])
    what = f"contradicts {others}: {table.name!r} fuses with them, and fused tables share their modes and ratios"
    remedy = "pin them alike, leave one open, or give one another group"
    given = [mode.value for mode in table.modes] if table.ratio is None else table.ratio
    return InvalidInputError(f"tables[{index}].{'modes' if table.ratio is None else 'ratio'}", given, what, remedy)


def _pins(table: Table) -> str:
    ratio = "" if table.ratio is None else f" ratio {table.ratio:g}"
    modes = "" if not table.modes else f" modes {'|'.join(mode.value for mode in table.modes)}"
    return f"{table.name!r} ({(modes + ratio).strip() or 'open'})"


def without_rank(request: PlanRequest, problem: PlacementProblem) -> list[int]:
    """Tables of which no shard fits on a rank and its host, whatever its layout, mode and ratio."""
    found = []
    for group in problem.groups:
        scale = np.array([whole_shards(request, module.layout) for module in group.modules])
        hbm, host = group.hbm * scale[:, 1], group.host * scale[:, 2]
        fits = (hbm <= problem.budget[0] + SLACK) & (host <= problem.budget[1] + SLACK) & np.isfinite(group.time)
        placed = np.array([module.layout.scope is not Scope.EVERYWHERE for module in group.modules])
        spread = (np.isfinite(group.time) & ~placed).any(axis=1)
        found += [group.tables[row] for row in np.flatnonzero(~fits.any(axis=1) & ~spread)]
    return found


def _side(runtime: Runtime, mode: Mode, layout: Layout) -> int:
    """DynamicEmb pools the ratio of all tables without caching; TorchRec's kernels without a cache have no ratio.

    Only row-wise tables share their ratio.
    """
    if layout != ROW_WISE:
        return -1
    if mode is Mode.CACHING:
        return 0
    return 1 if runtime is Runtime.DYNAMICEMB else -1
