"""How a table is cut into shards: what a shard holds, how many ranks or hosts share the table, who holds which part."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache

from evenkeel.placement.plan import Placement
from evenkeel.placement.request import WIDTH_UNIT, Sharding, Table, Topology


class Scope(IntEnum):
    """What the shards of a table are put on."""

    EVERYWHERE = 0
    RANK = 1
    HOST = 2


_SCOPES = {
    Sharding.TABLE_WISE: Scope.RANK,
    Sharding.COLUMN_WISE: Scope.RANK,
    Sharding.TABLE_ROW_WISE: Scope.HOST,
    Sharding.GRID: Scope.HOST,
}


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to spread a table.

    Attributes:
        sharding: The way.
        pieces: Parts of the width, each put on a rank or on a host of its own; 1 where the width is not cut.
    """

    sharding: Sharding
    pieces: int = 1

    @property
    def scope(self) -> Scope:
        """What each piece is put on."""
        return _SCOPES.get(self.sharding, Scope.EVERYWHERE)

    def parts(self, topology: Topology) -> int:
        """Shards that the keys of a table are spread over."""
        if self.sharding is Sharding.ROW_WISE:
            return topology.ranks
        return topology.local_ranks if self.scope is Scope.HOST else 1

    def places(self, topology: Topology) -> int:
        """Ranks or hosts that a piece could be put on; 1 where it is everywhere."""
        hosts = topology.ranks // topology.local_ranks
        return {Scope.EVERYWHERE: 1, Scope.RANK: topology.ranks, Scope.HOST: hosts}[self.scope]

    def mean(self, topology: Topology) -> float:
        """Shards of the table on the average rank."""
        return self.pieces / self.places(topology)

    def shard(self, topology: Topology) -> tuple[float, float, float]:
        """What the time, HBM and memory of the average rank and host are multiplied by to be those of one shard.

        Time and HBM are those of the rank, or of each rank of the host, that the shard is on; memory is its host's.
        """
        if self.scope is Scope.EVERYWHERE:
            return 1.0, 1.0, 1.0
        places, hosts = self.places(topology), topology.ranks // topology.local_ranks
        return places / self.pieces, places / self.pieces, hosts / self.pieces


ROW_WISE = Layout(Sharding.ROW_WISE)
TABLE_WISE = Layout(Sharding.TABLE_WISE)


def layouts(table: Table, topology: Topology) -> tuple[Layout, ...]:
    """All ways to spread `table` that it leaves to choose from, in the order that it names them.

    TorchRec spreads only pooled tables over the ranks of one host; where there is but one, that is row-wise.
    """
    found: list[Layout] = []
    one_host = topology.ranks == topology.local_ranks
    for sharding in table.shardings:
        on_host = _SCOPES.get(sharding) is Scope.HOST
        if on_host and (not table.pooled or (one_host and Sharding.ROW_WISE in table.shardings)):
            continue
        whole = {Sharding.COLUMN_WISE: Sharding.TABLE_WISE, Sharding.GRID: Sharding.TABLE_ROW_WISE}.get(sharding)
        if whole is None:
            found.append(Layout(sharding))
        elif table.column_shards:
            found.append(Layout(sharding, table.column_shards))
        else:
            places = Layout(sharding).places(topology)
            found += [Layout(sharding, pieces) for pieces in _cuts(table.dim // WIDTH_UNIT, places)]
            if whole not in table.shardings:
                found.append(Layout(sharding))
    return tuple(dict.fromkeys(found))


@cache
def _cuts(units: int, places: int) -> list[int]:
    """Numbers of pieces, two or more and no more than places, that FBGEMM takes a width of so many units in."""
    return [pieces for pieces in range(2, min(units, places) + 1) if units % pieces == 0]


def column_blocks(placed: Placement, topology: Topology) -> tuple[tuple[int, ...], ...]:
    """For each block of columns of a table, the ranks that hold a part of its rows each.

    A data-parallel table is no exception: every rank is a block of all columns.
    """
    every = tuple(range(topology.ranks))
    if placed.sharding is Sharding.DATA_PARALLEL:
        return tuple((rank,) for rank in every)
    ranks = placed.ranks or every
    width = {
        Sharding.ROW_WISE: len(ranks),
        Sharding.TABLE_ROW_WISE: topology.local_ranks,
        Sharding.GRID: topology.local_ranks,
    }.get(placed.sharding, 1)
    return tuple(ranks[first : first + width] for first in range(0, len(ranks), width))
