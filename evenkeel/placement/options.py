"""From a request to the optimisation problem: every table's modes and ratios with their bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from evenkeel.placement.combinations import enumerate_combinations
from evenkeel.placement.hit_rates import step_keys
from evenkeel.placement.invalid_input import InvalidInputError, require
from evenkeel.placement.layers import SLACK
from evenkeel.placement.limits import Watch
from evenkeel.placement.model import Mode, Runtime, Sharding, Table
from evenkeel.placement.placement_problem import UNIT, Group, Module, PlacementProblem
from evenkeel.placement.request import PlanRequest
from evenkeel.placement.storage import Footprint, dynamicemb_footprint, round_up, row_bytes
from evenkeel.placement.storage_torchrec import state_bytes, torchrec_footprint
from evenkeel.placement.timing import RankLoad, buffer_bytes, collective_seconds, fixed_seconds, mode_seconds

FloatArray = npt.NDArray[np.float64]

_PAGE = 4096
_SMALLEST_RATIO = 1e-3


@dataclass(frozen=True, slots=True)
class TableOptions:
    """Every placement of one table.

    Attributes:
        modes: Mode of each option.
        ratios: Fraction of the rows that HBM holds.
        time: Seconds a step on a rank that holds the table, or the average over ranks for a table that is on one only.
        hbm: Bytes of HBM on the fullest rank, or averaged over ranks likewise.
        host: Bytes of host memory on the fullest host, or averaged over hosts likewise.
    """

    modes: tuple[Mode, ...]
    ratios: FloatArray
    time: FloatArray
    hbm: FloatArray
    host: FloatArray


def ratio_grid(num_tables: int, steps: int = 0) -> FloatArray:
    """Ratios in (0, 1), evenly spaced with a few small ones before them."""
    steps = steps or (100 if num_tables <= 150 else 50)
    even = np.arange(1, steps) / steps
    small = np.geomspace(_SMALLEST_RATIO, 1 / steps, 6)[:-1] if steps > 1 else np.array([0.1])
    return np.concatenate([small[small < 1 / max(steps, 1)], even]) if steps > 1 else small


def allowed_modes(request: PlanRequest, table: Table) -> tuple[Mode, ...]:
    """The modes that the runtime, the machine and the table leave to choose from."""
    modes = [Mode.HBM_ONLY, Mode.CACHING, Mode.HYBRID, Mode.HOST_ONLY]
    if request.runtime is Runtime.TORCHREC:
        modes.remove(Mode.HYBRID)
    if request.topology.hbm_bytes == 0:
        modes = [Mode.HOST_ONLY]
    elif table.sharding is Sharding.DATA_PARALLEL:
        modes = [Mode.HBM_ONLY]
    return tuple(mode for mode in modes if not table.modes or mode in table.modes)


def shards_of(table: Table, ranks: int) -> tuple[int, int, int]:
    """Rows and width of a shard, and the number of ranks that serve one lookup's key space."""
    if table.sharding is Sharding.ROW_WISE:
        return -(-table.rows // ranks), table.dim, ranks
    if table.sharding is Sharding.COLUMN_WISE:
        return table.rows, table.dim // table.column_shards, 1
    return table.rows, table.dim, 1


def rank_load(request: PlanRequest, table: Table) -> RankLoad:
    """What a step asks of one shard of `table`."""
    ranks, step = request.topology.ranks, request.step
    _, dim, shards = shards_of(table, ranks)
    own = table.ids_per_sample * step.samples_per_rank
    keys = step_keys(table.access, table.rows, own * ranks, table.eviction)
    replicated = table.sharding is Sharding.DATA_PARALLEL
    if replicated:
        keys = step_keys(table.access, table.rows, own, table.eviction)
    outputs = float(step.samples_per_rank * table.features) if table.pooled else own
    follows, _ = state_bytes(table, dim, training=step.training)
    if request.runtime is Runtime.DYNAMICEMB:
        stored, uncached = row_bytes(table, training=step.training) * dim // table.dim, 0
    else:
        stored, uncached = dim * table.value_bytes, follows
    return RankLoad(
        keys=keys,
        unique=keys.unique / shards,
        forward_rows=(keys.unique if request.runtime is Runtime.DYNAMICEMB else keys.lookups) / shards,
        received=keys.lookups / shards,
        served=outputs * (1 if replicated else ranks) if table.pooled else keys.lookups / shards,
        sent=0.0 if replicated else outputs,
        shards=shards,
        embedding_bytes=dim * table.value_bytes,
        row_bytes=stored,
        uncached_state_bytes=uncached,
        training=step.training,
        prefetch_depth=step.prefetch_depth,
    )


def table_options(request: PlanRequest, table: Table, grid: FloatArray, cache_dim: int = 0) -> TableOptions:
    """Every placement of `table` on the ratios of `grid` (or its pinned one), whole-table figures.

    `cache_dim` is the width of the cache that it would share, where the runtime has shared caches.
    """
    profile, topology = request.profile, request.topology
    costs, load = profile.costs(request.runtime), rank_load(request, table)
    columns: list[tuple[Mode, FloatArray, Footprint, FloatArray]] = []
    for mode in allowed_modes(request, table):
        ratios = _ratios_of(mode, table, grid)
        if not len(ratios):
            continue
        footprint = _footprint(request, table, mode, ratios, cache_dim)
        seconds = mode_seconds(profile, costs, load, mode, ratios, footprint.cache_rows.astype(np.float64))
        if mode is Mode.CACHING:
            kept = footprint.cache_rows >= load.unique * load.prefetch_depth
            ratios, seconds = ratios[kept], seconds[kept]
            footprint = Footprint(footprint.hbm[kept], footprint.host[kept], footprint.cache_rows[kept])
        columns.append((mode, ratios, footprint, seconds))
    exchange = collective_seconds(profile, load, topology.ranks, topology.local_ranks)
    if table.sharding is Sharding.DATA_PARALLEL:
        exchange = _allreduce_seconds(request, table)
    hbm, host, time = [], [], []
    for mode, _, footprint, seconds in columns:
        buffers = round_up(int(buffer_bytes(costs, load, mode, topology.ranks)), _PAGE)
        in_hbm, in_host = footprint.hbm + buffers, footprint.host
        if topology.hbm_bytes == 0:
            in_hbm, in_host = in_hbm * 0, in_host + in_hbm
        copies, rank_share, host_share = _spread(table, topology.ranks, topology.local_ranks)
        hbm.append(in_hbm * copies * rank_share)
        host.append(in_host * copies * host_share)
        time.append((seconds + exchange) * copies * rank_share)
    return TableOptions(
        modes=tuple(mode for mode, ratios, _, _ in columns for _ in ratios),
        ratios=_joined([ratios for _, ratios, _, _ in columns]),
        time=_joined(time),
        hbm=_joined(hbm),
        host=_joined(host),
    )


def build_problem(
    request: PlanRequest, grid: FloatArray | None = None, *, watch: Watch | None = None
) -> PlacementProblem:
    """The optimisation problem of `request`.

    Raises:
        InvalidInputError: If the modes or the ratio of a table leave it no placement, if those of tables that fuse
            contradict each other, or if `watch` says that time is up.
        SolveCancelledError: If `watch` says so.
    """
    if grid is None:
        grid = ratio_grid(len(request.tables), request.solver.ratio_steps)
    by_key: dict[object, list[int]] = {}
    widest: dict[object, int] = {}
    for index, table in enumerate(request.tables):
        if Mode.CACHING in allowed_modes(request, table) and table.ratio not in (0, 1):
            shared = _shared_cache(table)
            widest[shared] = max(widest.get(shared, 0), shards_of(table, request.topology.ranks)[1])
        key: object = table.fuse_key if table.sharding is Sharding.ROW_WISE else index
        by_key.setdefault(key, []).append(index)
    groups = tuple(_group(request, tuple(indices), grid, widest, watch) for indices in by_key.values())
    return PlacementProblem(groups, budgets(request))


def _in_time(request: PlanRequest, watch: Watch | None) -> None:
    if watch is not None and watch.is_over():
        what = f"is over before the placements of {len(request.tables)} tables are priced"
        remedy = "give more time, fewer tables or fewer ratio_steps"
        raise InvalidInputError("solver.time_limit_s", request.solver.time_limit_s, what, remedy)


def budgets(request: PlanRequest) -> FloatArray:
    """(2,) units that tables may use: HBM of a rank without the runtime's workspace, and memory of a host."""
    topology = request.topology
    workspace = request.profile.costs(request.runtime).workspace_bytes if request.tables else 0
    hbm = max(0, topology.hbm_budget - workspace) if topology.hbm_bytes else 0
    host = np.inf if topology.host_budget is None else topology.host_budget // _PAGE * _PAGE / UNIT
    return np.array([hbm // _PAGE * _PAGE / UNIT, host])


def _shared_cache(table: Table) -> object:
    """What is equal for tables whose caches may be one: TorchRec fuses row-wise tables, and those of one rank."""
    return (table.fuse_key, table.sharding)


def _group(
    request: PlanRequest,
    indices: tuple[int, ...],
    grid: FloatArray,
    widest: dict[object, int],
    watch: Watch | None,
) -> Group:
    tables = [request.tables[index] for index in indices]
    pinned = {t.ratio: index for t, index in zip(tables, indices, strict=True) if t.ratio and t.ratio < 1}
    most = 2 if request.runtime is Runtime.DYNAMICEMB else 1
    if len(tables) > 1 and len(pinned) > most:
        raise _contradiction(request, sorted(pinned.values())[: most + 1])
    own = np.unique(np.concatenate([grid, np.array(list(pinned), dtype=np.float64)]))
    options = []
    for table in tables:
        _in_time(request, watch)
        options.append(table_options(request, table, own, widest.get(_shared_cache(table), 0)))
    for index, option in zip(indices, options, strict=True):
        table = request.tables[index]
        what = "modes" if table.modes else "ratio"
        remedy = "allow another mode or ratio, or lower samples_per_rank or prefetch_depth"
        given = [mode.value for mode in table.modes] if table.modes else table.ratio
        usable = len(option.modes) > 0
        require(usable, f"tables[{index}].{what}", given, "leaves the table no placement that can run", remedy)
    if tables[0].sharding in (Sharding.TABLE_WISE, Sharding.COLUMN_WISE):
        options = [_fitting(request, tables[0], options[0])]
    costs = request.profile.costs(request.runtime)
    keys = sorted({(mode, ratio) for o in options for mode, ratio in zip(o.modes, o.ratios.tolist(), strict=True)})
    share = _fixed_share(request, tables[0])
    modules = tuple(Module(m, r, share * fixed_seconds(costs, m), _side(request.runtime, m)) for m, r in keys)
    where = {key: column for column, key in enumerate(keys)}
    shape = (len(tables), len(modules))
    time, hbm, host = np.full(shape, np.inf), np.zeros(shape), np.zeros(shape)
    for row, option in enumerate(options):
        columns = [where[key] for key in zip(option.modes, option.ratios.tolist(), strict=True)]
        time[row, columns] = option.time
        hbm[row, columns] = option.hbm / UNIT
        host[row, columns] = option.host / UNIT
    group = Group(indices, modules, time, hbm, host, bound=len(tables) > 1)
    if group.bound and (rows := enumerate_combinations(group).conflict()):
        raise _contradiction(request, [indices[row] for row in rows])
    return group


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
    """Groups of a table of which no shard fits on a rank and its host, whatever its mode and ratio."""
    topology, found = request.topology, []
    for number, group in enumerate(problem.groups):
        table = request.tables[group.tables[0]]
        if table.sharding in (Sharding.TABLE_WISE, Sharding.COLUMN_WISE):
            whole = topology.ranks / table.column_shards
            fits = group.hbm[0] * whole <= problem.budget[0] + SLACK
            fits &= group.host[0] * whole / topology.local_ranks <= problem.budget[1] + SLACK
            if not (fits & np.isfinite(group.time[0])).any():
                found.append(number)
    return found


def _side(runtime: Runtime, mode: Mode) -> int:
    """DynamicEmb pools the ratio of all tables without caching; TorchRec's kernels without a cache have no ratio."""
    if mode is Mode.CACHING:
        return 0
    return 1 if runtime is Runtime.DYNAMICEMB else -1


def _fitting(request: PlanRequest, table: Table, options: TableOptions) -> TableOptions:
    """The options whose shards fit on a rank and its host at all; all of them where none does."""
    topology, budget = request.topology, budgets(request)
    whole = topology.ranks / table.column_shards
    fits = (options.hbm * whole / UNIT <= budget[0]) & (options.host * whole / topology.local_ranks / UNIT <= budget[1])
    if not fits.any():
        return options
    kept = np.flatnonzero(fits)
    modes = tuple(options.modes[index] for index in kept)
    rest = (options.ratios[kept], options.time[kept], options.hbm[kept], options.host[kept])
    return TableOptions(modes, *rest)


def _fixed_share(request: PlanRequest, table: Table) -> float:
    """Part of a module's fixed time that the average rank pays for one table.

    Shards that live on one rank fuse with the others of that rank: with `n` shards on `ranks` ranks, each pays for
    one module of `n / ranks` shards.
    """
    if table.sharding in (Sharding.ROW_WISE, Sharding.DATA_PARALLEL):
        return 1.0
    single = (Sharding.TABLE_WISE, Sharding.COLUMN_WISE)
    shards = sum(other.column_shards for other in request.tables if other.sharding in single)
    return table.column_shards / max(shards, request.topology.ranks)


def _ratios_of(mode: Mode, table: Table, grid: FloatArray) -> FloatArray:
    end = {Mode.HBM_ONLY: 1.0, Mode.HOST_ONLY: 0.0}.get(mode)
    if end is not None:
        return np.array([end] if table.ratio is None or table.ratio == end else [], dtype=np.float64)
    if table.ratio is None:
        return grid
    return np.array([table.ratio] if 0 < table.ratio < 1 else [], dtype=np.float64)


def _footprint(request: PlanRequest, table: Table, mode: Mode, ratios: FloatArray, cache_dim: int) -> Footprint:
    rows, dim, shards = shards_of(table, request.topology.ranks)
    training = request.step.training
    if request.runtime is Runtime.TORCHREC:
        return torchrec_footprint(table, mode, ratios, rows, dim, training=training, cache_dim=cache_dim)
    return dynamicemb_footprint(table, mode, ratios, shards, training=request.step.training)


def _spread(table: Table, ranks: int, local_ranks: int) -> tuple[int, float, float]:
    """Shards of a table, and the part of one shard that the average rank and the average host hold."""
    if table.sharding in (Sharding.ROW_WISE, Sharding.DATA_PARALLEL):
        return 1, 1.0, float(local_ranks)
    copies = table.column_shards
    return copies, 1 / ranks, local_ranks / ranks


def _allreduce_seconds(request: PlanRequest, table: Table) -> float:
    topology, profile = request.topology, request.profile
    if topology.ranks == 1 or not request.step.training:
        return 0.0
    within = topology.ranks <= topology.local_ranks
    rate = profile.intra_host_bytes_per_s if within else profile.inter_host_bytes_per_s
    size = 2 * (topology.ranks - 1) / topology.ranks * table.rows * table.dim * table.value_bytes
    return profile.collective_latency_s + size / rate


def _joined(parts: list[npt.NDArray[Any]]) -> FloatArray:
    return np.concatenate(parts) if parts else np.zeros(0)
