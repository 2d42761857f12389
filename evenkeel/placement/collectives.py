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

from dataclasses import dataclass

from evenkeel.placement.hardware import HardwareProfile
from evenkeel.placement.layouts import Layout, Scope
from evenkeel.placement.model import Sharding, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What one rank exchanges about one table in a step.

    Attributes:
        lookups: Lookups of its own samples, repeated keys included.
        outputs: Output rows of its own samples.
        key_bytes: Bytes that travel of one lookup: its key, and its weight if it has one.
        row_bytes: Bytes of an output row of one shard.
        table_bytes: Bytes of all of the table, without optimizer state.
        pooled: Whether the lookups of a sample are added up.
        training: Whether gradients are exchanged.
        skew: Lookups of the fullest rank that keys are spread over, over the mean.
    """

    lookups: float
    outputs: float
    key_bytes: int
    row_bytes: int
    table_bytes: int
    pooled: bool
    training: bool
    skew: float = 1.0


def exchange_seconds(profile: HardwareProfile, topology: Topology, layout: Layout, exchange: Exchange) -> float:
    """Seconds a step of a rank that holds one shard of a table laid out in this way."""
    ranks, local = topology.ranks, topology.local_ranks
    if ranks == 1:
        return 0.0
    links = _Links(profile, ranks, local)
    passes = 2 if exchange.training else 1
    keys = exchange.lookups * exchange.key_bytes
    sums = exchange.outputs * exchange.row_bytes
    if layout.sharding is Sharding.DATA_PARALLEL:
        if not exchange.training:
            return 0.0
        return 2 * links.ring(exchange.table_bytes)
    if layout.scope is Scope.RANK:
        return links.all_to_all(keys + passes * sums)
    if layout.scope is Scope.HOST:
        inside = sums * ranks * (local - 1) / local / profile.intra_host_bytes_per_s
        across = sums * (ranks // local - 1) / profile.inter_host_bytes_per_s
        return links.all_to_all(exchange.skew * keys / local) + passes * (inside + across)
    if exchange.pooled:
        return links.all_to_all(exchange.skew * keys / ranks) + passes * links.ring(sums * ranks)
    return links.all_to_all(exchange.skew * (keys + passes * sums) / ranks)


@dataclass(frozen=True, slots=True)
class _Links:
    """The links of one rank."""

    profile: HardwareProfile
    ranks: int
    local: int

    def all_to_all(self, size: float) -> float:
        """Each rank exchanges `size` bytes with every other one, over both kinds of links at the same time."""
        near, far = self.local - 1, self.ranks - self.local
        return size * max(near / self.profile.intra_host_bytes_per_s, far / self.profile.inter_host_bytes_per_s)

    def ring(self, size: float) -> float:
        """One way round a ring with `size` bytes on each rank."""
        sent = size * (self.ranks - 1) / self.ranks
        if self.ranks == self.local:
            return sent / self.profile.intra_host_bytes_per_s
        inside = sent * (self.local - 1) / self.local / self.profile.intra_host_bytes_per_s
        return max(inside, sent / self.local / self.profile.inter_host_bytes_per_s)
