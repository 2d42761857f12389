"""Every placement of one table: its layouts, modes and ratios with their bytes and seconds.

Times are those of a step on the slowest rank. It gathers the unique rows of its batch from where they are, and in
training writes them back with their optimizer state; rows that miss a cache cross the link in both directions. The
fixed cost of a module (launches, index, synchronisation) is paid once for all tables in it and is not in these figures.

Keys go to the ranks that hold their rows, output rows come back to the ranks of the samples, and in training gradients
go the same way as keys. What is counted is the traffic of a rank that holds a shard: of all ranks it has the most.

- All2All (keys of every way; output rows of table-wise and column-wise, and of tables that are not pooled): each rank
  exchanges as much with every other rank, over the link inside its host or over the one between hosts. Where keys are
  spread over ranks, the fullest one gets more than the mean.
- Reduce-scatter (pooled output rows of row-wise: partial sums of all samples), all-gather (their gradients) and
  all-reduce (gradients of data-parallel): rings, whose links inside hosts and between them work at the same time. Of
  `n` bytes on each of `w` ranks a reduce-scatter sends `n (w - 1) / w` a rank, an all-reduce twice as much. A ring
  leaves each host once for every rank of it: the link of one rank between hosts carries `1 / local_ranks` of that.
- What a collective takes whatever its size is part of the fixed time of a module.
- Table-row-wise and grid add partial sums up inside a host, then exchange them with the same rank of each other host.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import numpy as np

from evenkeel.placement.access import FloatArray, different_share, fullest_rank, step_keys
from evenkeel.placement.hardware import NARROW, Runtime, RuntimeCosts, row_seconds
from evenkeel.placement.layouts import ROW_WISE, Layout, Scope, layouts
from evenkeel.placement.request import Mode, PlanRequest, Sharding, Table, modes_of_ratio
from evenkeel.placement.storage import dynamicemb_footprint, round_up, row_bytes, state_bytes, torchrec_footprint

PAGE = 4096
_SMALLEST_RATIO = 1e-3
_WEIGHT_BYTES = 4
"""Of the gradient of a lookup's weight."""


class RankLoad:
    """What a step asks of one shard of a table.

    Attributes:
        request: The request.
        costs: Constants of its runtime.
        table: The table.
        layout: How it is spread.
        dim: Width of the shard.
        parts: Shards that the keys are spread over.
        keys: The keys of the step over all ranks.
        unique: Unique rows that this shard serves in a step.
        received: Lookups that the fullest shard serves in a step, repeated keys included.
        served: Output rows of this shard in a step: the lookups, or where they are pooled one row a sample and feature.
        sent: Output rows that one rank receives for its own samples.
        fetched: Share of the rows to be read that are read where they are in host memory: one that is looked up
            again while it is under way is not.
        embedding_bytes: Bytes of an embedding in the shard.
        output_bytes: Bytes of an output row of the shard, or of its gradient: float32, whatever the type of the table.
        key_bytes: Bytes that travel of one lookup: its key, and its weight if it has one.
        row_bytes: Bytes of a row with its optimizer state.
        uncached_state_bytes: Bytes of optimizer state of a row that no cache holds.
        training: Whether there is a backward pass.
    """

    def __init__(self, request: PlanRequest, table: Table, layout: Layout | None = None) -> None:
        """Of `table` in a layout, its first if none is given."""
        self.request, self.table, self.costs = request, table, request.profile.costs(request.runtime)
        self.layout = layout = layout or table_layouts(request, table)[0]
        self.dim, self.parts = table.dim // layout.pieces, layout.parts(request.topology)
        self.training = training = request.step.training
        ranks, samples = request.topology.ranks, request.step.samples_per_rank
        own = table.ids_per_sample * samples
        replicated = layout.sharding is Sharding.DATA_PARALLEL
        self.keys = keys = step_keys(table.access, table.rows, own if replicated else own * ranks, table.eviction)
        self.unique = keys.unique / self.parts
        self.embedding_bytes, self.output_bytes = self.dim * table.value_bytes, self.dim * 4
        self.key_bytes = 12 if table.weighted else 8
        self.row_bytes, routing = self.embedding_bytes, "continuous"
        self.uncached_state_bytes, _ = state_bytes(table, self.dim, training=training)
        if request.runtime is Runtime.DYNAMICEMB:
            self.row_bytes, routing = row_bytes(table, training=training) * self.dim // table.dim, table.dist_type
            self.uncached_state_bytes = 0
        over_mean = fullest_rank(table.access, table.rows, keys.lookups, self.parts, routing)
        self.received = keys.lookups / self.parts * over_mean
        outputs = float(samples * table.features) if table.pooled else own
        self.served = outputs * (1 if replicated else ranks) if table.pooled else self.received
        self.sent = 0.0 if replicated else outputs
        under_way = self.costs.in_flight_bytes / self.embedding_bytes
        self.fetched = different_share(table.access, table.rows, keys.lookups, under_way)

    def but(self, **changes: object) -> RankLoad:
        """A copy with some attributes changed; what follows from them stays as it is."""
        other = copy(self)
        for name, value in changes.items():
            setattr(other, name, value)
        return other

    @property
    def backward_rows(self) -> float:
        """Rows that the backward pass reads before it updates any: of weighted lookups all, for their gradients."""
        return self.received if self.table.weighted and self.training else 0.0


def table_layouts(request: PlanRequest, table: Table) -> tuple[Layout, ...]:
    """The layouts to choose from; with DynamicEmb row-wise, the only one that it has."""
    return (ROW_WISE,) if request.runtime is Runtime.DYNAMICEMB else layouts(table, request.topology)


def fixed_seconds(costs: RuntimeCosts, mode: Mode) -> float:
    """Time of a step of a module apart from its rows. HYBRID works both tiers, so it pays for both."""
    return {
        Mode.HBM_ONLY: costs.hbm_fixed_s,
        Mode.CACHING: costs.caching_fixed_s,
        Mode.HOST_ONLY: costs.host_fixed_s,
        Mode.HYBRID: costs.host_fixed_s + costs.hbm_fixed_s,
    }[mode]


def mode_seconds(load: RankLoad, mode: Mode, ratios: FloatArray, cache_rows: FloatArray) -> FloatArray:
    """Seconds a step for the rows of one table at each of `ratios`, fixed cost not included.

    Rows are gathered from where they are, and in training the unique ones are updated there with their state: in HBM
    read and written; in host memory across the link both ways, at the same time as others. Optimizer state that lies
    beside the rows is never cached. A missed row is fetched, and in training the evicted one written back.

    A missed row of a cache with `rho` rows per unique key costs `1 + (contention_rows / rho) ** 2` times that of an
    ample cache: the rows of the step itself may not be evicted, and the fewer others there are the longer a free slot
    is sought. Where the cache is smaller than the step's rows, those that find no place in it are read and updated
    in host memory.
    """
    if load.unique <= 0:
        return np.zeros(len(ratios))

    profile, costs = load.request.profile, load.costs

    def hbm_row(size: int) -> float:
        return row_seconds(costs.hbm_gather or profile.hbm_gather, size)

    def host_row(size: int) -> float:  # all ranks of a host read its memory, which may be slower than the link of each
        shared = load.request.topology.local_ranks * size / profile.host_memory_bytes_per_s
        return max(row_seconds(costs.host_gather or profile.host_gather, size), shared)

    # DynamicEmb looks unique rows up.
    gathered = load.unique if load.request.runtime is Runtime.DYNAMICEMB else load.received
    gathered += load.backward_rows
    narrow = 0.0 if load.table.pooled or load.dim > NARROW else load.received
    updated = load.unique if load.training else 0.0
    in_hbm = gathered * hbm_row(load.embedding_bytes) + narrow * costs.narrow_hbm_s
    in_hbm += 2 * updated * hbm_row(load.row_bytes)
    in_host = load.fetched * gathered * host_row(load.embedding_bytes)
    in_host += costs.host_update * updated * host_row(load.row_bytes)
    # Repeats under way make reads of host memory cheap, but not cheaper than the same reads of HBM.
    in_host = max(costs.host_factor * in_host + narrow * costs.narrow_host_s, in_hbm)
    state_in_hbm = state_in_host = 0.0
    if load.uncached_state_bytes:
        state_in_hbm = 2 * load.unique * hbm_row(load.uncached_state_bytes)
        state_in_host = load.unique * costs.host_factor * costs.host_update * host_row(load.uncached_state_bytes)
    if mode is Mode.HBM_ONLY:
        return np.full(len(ratios), in_hbm + state_in_hbm)
    if mode is Mode.HOST_ONLY:
        return np.full(len(ratios), in_host + state_in_host)
    if mode is Mode.HYBRID:
        hit = costs.hybrid_hit * ratios
        blend: FloatArray = hit * in_hbm + (1 - hit) * in_host
        return blend
    missed = load.unique * load.keys.misses(cache_rows * load.parts)
    placed = np.minimum(missed, np.maximum(cache_rows - (load.unique - missed), 0.0))
    left = (missed - placed) / load.unique
    per_unique = np.maximum(cache_rows / (load.unique * load.request.step.prefetch_depth), 1.0)
    crowding = 1 + (costs.contention_rows / per_unique) ** 2
    miss = costs.miss_factor * (2 if load.training else 1) * host_row(load.row_bytes)
    fetched = placed * miss * crowding
    looked_up = costs.cache_lookup_s * load.received + costs.cache_hit_s * (load.unique - missed)
    cached: FloatArray = (1 - left) * in_hbm + left * in_host + fetched + state_in_host + looked_up
    return cached


def exchange_seconds(load: RankLoad) -> float:
    """Seconds a step of a rank that holds one shard of a table, optimizer state apart."""
    profile, ranks, local = load.request.profile, load.request.topology.ranks, load.request.topology.local_ranks
    if ranks == 1:
        return 0.0
    passes = 2 if load.training else 1
    keys, rows = load.received * load.key_bytes, load.served * load.output_bytes  # from all ranks, and to all of them

    def all_to_all(size: float) -> float:
        """Each rank exchanges `size` bytes with every other one, over both kinds of links at the same time."""
        return size * max(
            (local - 1) / profile.intra_host_bytes_per_s, (ranks - local) / profile.inter_host_bytes_per_s
        )

    def ring(size: float) -> float:
        """One way round a ring with `size` bytes on each rank."""
        sent = size * (ranks - 1) / ranks
        if ranks == local:
            return sent / profile.intra_host_bytes_per_s
        inside = sent * (local - 1) / local / profile.intra_host_bytes_per_s
        return max(inside, sent / local / profile.inter_host_bytes_per_s)

    if load.layout.sharding is Sharding.DATA_PARALLEL:
        return 2 * ring(load.table.weight_bytes) if load.training else 0.0
    if load.layout.scope is Scope.RANK or not load.table.pooled:
        return all_to_all((keys + passes * rows) / ranks)
    if load.layout.scope is Scope.HOST:
        inside = rows * (local - 1) / local / profile.intra_host_bytes_per_s
        across = rows / ranks * (ranks // local - 1) / profile.inter_host_bytes_per_s
        return all_to_all(keys / ranks) + passes * (inside + across)
    return all_to_all(keys / ranks) + passes * ring(rows)


def buffer_bytes(load: RankLoad, mode: Mode) -> float:
    """HBM for the inputs, outputs, gradients and staged rows of a step of one table."""
    costs, passes = load.costs, 2 if load.training else 1
    keys = 2 * load.received * load.key_bytes
    exchanged = load.sent * load.output_bytes * passes + keys if load.request.topology.ranks > 1 else 0.0
    served = load.served * load.output_bytes * passes + keys + _WEIGHT_BYTES * load.backward_rows
    unique = costs.unique_copies * load.unique * load.embedding_bytes
    staging = {
        Mode.HBM_ONLY: 0.0,
        Mode.CACHING: costs.caching_staging,
        Mode.HYBRID: costs.hybrid_staging,
        Mode.HOST_ONLY: costs.host_staging,
    }[mode]
    return exchanged + served + unique + staging * load.unique * load.row_bytes


class Options(NamedTuple):
    """Placements of a table in one layout and mode.

    Attributes:
        layout: How it is spread.
        mode: Its mode.
        dim: Width of its shards.
        ratio: (ratios,) fraction of the rows that HBM holds: of all tables of a shared cache.
        held: (ratios,) fraction of the rows of this table that HBM holds.
        rows: (ratios,) rows that HBM holds on one rank.
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
    rows: FloatArray
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


def mixing_seconds(request: PlanRequest, tables: Sequence[Table]) -> float:
    """Seconds a step that it takes more if some of these tables, which fuse, are cached and others not.

    They are then two modules of kernels, whose outputs are copied together and into the order of the tables; gradients
    take the same way back. Each of these four passes (two without training) reads and writes all output rows.
    """
    costs = request.profile.costs(request.runtime)
    if not costs.second_module_s:
        return 0.0
    loads = [RankLoad(request, table) for table in tables]
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
    topology, load = request.topology, RankLoad(request, table, layout)
    layout, dim, needed = load.layout, load.dim, load.unique * request.step.prefetch_depth
    exchanged, gradients = exchange_seconds(load), 0
    if layout.sharding is Sharding.DATA_PARALLEL and request.step.training:
        # A replica has a gradient as large as itself; sharded tables update rows in the backward pass. Gradients of all
        # rows are cleared and read; weights and state of all rows are read and written.
        state = table.rows * sum(state_bytes(table, table.dim, training=True))
        gradients = table.weight_bytes
        exchanged += (4 * table.weight_bytes + 2 * state) / request.profile.hbm_gather[-1][1]
    mean = layout.mean(topology)
    # A cache may be smaller than the rows of a step where FBGEMM reads those without a place where they are.
    spills = request.runtime is Runtime.TORCHREC and request.step.prefetch_depth == 1
    found: list[Options] = []
    for mode in allowed_modes(request, table, layout):
        ratio = {Mode.HBM_ONLY: 1.0, Mode.HOST_ONLY: 0.0}.get(mode, table.ratio)
        ratios = held = grid if ratio is None else np.array([ratio])
        if shared is not None and mode is Mode.CACHING:
            held = np.interp(ratios, grid, shared)
        if request.runtime is Runtime.TORCHREC:
            most = -(-table.rows // load.parts)
            values, in_host, cached = torchrec_footprint(table, mode, held, most, dim, training=load.training)
        else:
            values, in_host, cached = dynamicemb_footprint(table, mode, held, topology.ranks, training=load.training)
        rows = cached.astype(np.float64)
        seconds = (mode_seconds(load, mode, ratios, rows) + exchanged) * mean
        buffers = round_up(int(buffer_bytes(load, mode)) + gradients, PAGE)
        hbm, host = (values + buffers).astype(np.float64), in_host.astype(np.float64)
        if topology.hbm_bytes == 0:
            hbm, host = hbm * 0, host + hbm
        slots = rows * table.value_bytes if mode is Mode.CACHING else np.zeros(len(rows))
        needs = needed if mode is Mode.CACHING and not spills else 0.0
        columns = (ratios, held, rows, seconds, hbm * mean, host * mean * topology.local_ranks, slots * mean)
        if (able := rows >= needs).any():
            found.append(Options(layout, mode, dim, *(column[able] for column in columns)))
    return found
