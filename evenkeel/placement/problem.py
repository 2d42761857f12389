"""The optimisation problem: tables, what each may choose from, what fused tables must agree on, and two budgets.

DynamicEmb's fused tables share one ratio with a cache and one without. The row-wise tables of a TorchRec kernel share
a cache: its rows are for those keys of all tables that were looked up last, so a table that is looked up more has more
of them. What is agreed on is how long a key stays, named by the ratio of all rows that stay so long. Caches of TorchRec
have rows as wide as the widest table that is cached in them, so the width is agreed on as well: a wider one takes more
bytes, a narrower one cannot hold a wider table. Column shards of the sequence tables of one collection have one width.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from evenkeel.placement.access import Eviction, shared_cache
from evenkeel.placement.invalid_input import InvalidInputError, TimeIsUpError, require
from evenkeel.placement.layouts import ROW_WISE, TABLE_WISE, Layout, Scope
from evenkeel.placement.limits import Watch
from evenkeel.placement.model import Mode, Runtime, Sharding, Table
from evenkeel.placement.options import (
    PAGE,
    Option,
    allowed_modes,
    mixing,
    rank_load,
    ratio_grid,
    table_layouts,
    table_options,
)
from evenkeel.placement.request import PlanRequest

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Agreement = tuple[Hashable, Hashable]
"""What is agreed on, and what it would be."""
Choice = tuple[IntArray, ...]
"""For each group, the module of each of its tables."""

UNIT = float(1 << 20)
"""Bytes in a unit of the solver: sizes are multiples of a page, so units of 1 MiB are exact in floating point."""
SLACK = 1e-6
"""Units by which sums of floating point may exceed a budget."""
_COARSE = ((30, 40), (150, 20), (np.inf, 10))
"""Ratios of layouts that are not row-wise, by the number of tables; each table has a ratio of its own there."""
_POOLED_ONLY = {Sharding.TABLE_ROW_WISE, Sharding.GRID}


@dataclass(frozen=True, slots=True)
class Module:
    """A layout, a mode and a ratio that a table may choose.

    Attributes:
        layout: How the table is spread.
        mode: The mode.
        ratio: Fraction of the rows that HBM holds; of a shared cache, of the rows of all tables that could share it.
        agreements: What other tables must agree on if one chooses this.
    """

    layout: Layout
    mode: Mode
    ratio: float
    agreements: tuple[Agreement, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """Tables with the same modules to choose from.

    Attributes:
        tables: Indices of the tables in the request.
        modules: The modules.
        seconds: (tables, modules) kernel time of a step on the average rank; infinite where a table has no such choice.
        hbm: (tables, modules) HBM on the average rank, in units.
        host: (tables, modules) memory on the average host, in units.
        held: (tables, modules) fraction of a table's rows that HBM holds.
        scale: (3, modules) what seconds, HBM and memory are multiplied by to be those of one shard.
        mixing: Seconds a step more where some of the tables are cached and others not, which no search knows of.
    """

    tables: tuple[int, ...]
    modules: tuple[Module, ...]
    seconds: FloatArray
    hbm: FloatArray
    host: FloatArray
    held: FloatArray
    scale: FloatArray
    mixing: float = 0.0

    def shard(self, row: int, module: int) -> FloatArray:
        """(3,) time, HBM and host memory of a shard of a table."""
        mean = np.array([self.seconds[row, module], self.hbm[row, module], self.host[row, module]])
        result: FloatArray = mean * self.scale[:, module]
        return result


@dataclass(frozen=True, slots=True)
class Problem:
    """Groups and budgets.

    Attributes:
        groups: The groups.
        budget: (2,) HBM of a rank and memory of a host in units; infinite where there is no limit.
    """

    groups: tuple[Group, ...]
    budget: FloatArray

    def with_budget(self, hbm: float, host: float) -> Problem:
        """The same problem under other budgets, in units."""
        return Problem(self.groups, np.array([hbm, host]))

    def minimising(self, resource: int) -> Problem:
        """The same problem with the use of one budget (0 HBM, 1 host) as its cost, and that budget lifted."""
        budget = self.budget.copy()
        budget[resource] = np.inf
        groups = []
        for group in self.groups:
            use, scale = (group.hbm, group.host)[resource], group.scale.copy()
            scale[0] = scale[1 + resource]
            groups.append(replace(group, seconds=np.where(np.isfinite(group.seconds), use, np.inf), scale=scale))
        return Problem(tuple(groups), budget)

    def limited(self, most: float = np.inf) -> Problem:
        """The problem without shards that fit on no rank or host, or that take a rank longer than `most`."""
        groups = []
        for group in self.groups:
            fits = group.seconds * group.scale[0] <= most
            fits &= group.hbm * group.scale[1] <= self.budget[0] + SLACK
            fits &= group.host * group.scale[2] <= self.budget[1] + SLACK
            groups.append(replace(group, seconds=np.where(fits, group.seconds, np.inf)))
        return Problem(tuple(groups), self.budget)

    def without(self, closed: Callable[[Group, Module], bool]) -> Problem:
        """The problem without some modules of groups."""
        groups = []
        for group in self.groups:
            away = np.array([closed(group, module) for module in group.modules])
            groups.append(replace(group, seconds=np.where(away[None, :], np.inf, group.seconds)))
        return Problem(tuple(groups), self.budget)

    def cost(self, choice: Choice) -> float:
        """The cost of a choice on the average rank."""
        pairs = zip(self.groups, choice, strict=True)
        return float(sum(group.seconds[np.arange(len(mine)), mine].sum() for group, mine in pairs))

    def mixing(self, choice: Choice) -> float:
        """Seconds more for groups of which some tables are cached and others not."""
        return sum(
            group.mixing
            for group, mine in zip(self.groups, choice, strict=True)
            if len({group.modules[column].mode is Mode.CACHING for column in mine.tolist()}) > 1
        )

    def usage(self, choice: Choice) -> FloatArray:
        """(2,) HBM and host memory of a choice on the average rank and host, in units."""
        use = np.zeros(2)
        for group, mine in zip(self.groups, choice, strict=True):
            rows = np.arange(len(mine))
            use += [group.hbm[rows, mine].sum(), group.host[rows, mine].sum()]
        return use

    def is_agreed(self, choice: Choice) -> bool:
        """Whether tables agree on what they must agree on."""
        agreed: dict[Hashable, Hashable] = {}
        for group, mine in zip(self.groups, choice, strict=True):
            for module in np.unique(mine).tolist():
                for what, chosen in group.modules[module].agreements:
                    if agreed.setdefault(what, chosen) != chosen:
                        return False
        return True

    @property
    def num_tables(self) -> int:
        """Number of tables."""
        return sum(len(group.tables) for group in self.groups)

    @property
    def has_shards(self) -> bool:
        """Whether a table may have shards that are not on all ranks."""
        return any(m.layout.scope is not Scope.EVERYWHERE for group in self.groups for m in group.modules)

    def least_shard(self, resource: int) -> float:
        """The largest shard that some rank must hold: time (0), HBM (1) or host memory (2) of no plan is less."""
        largest = 0.0
        for group in self.groups:
            measure = (group.seconds, group.hbm, group.host)[resource]
            whole = np.where(np.isfinite(group.seconds), measure, 0.0) * group.scale[resource]
            whole[~np.isfinite(group.seconds)] = np.inf
            largest = max(largest, float(whole.min(axis=1).max(initial=0.0)))
        return largest


def budgets(request: PlanRequest) -> FloatArray:
    """(2,) units that tables may use: HBM of a rank without the runtime's workspace, and memory of a host."""
    topology = request.topology
    workspace = request.profile.costs(request.runtime).workspace_bytes if request.tables else 0
    hbm = max(0, topology.hbm_budget - workspace) if topology.hbm_bytes else 0
    host = np.inf if topology.host_budget is None else topology.host_budget // PAGE * PAGE / UNIT
    return np.array([hbm // PAGE * PAGE / UNIT, host])


def build_problem(request: PlanRequest, grid: FloatArray | None = None, *, watch: Watch | None = None) -> Problem:
    """The optimisation problem of `request`, by default on the ratios of `ratio_grid`.

    Raises:
        InvalidInputError: If a table has nothing to choose from, or if time is up.
        SolveCancelledError: If `watch` says so.
    """
    grid = ratio_grid(len(request.tables), request.solver.ratio_steps) if grid is None else grid
    _check_columns(request)
    fused: dict[object, list[int]] = {}
    for index, table in enumerate(request.tables):
        fused.setdefault(table.fuse_key, []).append(index)
    groups = [_group(request, indices, grid, watch) for indices in fused.values() if len(indices) > 1]
    alone = [indices[0] for indices in fused.values() if len(indices) == 1]
    return Problem((*groups, *([_group(request, alone, grid, watch)] if alone else [])), budgets(request))


def _group(request: PlanRequest, indices: list[int], grid: FloatArray, watch: Watch | None) -> Group:
    """Tables with one fuse key, or all that have no other to fuse with."""
    is_fused = len({request.tables[index].fuse_key for index in indices}) < len(indices)
    pins = [t.ratio for t in (request.tables[index] for index in indices) if t.ratio and t.ratio < 1]
    fine, coarse = (np.unique([*ratios, *pins]) for ratios in (grid, _thinned(grid, len(request.tables))))
    shares_caches = is_fused and request.runtime is Runtime.TORCHREC
    shared = shared_caches(request, indices, fine) if shares_caches else {}
    pinned = pinned_caches(request, indices) if shares_caches else {}
    options = [_options(request, index, fine, coarse, shared.get(index), pinned.get(index), watch) for index in indices]
    cached = {(each.layout.sharding, each.dim) for own in options for each in own if each.mode is Mode.CACHING}
    cells: list[tuple[int, int, Module, float, float, float, float]] = []
    for row, (index, own) in enumerate(zip(indices, options, strict=True)):
        table = request.tables[index]
        for each in own:
            widths = [each.dim]
            if shares_caches and each.mode is Mode.CACHING:
                widths = [dim for sharding, dim in cached if sharding is each.layout.sharding and dim >= each.dim]
            for width in widths:
                agreements = _agreements(request, table, each, width) if is_fused else ()
                agreements += _column_width(request, table, each.layout)
                module = Module(each.layout, each.mode, each.ratio, agreements)
                size = each.hbm + (width - each.dim) * each.slot_bytes
                cells.append((width if shares_caches else 0, row, module, each.seconds, size, each.host, each.held))
    cells.sort(key=lambda cell: cell[0])  # of modules as fast as each other a search takes the first: the narrowest
    modules = {module: column for column, module in enumerate(dict.fromkeys(cell[2] for cell in cells))}
    rows = np.array([cell[1] for cell in cells])
    columns = np.array([modules[cell[2]] for cell in cells])
    values = np.array([cell[3:] for cell in cells])
    seconds = np.full((len(indices), len(modules)), np.inf)
    hbm, host, held = (np.zeros(seconds.shape) for _ in range(3))
    seconds[rows, columns], held[rows, columns] = values[:, 0], values[:, 3]
    hbm[rows, columns], host[rows, columns] = values[:, 1:3].T / UNIT
    scale = np.array([whole_shards(request, module.layout) for module in modules]).T
    mixes = shares_caches and len({module.mode is Mode.CACHING for module in modules}) > 1
    more = mixing(request, [request.tables[index] for index in indices]) if mixes else 0.0
    return Group(tuple(indices), tuple(modules), seconds, hbm, host, held, scale, more)


def shared_caches(request: PlanRequest, indices: list[int], ratios: FloatArray) -> dict[int, FloatArray]:
    """Of each row-wise table that may share a cache, the fraction of its rows there at each ratio of all.

    A ratio that tables are given is that of the tables in the cache. Where it is open which those are, a table counts
    as if it had its part of the rows to itself.
    """
    able = [
        index
        for index in indices
        if request.tables[index].eviction is Eviction.LRU and ROW_WISE in table_layouts(request, request.tables[index])
    ]
    modes = {index: allowed_modes(request, request.tables[index], ROW_WISE) for index in able}
    if any(0 < (request.tables[index].ratio or 0) < 1 for index in able):
        if any(len(own) > 1 for own in modes.values()):
            return {}
        able = [index for index in able if modes[index] == (Mode.CACHING,)]
    if len(able) < 2:
        return {}
    rows = [request.tables[index].rows for index in able]
    keys = [rank_load(request, request.tables[index], ROW_WISE).keys for index in able]
    held = shared_cache(keys, rows, sum(rows) * ratios) / np.array(rows)[:, None]
    return dict(zip(able, np.clip(held, 1e-9, 1 - 1e-9), strict=True))


def pinned_caches(request: PlanRequest, indices: list[int]) -> dict[int, float]:
    """Of each table that must be cached on one rank, at a given ratio, the fraction of its rows in the cache.

    The tables of a rank share a cache of all the rows that they are given. Which these are is open: every rank counts
    as if it had its part of all of them. Where ratios are the planner's to choose, a table is priced on its own.
    """
    able = [
        (index, table, table.ratio)
        for index, table in ((index, request.tables[index]) for index in indices)
        if table.eviction is Eviction.LRU and table.ratio and table_layouts(request, table) == (TABLE_WISE,)
        and allowed_modes(request, table, TABLE_WISE) == (Mode.CACHING,)
    ]  # fmt: skip
    if len(able) < 2:
        return {}
    keys = [rank_load(request, table, TABLE_WISE).keys for _, table, _ in able]
    rows = [table.rows for _, table, _ in able]
    held = shared_cache(keys, rows, np.array([sum(table.rows * ratio for _, table, ratio in able)]))[:, 0] / rows
    return dict(zip((index for index, *_ in able), np.clip(held, 1e-9, 1 - 1e-9).tolist(), strict=True))


def _options(
    request: PlanRequest,
    index: int,
    fine: FloatArray,
    coarse: FloatArray,
    shared: FloatArray | None,
    pinned: float | None,
    watch: Watch | None,
) -> list[Option]:
    """All placements of one table."""
    table = request.tables[index]
    if watch is not None and watch.is_over():
        what = f"is over before the placements of {len(request.tables)} tables are priced"
        remedy = "give more time, fewer tables or fewer ratio_steps"
        raise TimeIsUpError("solver.time_limit_s", request.solver.time_limit_s, what, remedy)
    layouts = table_layouts(request, table)
    try:
        found = []
        for layout in layouts:
            if layout == ROW_WISE:
                found += table_options(request, table, fine, layout, shared=shared)
            else:
                own = None if pinned is None else np.full(len(coarse), pinned)
                found += table_options(request, table, coarse, layout, shared=own)
    except OverflowError:
        what = "asks for more bytes or lookups than can be counted"
        remedy = "lower ids_per_sample, features or step.samples_per_rank, or plan for fewer ranks"
        raise InvalidInputError(f"tables[{index}].ids_per_sample", table.ids_per_sample, what, remedy) from None
    remedy = "allow another mode or ratio, or lower samples_per_rank or prefetch_depth"
    given = [mode.value for mode in table.modes] if table.modes else table.ratio
    field = f"tables[{index}].{'modes' if table.modes else 'ratio'}"
    require(len(found) > 0, field, given, "leaves the table no placement that can run", remedy)
    return found


def _thinned(grid: FloatArray, tables: int) -> FloatArray:
    most = next(steps for limit, steps in _COARSE if tables <= limit)
    return grid if len(grid) <= most else grid[np.unique(np.linspace(0, len(grid) - 1, most).round().astype(np.int64))]


def _agreements(request: PlanRequest, table: Table, option: Option, width: int) -> tuple[Agreement, ...]:
    """What fused tables agree on: ratios, and in TorchRec the width of the cache that they share."""
    cached = option.mode is Mode.CACHING
    if request.runtime is Runtime.DYNAMICEMB:
        return ((("ratio", table.fuse_key, cached), (option.mode, option.ratio)),)
    choice = (option.ratio, width) if option.layout == ROW_WISE else width
    return ((("cache", table.fuse_key, option.layout.sharding), choice),) if cached else ()


def _column_width(request: PlanRequest, table: Table, layout: Layout) -> tuple[Agreement, ...]:
    """Sequence tables of a TorchRec collection are cut at one width, unless those that are given differ."""
    is_cut = request.runtime is Runtime.TORCHREC and layout.sharding is Sharding.COLUMN_WISE and not table.pooled
    if not is_cut or len(_given_widths(request, table.group)) > 1:  # which is refused where the plan is applied
        return ()
    return ((("columns", table.group), table.dim // layout.pieces),)


@lru_cache(maxsize=64)
def _given_widths(request: PlanRequest, group: str) -> frozenset[int]:
    """Widths of column shards that the sequence tables of a collection are given."""
    mine = (t for t in request.tables if t.group == group and not t.pooled and Sharding.COLUMN_WISE in t.shardings)
    return frozenset(table.dim // table.column_shards for table in mine if table.column_shards)


def _check_columns(request: PlanRequest) -> None:
    """Sequence tables of a collection that can only be cut into columns need a width that all of them can have."""
    common: dict[str, tuple[int, set[int]]] = {}
    for index, table in enumerate(request.tables):
        ways = set(table.shardings)
        if request.runtime is not Runtime.TORCHREC or table.pooled or not ways - _POOLED_ONLY <= {Sharding.COLUMN_WISE}:
            continue
        if len(_given_widths(request, table.group)) > 1:
            continue
        widths = {table.dim // layout.pieces for layout in table_layouts(request, table)}
        first, known = common.get(table.group, (index, widths))
        common[table.group] = (first, known & widths)
        what = f"leaves {table.name!r} no width that {request.tables[first].name!r} of the same collection can have too"
        remedy = "TorchRec exchanges sequences of one width: allow row_wise, or make their widths multiples of one"
        given = [sharding.value for sharding in table.shardings]
        require(bool(known & widths), f"tables[{index}].sharding", given, what, remedy)


def whole_shards(request: PlanRequest, layout: Layout) -> FloatArray:
    """(3,) what the time, HBM and memory of the average rank and host are multiplied by to be those of one shard.

    Time and HBM are those of the rank, or of each rank of the host, that the shard is on; memory is that of its host.
    """
    if layout.scope is Scope.EVERYWHERE:
        return np.ones(3)
    places = layout.places(request.topology) / layout.pieces
    hosts = request.topology.ranks // request.topology.local_ranks / layout.pieces
    return np.array([places, places, hosts])


def modes_of(request: PlanRequest) -> set[Mode]:
    """The modes that some table may be in."""
    return {mode for table in request.tables for mode in allowed_modes(request, table)}
