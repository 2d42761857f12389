"""Predicted time of a step for one table, by mode and ratio, on the slowest rank.

A step gathers the unique rows of its batch from where they are, and in training writes them back with their optimizer
state; rows that miss a cache cross the link in both directions. The fixed cost of a module (launches, index,
synchronisation) is paid once for all tables in it and is not in these figures.

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

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evenkeel.placement.access import StepKeys
from evenkeel.placement.hardware import HardwareProfile, RuntimeCosts
from evenkeel.placement.layouts import Layout, Scope
from evenkeel.placement.model import Mode, Sharding, Topology

FloatArray = npt.NDArray[np.float64]

_WEIGHT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """What a step asks of one shard of a table.

    Attributes:
        keys: The keys of the step over all ranks.
        unique: Unique rows that this shard serves in a step.
        forward_rows: Rows that the forward pass reads: the unique ones, or all lookups without deduplication.
        fetched: Share of the rows to be read that are read where they are in host memory: one that is looked up
            again while it is under way is not.
        received: Lookups that the fullest shard serves in a step, repeated keys included.
        served: Output rows of this shard in a step: the lookups, or where they are pooled one row a sample and feature.
        sent: Output rows that one rank receives for its own samples.
        shards: Shards that the keys are spread over: a cache of this shard is `1 / shards` of all caches.
        narrow: Lookups that are served by kernels for small unpooled rows.
        backward_rows: Rows that the backward pass reads before it updates any: of weighted lookups all, for the
            gradients of the weights.
        embedding_bytes: Bytes of an embedding in the shard.
        output_bytes: Bytes of an output row of the shard, or of its gradient.
        key_bytes: Bytes that travel of one lookup: its key, and its weight if it has one.
        row_bytes: Bytes of a row with its optimizer state.
        uncached_state_bytes: Bytes of optimizer state of a row that no cache holds.
        pooled: Whether the lookups of a sample are added up.
        training: Whether there is a backward pass.
        prefetch_depth: Batches whose rows a cache holds at once.
        local_ranks: Ranks that read the memory of one host.
    """

    keys: StepKeys
    unique: float
    forward_rows: float
    fetched: float
    narrow: float
    backward_rows: float
    received: float
    served: float
    sent: float
    shards: int
    embedding_bytes: int
    output_bytes: int
    key_bytes: int
    row_bytes: int
    uncached_state_bytes: int
    pooled: bool
    training: bool
    prefetch_depth: int
    local_ranks: int = 1


def fixed_seconds(costs: RuntimeCosts, mode: Mode) -> float:
    """Time of a step of a module apart from its rows. HYBRID works both tiers, so it pays for both."""
    return {
        Mode.HBM_ONLY: costs.hbm_fixed_s,
        Mode.CACHING: costs.caching_fixed_s,
        Mode.HOST_ONLY: costs.host_fixed_s,
        Mode.HYBRID: costs.host_fixed_s + costs.hbm_fixed_s,
    }[mode]


def mode_seconds(
    profile: HardwareProfile,
    costs: RuntimeCosts,
    load: RankLoad,
    mode: Mode,
    ratios: FloatArray,
    cache_rows: FloatArray,
) -> FloatArray:
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

    def hbm_row(size: int) -> float:
        return profile.hbm_row_s(costs, size)

    def host_row(size: int) -> float:
        return profile.host_row_s(costs, size, load.local_ranks)

    gathered = load.forward_rows + (load.backward_rows if load.training else 0.0)
    updated = load.unique if load.training else 0.0
    in_hbm = gathered * hbm_row(load.embedding_bytes) + load.narrow * costs.narrow_hbm_s
    in_hbm += 2 * updated * hbm_row(load.row_bytes)
    in_host = load.fetched * gathered * host_row(load.embedding_bytes)
    in_host += costs.host_update * updated * host_row(load.row_bytes)
    # Repeats under way make reads of host memory cheap, but not cheaper than the same reads of HBM.
    in_host = max(costs.host_factor * in_host + load.narrow * costs.narrow_host_s, in_hbm)
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
    missed = load.unique * load.keys.misses(cache_rows * load.shards)
    placed = np.minimum(missed, np.maximum(cache_rows - (load.unique - missed), 0.0))
    left = (missed - placed) / load.unique
    per_unique = np.maximum(cache_rows / (load.unique * load.prefetch_depth), 1.0)
    crowding = 1 + (costs.contention_rows / per_unique) ** 2
    miss = costs.miss_factor * (2 if load.training else 1) * host_row(load.row_bytes)
    fetched = placed * miss * crowding
    looked_up = costs.cache_lookup_s * load.received + costs.cache_hit_s * (load.unique - missed)
    cached: FloatArray = (1 - left) * in_hbm + left * in_host + fetched + state_in_host + looked_up
    return cached


def exchange_seconds(
    profile: HardwareProfile, topology: Topology, layout: Layout, load: RankLoad, table_bytes: int
) -> float:
    """Seconds a step of a rank that holds one shard of a table of `table_bytes`, optimizer state apart."""
    ranks, local = topology.ranks, topology.local_ranks
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

    if layout.sharding is Sharding.DATA_PARALLEL:
        return 2 * ring(table_bytes) if load.training else 0.0
    if layout.scope is Scope.RANK or not load.pooled:
        return all_to_all((keys + passes * rows) / ranks)
    if layout.scope is Scope.HOST:
        inside = rows * (local - 1) / local / profile.intra_host_bytes_per_s
        across = rows / ranks * (ranks // local - 1) / profile.inter_host_bytes_per_s
        return all_to_all(keys / ranks) + passes * (inside + across)
    return all_to_all(keys / ranks) + passes * ring(rows)


def buffer_bytes(costs: RuntimeCosts, load: RankLoad, mode: Mode, ranks: int) -> float:
    """HBM for the inputs, outputs, gradients and staged rows of a step of one table."""
    passes = 2 if load.training else 1
    keys = 2 * load.received * load.key_bytes
    exchanged = load.sent * load.output_bytes * passes + keys if ranks > 1 else 0.0
    weights = _WEIGHT_BYTES * load.backward_rows if load.training else 0.0  # their gradients
    served = load.served * load.output_bytes * passes + keys + weights
    unique = costs.unique_copies * load.unique * load.embedding_bytes
    staging = {
        Mode.HBM_ONLY: 0.0,
        Mode.CACHING: costs.caching_staging,
        Mode.HYBRID: costs.hybrid_staging,
        Mode.HOST_ONLY: costs.host_staging,
    }[mode]
    return exchanged + served + unique + staging * load.unique * load.row_bytes
