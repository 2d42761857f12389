"""How a table is cut into shards: what a shard holds, and how many ranks or hosts share the table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from evenkeel.placement.model import Sharding, Table, Topology

_NARROWEST = 32
"""Elements of the narrowest column shard of tables that are not the largest by far: below, a row is read no faster."""
WIDTH_UNIT = 4
"""Elements that the width of every table and shard is a multiple of in FBGEMM, but for those that are replicated."""


class Scope(StrEnum):
    """What the shards of a table are put on."""

    EVERYWHERE = "everywhere"
    RANK = "rank"
    HOST = "host"


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

    def shard(self, table: Table, topology: Topology) -> Shard:
        """What a rank that has a shard holds."""
        parts = {Sharding.ROW_WISE: topology.ranks, Sharding.DATA_PARALLEL: 1}.get(self.sharding)
        if parts is None:
            parts = topology.local_ranks if self.scope is Scope.HOST else 1
        return Shard(-(-table.rows // parts), table.dim // self.pieces, parts)

    def places(self, topology: Topology) -> int:
        """Ranks or hosts that a piece could be put on; 1 where it is everywhere."""
        hosts = topology.ranks // topology.local_ranks
        return {Scope.EVERYWHERE: 1, Scope.RANK: topology.ranks, Scope.HOST: hosts}[self.scope]

    def mean(self, topology: Topology) -> float:
        """Shards of the table on the average rank."""
        return self.pieces / self.places(topology)


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a table.

    Attributes:
        rows: Its rows.
        dim: Its width.
        parts: Shards that the keys of the table are spread over.
    """

    rows: int
    dim: int
    parts: int


ROW_WISE = Layout(Sharding.ROW_WISE)


def layouts(table: Table, topology: Topology, width: int = 0, share: float = math.inf) -> tuple[Layout, ...]:
    """All ways to spread `table` that it leaves to choose from, in the order that it names them.

    TorchRec spreads only pooled tables over the ranks of one host; where there is but one, that is row-wise.

    Args:
        table: The table.
        topology: The machines.
        width: The one width of the column shards of its collection, where its rows are not pooled; 0 for any.
        share: `rank_share` of all tables.
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
            cuts = _cuts(table, Layout(sharding).places(topology), share)
            if width and not table.pooled:
                cuts = [pieces for pieces in cuts if table.dim == width * pieces]
            found += [Layout(sharding, pieces) for pieces in cuts]
            if whole not in table.shardings and (table.pooled or width in (0, table.dim)):
                found.append(Layout(sharding))
    if not found:  # Of column shards only, and none of the width of its collection: applying the plan says so.
        found.append(Layout(Sharding.COLUMN_WISE))
    return tuple(dict.fromkeys(found))


def sequence_widths(tables: Sequence[Table], topology: Topology) -> Mapping[str, int]:
    """The width of the column shards of each collection of tables that are not pooled, by the name of the group.

    TorchRec exchanges the column shards of such a collection as rows of one width. It is the one that a table is given,
    else the largest at which a shard of the collection's largest table is no larger than the share of a rank in all
    tables. Budgets play no part: more memory must leave every choice that there was.
    """
    found: dict[str, int] = {}
    largest: dict[str, Table] = {}
    for table in tables:
        if table.pooled or Sharding.COLUMN_WISE not in table.shardings:
            continue
        if table.column_shards:
            found.setdefault(table.group, table.dim // table.column_shards)
        else:
            largest[table.group] = max(largest.get(table.group, table), table, key=_weight_bytes)
    share = rank_share(tables, topology)
    for group, table in largest.items():
        cuts = _cuts(table, topology.ranks, share) or [1]
        fit = [pieces for pieces in cuts if _weight_bytes(table) <= share * pieces]
        found.setdefault(group, table.dim // (fit[0] if fit else cuts[-1]))
    return found


def _weight_bytes(table: Table) -> int:
    return table.rows * table.dim * table.value_bytes


def rank_share(tables: Iterable[Table], topology: Topology) -> float:
    """Bytes of the weights of all tables, by rank."""
    return sum(map(_weight_bytes, tables)) / topology.ranks


def _cuts(table: Table, places: int, share: float) -> list[int]:
    """Numbers of pieces, no more than places, that TorchRec cuts a width into.

    They are narrower than `_NARROWEST` only where the next larger ones would be more than a rank's share of all tables:
    such a table may fit no other way. As for `sequence_widths`, budgets play no part.
    """
    cuts = [pieces for pieces in _divisors(table.dim // WIDTH_UNIT) if 1 < pieces <= places]
    larger, weight = [1, *cuts], _weight_bytes(table)
    return [n for n, last in zip(cuts, larger, strict=False) if table.dim // n >= _NARROWEST or weight > share * last]


@cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, number + 1) if number % divisor == 0)
