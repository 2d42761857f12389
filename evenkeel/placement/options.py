"""Every placement of one table: its layouts, modes and ratios with their bytes and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from evenkeel.placement.access import different_share, fullest_rank, step_keys
from evenkeel.placement.hardware import NARROW
from evenkeel.placement.layouts import ROW_WISE, Layout, layouts
from evenkeel.placement.model import Mode, Runtime, Sharding, Table, modes_of_ratio
from evenkeel.placement.request import PlanRequest
from evenkeel.placement.storage import (
    Footprint,
    dynamicemb_footprint,
    round_up,
    row_bytes,
    state_bytes,
    torchrec_footprint,
)
from evenkeel.placement.timing import RankLoad, buffer_bytes, exchange_seconds, mode_seconds

FloatArray = npt.NDArray[np.float64]

PAGE = 4096
_SMALLEST_RATIO = 1e-3
_OUTPUT_BYTES = 4
"""Of an element of an output row: float32 in both runtimes, whatever the type of the table."""


class Options(NamedTuple):
    """Placements of a table in one layout and mode.

    Attributes:
        layout: How it is spread.
        mode: Its mode.
        dim: Width of its shards.
        ratio: (ratios,) fraction of the rows that HBM holds: of all tables of a shared cache.
        held: (ratios,) fraction of the rows of this table that HBM holds.
        seconds: (ratios,) kernel time of a step on the average rank; where the table is everywhere, on the fullest.
        hbm: (ratios,) bytes of HBM on the average rank; of a table that is everywhere, on the fullest.
        host: (ratios,) bytes of memory on the average host; of a table that is everywhere, on the fullest.
        slot_bytes: (ratios,) HBM on the average rank for each element by which a shared cache is wider than its shards.
    """

    layout: Layout
    mode: Mode
    dim: int
    ratio: FloatArray
    held: FloatArray
    seconds: FloatArray
    hbm: FloatArray
    host: FloatArray
    slot_bytes: FloatArray


def ratio_grid(num_tables: int, steps: int = 0) -> FloatArray:
    """Ratios in (0, 1), `steps` of them evenly spaced, with small ones before and between the first of them.

    By default 100 for up to 150 tables, and 50 for more; of the small ones each is a sixth above the one before.
    """
    count = steps or (100 if num_tables <= 150 else 50)
    even = np.arange(1, count) / count
    if not len(even):
        return np.array([0.1])
    if steps or num_tables > 150:
        small = np.geomspace(_SMALLEST_RATIO, even[0], 6)[:-1]
        return np.concatenate([small[small < even[0]], even])
    return np.unique(np.concatenate([np.geomspace(_SMALLEST_RATIO, 0.1, 30)[:-1], even]))


def table_layouts(request: PlanRequest, table: Table) -> tuple[Layout, ...]:
    """The layouts to choose from; with DynamicEmb row-wise, the only one that it has, where that is among them."""
    if request.runtime is Runtime.DYNAMICEMB and Sharding.ROW_WISE in table.shardings:
        return (ROW_WISE,)
    return layouts(table, request.topology)


def allowed_modes(request: PlanRequest, table: Table, layout: Layout | None = None) -> tuple[Mode, ...]:
    """The modes that the runtime, the machine, the table and the layout leave to choose from."""
    modes = set(table.modes or Mode)
    if request.runtime is Runtime.TORCHREC:
        modes.discard(Mode.HYBRID)
    if request.topology.hbm_bytes == 0:
        modes &= {Mode.HOST_ONLY}
    elif layout is not None and layout.sharding is Sharding.DATA_PARALLEL:
        modes &= {Mode.HBM_ONLY}
    return tuple(mode for mode in modes_of_ratio(table.ratio) if mode in modes)


def rank_load(request: PlanRequest, table: Table, layout: Layout | None = None) -> RankLoad:
    """What a step asks of one shard of `table`, in its first layout if none is given."""
    layout = layout or table_layouts(request, table)[0]
    ranks, step = request.topology.ranks, request.step
    shard = layout.shard(table, request.topology)
    own = table.ids_per_sample * step.samples_per_rank
    replicated = layout.sharding is Sharding.DATA_PARALLEL
    keys = step_keys(table.access, table.rows, own if replicated else own * ranks, table.eviction)
    outputs = float(step.samples_per_rank * table.features) if table.pooled else own
    follows, _ = state_bytes(table, shard.dim, training=step.training)
    if request.runtime is Runtime.DYNAMICEMB:
        stored, uncached = row_bytes(table, training=step.training) * shard.dim // table.dim, 0
    else:
        stored, uncached = shard.dim * table.value_bytes, follows
    routing = "continuous" if request.runtime is Runtime.TORCHREC else table.dist_type
    fullest = fullest_rank(table.access, table.rows, keys.lookups, shard.parts, routing)
    received = keys.lookups / shard.parts * fullest
    under_way = request.profile.costs(request.runtime).in_flight_bytes / (shard.dim * table.value_bytes)
    return RankLoad(
        keys=keys,
        unique=keys.unique / shard.parts,
        narrow=0.0 if table.pooled or shard.dim > NARROW else received,
        fetched=different_share(table.access, table.rows, keys.lookups, under_way),
        forward_rows=keys.unique / shard.parts if request.runtime is Runtime.DYNAMICEMB else received,
        backward_rows=received if table.weighted else 0.0,
        received=received,
        served=outputs * (1 if replicated else ranks) if table.pooled else received,
        sent=0.0 if replicated else outputs,
        shards=shard.parts,
        embedding_bytes=shard.dim * table.value_bytes,
        output_bytes=shard.dim * _OUTPUT_BYTES,
        key_bytes=12 if table.weighted else 8,
        row_bytes=stored,
        uncached_state_bytes=uncached,
        pooled=table.pooled,
        training=step.training,
        prefetch_depth=step.prefetch_depth,
        local_ranks=request.topology.local_ranks,
    )


def mixing_seconds(request: PlanRequest, tables: Sequence[Table]) -> float:
    """Seconds a step that it takes more if some of these tables, which fuse, are cached and others not.

    They are then two modules of kernels, whose outputs are copied together and into the order of the tables; gradients
    take the same way back. Each of these four passes (two without training) reads and writes all output rows.
    """
    costs = request.profile.costs(request.runtime)
    if not costs.second_module_s:
        return 0.0
    loads = [rank_load(request, table) for table in tables]
    passes = 8 if request.step.training else 4
    rate = max(rate for _, rate in costs.hbm_gather or request.profile.hbm_gather)
    return costs.second_module_s + passes * sum(load.served * load.output_bytes for load in loads) / rate


def table_options(
    request: PlanRequest,
    table: Table,
    grid: FloatArray,
    layout: Layout | None = None,
    *,
    shared: FloatArray | None = None,
) -> list[Options]:
    """Every placement of `table` in one layout, its first if none is given, on the ratios of `grid` or its pinned one.

    Args:
        request: The request.
        table: The table.
        grid: Ratios.
        layout: The layout.
        shared: Fraction of its rows in a cache that it shares with others, where that holds a ratio of `grid` of all.

    Raises:
        OverflowError: If its buffers are more bytes than can be counted.
    """
    profile, topology = request.profile, request.topology
    layout = layout or table_layouts(request, table)[0]
    costs, load = profile.costs(request.runtime), rank_load(request, table, layout)
    exchanged, gradients = exchange_seconds(profile, topology, layout, load, table.weight_bytes), 0
    if layout.sharding is Sharding.DATA_PARALLEL and request.step.training:
        # A replica has a gradient as large as itself; sharded tables update rows in the backward pass. Gradients of all
        # rows are cleared and read; weights and state of all rows are read and written.
        state = table.rows * sum(state_bytes(table, table.dim, training=True))
        gradients = table.weight_bytes
        exchanged += (4 * table.weight_bytes + 2 * state) / profile.hbm_gather[-1][1]
    mean, dim = layout.mean(topology), layout.shard(table, topology).dim
    # A cache may be smaller than the rows of a step where FBGEMM reads those without a place where they are.
    spills = request.runtime is Runtime.TORCHREC and request.step.prefetch_depth == 1
    found: list[Options] = []
    for mode in allowed_modes(request, table, layout):
        ratios = held = _ratios_of(mode, table, grid)
        if shared is not None and mode is Mode.CACHING:
            held = np.interp(ratios, grid, shared)
        footprint = footprint_of(request, table, layout, mode, held)
        rows = footprint.cache_rows.astype(np.float64)
        seconds = (mode_seconds(profile, costs, load, mode, ratios, rows) + exchanged) * mean
        buffers = round_up(int(buffer_bytes(costs, load, mode, topology.ranks)) + gradients, PAGE)
        hbm, host = (footprint.hbm + buffers).astype(np.float64), footprint.host.astype(np.float64)
        if topology.hbm_bytes == 0:
            hbm, host = hbm * 0, host + hbm
        slots = rows * table.value_bytes if mode is Mode.CACHING else np.zeros(len(rows))
        needs = load.unique * load.prefetch_depth if mode is Mode.CACHING and not spills else 0.0
        columns = (ratios, held, seconds, hbm * mean, host * mean * topology.local_ranks, slots * mean)
        if (able := rows >= needs).any():
            found.append(Options(layout, mode, dim, *(column[able] for column in columns)))
    return found


def _ratios_of(mode: Mode, table: Table, grid: FloatArray) -> FloatArray:
    ratio = {Mode.HBM_ONLY: 1.0, Mode.HOST_ONLY: 0.0}.get(mode, table.ratio)
    return grid if ratio is None else np.array([ratio])


def footprint_of(request: PlanRequest, table: Table, layout: Layout, mode: Mode, ratios: FloatArray) -> Footprint:
    """Bytes of a shard of `table` on a rank that has one."""
    shard = layout.shard(table, request.topology)
    training = request.step.training
    if request.runtime is Runtime.TORCHREC:
        return torchrec_footprint(table, mode, ratios, shard.rows, shard.dim, training=training)
    return dynamicemb_footprint(table, mode, ratios, shard.parts, training=training)
