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
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from evenkeel.placement.access import BoolArray, Eviction, FloatArray, IntArray, shared_cache
from evenkeel.placement.fields import InvalidInputError, TimeIsUpError, require
from evenkeel.placement.hardware import Runtime
from evenkeel.placement.layouts import ROW_WISE, TABLE_WISE, Layout, Scope
from evenkeel.placement.options import (
    PAGE,
    Options,
    RankLoad,
    allowed_modes,
    mixing_seconds,
    ratio_grid,
    table_layouts,
    table_options,
)
from evenkeel.placement.request import Mode, PlanRequest, Sharding, Table, Watch

Agreement = tuple[Hashable, float | FloatArray, float | FloatArray]
"""What is agreed on, and two numbers that say what it would be, for each of some options or for all of them."""
Choice = IntArray
"""(tables,) an option of each."""

UNIT = float(1 << 20)
"""Bytes in a unit of the solver: sizes are multiples of a page, so units of 1 MiB are exact in floating point."""
SLACK = 1e-6
"""Units by which sums of floating point may exceed a budget."""
_COARSE = ((30, 40), (150, 20), (np.inf, 10))
"""Ratios of layouts that are not row-wise, by the number of tables; each table has a ratio of its own there."""
_MODES = list(Mode)
_POOLED_ONLY = {Sharding.TABLE_ROW_WISE, Sharding.GRID}


@dataclass(frozen=True)
class Problem:
    """The options of all tables in one list, and two budgets.

    Attributes:
        starts: (tables + 1,) table `t` has the options from `starts[t]` up to `starts[t + 1]`.
        layout: (options,) how the table is spread.
        scope: (options,) the layout's scope.
        pieces: (options,) parts that its width is cut into.
        mode: (options,) its mode.
        ratio: (options,) fraction of the rows that HBM holds; of a shared cache, of all tables that could share it.
        held: (options,) fraction of the table's own rows that HBM holds.
        rows: (options,) rows of it that HBM holds on one rank.
        seconds: (options,) kernel time of a step on the average rank; infinite where the table may not choose it.
        hbm: (options,) HBM on the average rank, in units.
        host: (options,) memory on the average host, in units.
        scale: (options, 3) what seconds, HBM and memory are multiplied by to be those of one shard.
        terms: (options, most) numbers of the agreements that it is part of, by what is chosen; -1 for none.
        subject: (agreements,) number of what each is about: of two about the same not both can be.
        group: (tables,) number of the tables that each fuses with; those that have none to fuse with share a number.
        mixing: (groups,) seconds more where some of the tables are cached and others not.
        budget: (2,) HBM of a rank and memory of a host in units; infinite where there is no limit.
    """

    starts: IntArray
    layout: npt.NDArray[np.object_]
    scope: IntArray
    pieces: IntArray
    mode: npt.NDArray[np.object_]
    ratio: FloatArray
    held: FloatArray
    rows: FloatArray
    seconds: FloatArray
    hbm: FloatArray
    host: FloatArray
    scale: FloatArray
    terms: IntArray
    subject: IntArray
    group: IntArray
    mixing: FloatArray
    budget: FloatArray

    @property
    def num_tables(self) -> int:
        """Number of tables."""
        return len(self.group)

    @cached_property
    def table(self) -> IntArray:
        """(options,) the table of each."""
        return np.repeat(np.arange(self.num_tables), np.diff(self.starts))

    @cached_property
    def shards(self) -> FloatArray:
        """(options, 3) time, HBM and host memory of a shard."""
        means = np.stack([self.seconds, self.hbm, self.host], axis=1)
        result: FloatArray = means * self.scale
        return result

    @cached_property
    def cached(self) -> BoolArray:
        """(options,) whether each is a cache."""
        return np.array(self.mode == Mode.CACHING, dtype=bool)

    @property
    def has_shards(self) -> bool:
        """Whether a table may have shards that are not on all ranks."""
        return bool((self.scope != Scope.EVERYWHERE).any())

    def least(self, values: FloatArray) -> FloatArray:
        """(tables,) the least of (options,) values."""
        found: FloatArray = np.minimum.reduceat(values, self.starts[:-1])
        return found

    def cheapest(self, values: FloatArray) -> Choice:
        """The first option of each table with the least of (options,) values."""
        return cheapest(values, self.starts[:-1], self.table)

    def priced(self, prices: FloatArray) -> FloatArray:
        """(options,) seconds, and what is taken of both budgets at (2,) prices."""
        cost: FloatArray = self.seconds + prices[0] * self.hbm + prices[1] * self.host
        return cost

    def with_budget(self, hbm: float, host: float) -> Problem:
        """The same problem under other budgets, in units."""
        return replace(self, budget=np.array([hbm, host]))

    def without(self, closed: BoolArray) -> Problem:
        """The problem without some of the (options,)."""
        return replace(self, seconds=np.where(closed, np.inf, self.seconds))

    def minimising(self, resource: int) -> Problem:
        """The same problem with the use of one budget (0 HBM, 1 host) as its cost, and that budget lifted."""
        budget, scale = self.budget.copy(), self.scale[:, [1 + resource, 1, 2]]
        budget[resource] = np.inf
        seconds = np.where(np.isfinite(self.seconds), (self.hbm, self.host)[resource], np.inf)
        return replace(self, seconds=seconds, scale=scale, mixing=0 * self.mixing, budget=budget)

    def limited(self, most: float = np.inf) -> Problem:
        """The problem without shards that fit on no rank or host, or that take a rank longer than `most`."""
        limits = np.array([most, *(self.budget + SLACK)])
        return self.without(np.any(self.shards > limits, axis=1))

    def cost(self, choice: Choice) -> float:
        """The cost of a choice on the average rank."""
        return float(self.seconds[choice].sum()) + self.mixed(choice)

    def mixed(self, choice: Choice) -> float:
        """Seconds more for groups of which some tables are cached and others not."""
        kinds = np.unique(2 * self.group + self.cached[choice])
        return float(self.mixing[np.bincount(kinds // 2, minlength=len(self.mixing)) > 1].sum())

    def usage(self, choice: Choice) -> FloatArray:
        """(2,) HBM and host memory of a choice on the average rank and host, in units."""
        return np.array([self.hbm[choice].sum(), self.host[choice].sum()])

    def fits(self, choice: Choice) -> bool:
        """Whether a choice keeps both budgets on the average rank and host."""
        return bool(np.all(self.usage(choice) <= self.budget + SLACK))

    def is_agreed(self, choice: Choice) -> bool:
        """Whether tables agree on what they must agree on."""
        terms = np.unique(self.terms[choice])
        subjects = self.subject[terms[terms >= 0]]
        return len(np.unique(subjects)) == len(subjects)

    def least_shard(self, resource: int) -> float:
        """The largest shard that some rank must hold: time (0), HBM (1) or host memory (2) of no plan is less."""
        shards = np.where(np.isfinite(self.seconds), self.shards[:, resource], np.inf)
        return float(self.least(shards).max())


def cheapest(values: FloatArray, starts: IntArray, rows: IntArray) -> IntArray:
    """The first of the least of (options,) values of each row: those from a start up to the next one."""
    at = np.flatnonzero(values == np.minimum.reduceat(values, starts)[rows])
    found: IntArray = at[np.searchsorted(rows[at], np.arange(len(starts)))]
    return found


def budgets(request: PlanRequest) -> FloatArray:
    """(2,) units that tables may use: HBM of a rank without the runtime's workspace, and memory of a host."""
    sizes = (request.topology.hbm_bytes, request.topology.host_bytes)
    return np.array([np.inf if size is None else budget_of(request, b)(size) for b, size in enumerate(sizes)])


def budget_of(request: PlanRequest, resource: int) -> Callable[[int], float]:
    """The units that tables may use of so many bytes: HBM of a rank (0), or memory of a host (1)."""
    workspace = 0 if resource else request.profile.costs(request.runtime).workspace_bytes
    return lambda size: max(0, request.topology.usable(resource, size) - workspace) // PAGE * PAGE / UNIT


def build_problem(request: PlanRequest, grid: FloatArray | None = None, *, watch: Watch | None = None) -> Problem:
    """The optimisation problem of `request`, by default on the ratios of `ratio_grid`.

    Raises:
        InvalidInputError: If a table has nothing to choose from, or if time is up.
    """
    grid = ratio_grid(len(request.tables), request.solver.ratio_steps) if grid is None else grid
    _check_cuts(request)
    fused: dict[object, list[int]] = {}
    for index, table in enumerate(request.tables):
        fused.setdefault(table.fuse_key, []).append(index)
    alone = [indices[0] for indices in fused.values() if len(indices) == 1]
    groups = [*(indices for indices in fused.values() if len(indices) > 1), *([alone] if alone else [])]
    found: list[_Found] = []
    group, mixing = np.zeros(len(request.tables), dtype=np.int64), np.zeros(len(groups))
    for number, indices in enumerate(groups):
        own, group[indices] = _group(request, indices, grid, watch), number
        found += own
        if request.runtime is Runtime.TORCHREC and indices is not alone:
            mixes = len({each.options.mode is Mode.CACHING for each in own}) > 1
            mixing[number] = mixing_seconds(request, [request.tables[index] for index in indices]) if mixes else 0.0
    found.sort(key=lambda each: each[:2])  # of options as fast as each other a search takes the first: the narrowest
    layouts = [each.options.layout for each in found]
    sizes = [len(each.options.ratio) for each in found]
    columns = {
        name: np.concatenate([getattr(each.options, name) for each in found]) / unit
        for name, unit in {"ratio": 1, "held": 1, "rows": 1, "seconds": 1, "hbm": UNIT, "host": UNIT}.items()
    }
    terms, subject = _numbered(found, sizes)
    return Problem(
        starts=np.searchsorted(np.repeat([each.table for each in found], sizes), np.arange(len(request.tables) + 1)),
        layout=np.repeat(np.array(layouts, dtype=object), sizes),
        scope=np.repeat(np.array([layout.scope for layout in layouts]), sizes),
        pieces=np.repeat(np.array([layout.pieces for layout in layouts]), sizes),
        mode=np.repeat(np.array([each.options.mode for each in found], dtype=object), sizes),
        **columns,
        scale=np.repeat([layout.shard(request.topology) for layout in layouts], sizes, axis=0),
        terms=terms,
        subject=subject,
        group=group,
        mixing=mixing,
        budget=budgets(request),
    )


class _Found(NamedTuple):
    """Options of a table, the width of the cache that they share, and what they want others to agree on."""

    table: int
    width: int
    options: Options
    agreements: list[Agreement]


def _group(request: PlanRequest, indices: list[int], grid: FloatArray, watch: Watch | None) -> list[_Found]:
    """The options of tables with one fuse key, or of all that have no other to fuse with."""
    is_fused = len({request.tables[index].fuse_key for index in indices}) < len(indices)
    pins = [t.ratio for t in (request.tables[index] for index in indices) if t.ratio and t.ratio < 1]
    fine, coarse = (np.unique([*ratios, *pins]) for ratios in (grid, _thinned(grid, len(request.tables))))
    shares_caches = is_fused and request.runtime is Runtime.TORCHREC
    shared = shared_caches(request, indices, fine, watch) if shares_caches else {}
    pinned = _pinned_caches(request, indices, watch) if shares_caches else {}
    every = [
        _options(request, index, (fine, shared.get(index)), (coarse, pinned.get(index)), watch) for index in indices
    ]
    cached = {(each.layout.sharding, each.dim) for own in every for each in own if each.mode is Mode.CACHING}
    found = []
    for index, options in ((index, options) for index, own in zip(indices, every, strict=True) for options in own):
        table, sharding, is_cache = request.tables[index], options.layout.sharding, options.mode is Mode.CACHING
        agreements: list[Agreement] = []
        if is_fused and request.runtime is Runtime.DYNAMICEMB:
            agreements = [(("ratio", table.fuse_key, is_cache), _MODES.index(options.mode), options.ratio)]
        if sharding is Sharding.COLUMN_WISE and not table.pooled:
            agreements = [(("columns", table.group), 0, options.dim)]
        if not (shares_caches and is_cache):
            found.append(_Found(index, options.dim if shares_caches else 0, options, agreements))
            continue
        for width in (dim for kind, dim in cached if kind is sharding and dim >= options.dim):
            own_ratio = options.ratio if options.layout == ROW_WISE else 0
            agreed: Agreement = (("cache", table.fuse_key, sharding), own_ratio, width)
            wider = options._replace(hbm=options.hbm + (width - options.dim) * options.slot_bytes)
            found.append(_Found(index, width, wider, [agreed, *agreements]))
    return found


def _numbered(found: list[_Found], sizes: list[int]) -> tuple[IntArray, IntArray]:
    """(options, most) numbers of agreements, ascending with what is chosen, and (agreements,) what each is about."""
    subjects: dict[Hashable, int] = {}
    keys = np.full((max((len(each.agreements) for each in found), default=0), sum(sizes), 3), -1.0)
    for each, end, size in zip(found, np.cumsum(sizes).tolist(), sizes, strict=True):
        for slot, (what, *choice) in enumerate(each.agreements):
            mine = keys[slot, end - size : end]
            mine[:, 0] = subjects.setdefault(what, len(subjects))
            mine[:, 1], mine[:, 2] = choice
    rows, numbers = keys.reshape(-1, 3), np.zeros(keys.shape[0] * keys.shape[1], dtype=np.int64)
    for column in rows.T:  # much quicker than to sort rows
        values, own = np.unique(column, return_inverse=True)
        numbers = numbers * len(values) + own
    _, first, numbers = np.unique(numbers, return_index=True, return_inverse=True)
    every = rows[first]
    none = int((every[:, 0] < 0).sum())  # the first one, where there is any
    return numbers.reshape(keys.shape[:2]).T - none, every[none:, 0].astype(np.int64)


def shared_caches(
    request: PlanRequest, indices: list[int], ratios: FloatArray, watch: Watch | None = None
) -> dict[int, FloatArray]:
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
    return _held(request, able, ROW_WISE, sum(request.tables[index].rows for index in able) * ratios, watch)


def _pinned_caches(request: PlanRequest, indices: list[int], watch: Watch | None) -> dict[int, FloatArray]:
    """Of each table that must be cached on one rank, at a given ratio, the fraction of its rows in the cache.

    The tables of a rank share a cache of all the rows that they are given. Which these are is open: every rank counts
    as if it had its part of all of them. Where ratios are the planner's to choose, a table is priced on its own.
    """
    able, slots = [], 0.0
    for index, table in ((index, request.tables[index]) for index in indices):
        recent = table.eviction is Eviction.LRU and table_layouts(request, table) == (TABLE_WISE,)
        if recent and table.ratio and allowed_modes(request, table, TABLE_WISE) == (Mode.CACHING,):
            able.append(index)
            slots += table.rows * table.ratio
    return _held(request, able, TABLE_WISE, np.array([slots]), watch)


def _held(
    request: PlanRequest, indices: list[int], layout: Layout, slots: FloatArray, watch: Watch | None
) -> dict[int, FloatArray]:
    """Of tables that share a cache, the fraction of the rows of each there at each size of it."""
    if len(indices) < 2:
        return {}
    rows = [request.tables[index].rows for index in indices]
    keys = []
    for index in indices:
        _check_time(request, watch)
        keys.append(RankLoad(request, request.tables[index], layout).keys)
    held = shared_cache(keys, rows, slots) / np.array(rows)[:, None]
    return dict(zip(indices, np.clip(held, 1e-9, 1 - 1e-9), strict=True))


_Ratios = tuple[FloatArray, FloatArray | None]
"""Of a layout, and of the rows of a table in a cache that it shares."""


def _options(request: PlanRequest, index: int, by_rows: _Ratios, others: _Ratios, watch: Watch | None) -> list[Options]:
    """All placements of one table."""
    _check_time(request, watch)
    table, found = request.tables[index], []
    try:
        for layout in table_layouts(request, table):
            grid, held = by_rows if layout == ROW_WISE else others
            own = None if held is None else np.broadcast_to(held, grid.shape)
            found += table_options(request, table, grid, layout, shared=own)
    except OverflowError:
        what = "asks for more bytes or lookups than can be counted"
        remedy = "lower ids_per_sample, features or step.samples_per_rank, or plan for fewer ranks"
        raise InvalidInputError(f"tables[{index}].ids_per_sample", table.ids_per_sample, what, remedy) from None
    if not found:
        raise _unable(request, table).under(f"tables[{index}]")
    return found


def _check_time(request: PlanRequest, watch: Watch | None) -> None:
    if watch is not None and watch.is_over():
        what = f"is over before the placements of {len(request.tables)} tables are priced"
        remedy = "give more time, fewer tables or fewer ratio_steps"
        raise TimeIsUpError("solver.time_limit_s", request.solver.time_limit_s, what, remedy)


def _unable(request: PlanRequest, table: Table) -> InvalidInputError:
    """Why a table can be nowhere."""
    given = [mode.value for mode in table.modes] if table.modes else table.ratio
    load = RankLoad(request, table)
    share = load.unique * request.step.prefetch_depth * load.parts / table.rows
    what = f"is a cache of less than the rows of a step, which are {share:.2g} of all"
    remedy = "raise ratio, lower samples_per_rank or prefetch_depth, or allow another mode"
    if request.topology.hbm_bytes == 0:
        what, remedy = "takes HBM, and topology.hbm_bytes is 0", "give hbm_bytes, or allow HOST_ONLY"
    elif not allowed_modes(request, table, table_layouts(request, table)[0]):
        what, remedy = "is not for data_parallel tables, which are all in HBM", "allow HBM_ONLY, or other sharding"
    return InvalidInputError("modes" if table.modes else "ratio", given, what, remedy)


def _thinned(grid: FloatArray, tables: int) -> FloatArray:
    most = next(steps for limit, steps in _COARSE if tables <= limit)
    return grid if len(grid) <= most else grid[np.unique(np.linspace(0, len(grid) - 1, most).round().astype(np.int64))]


def _check_cuts(request: PlanRequest) -> None:
    """Refuses sequence tables of one collection that can only be cut, where no width is one that all can have."""
    common: dict[str, tuple[int, set[int]]] = {}
    for index, table in enumerate(request.tables):
        if table.pooled or not set(table.shardings) - _POOLED_ONLY <= {Sharding.COLUMN_WISE}:
            continue
        widths = {table.dim // layout.pieces for layout in table_layouts(request, table)}
        first, known = common.get(table.group, (index, widths))
        common[table.group] = (first, known & widths)
        what = f"leaves {table.name!r} no width that {request.tables[first].name!r} of the same collection can have too"
        remedy = "TorchRec exchanges sequences of one width: allow row_wise, or make their widths multiples of one"
        shardings = [sharding.value for sharding in table.shardings]
        require(bool(known & widths), f"tables[{index}].sharding", shardings, what, remedy)
