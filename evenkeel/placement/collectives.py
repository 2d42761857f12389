"""Time of the collectives that a way of spreading a table costs a rank in each step.

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

from evenkeel.placement.hardware import HardwareProfile
from evenkeel.placement.layouts import Layout, Scope
from evenkeel.placement.model import Sharding, Topology
from evenkeel.placement.timing import RankLoad


def exchange_seconds(
    profile: HardwareProfile, topology: Topology, layout: Layout, load: RankLoad, table_bytes: int
) -> float:
    """Seconds a step of a rank that holds one shard of a table laid out in this way.

    Args:
        profile: The links.
        topology: The machines.
        layout: How the table is spread.
        load: What a step asks of the shard.
        table_bytes: Bytes of all of the table, without optimizer state.
    """
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
