"""How a table is cut into shards: what a shard holds, and how many ranks or hosts share the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from evenkeel.placement.model import Sharding, Table, Topology

_NARROWEST = 32
"""Elements of the narrowest column shard that the planner makes: below, a row is read no faster."""
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


def layouts(table: Table, topology: Topology, width: int = 0) -> tuple[Layout, ...]:
    """All ways to spread `table` that it leaves to choose from, in the order that it names them.

    TorchRec spreads only pooled tables over the ranks of one host; where there is but one, that is row-wise.

    Args:
        table: The table.
        topology: The machines.
        width: The one width of the column shards of its collection, where its rows are not pooled; 0 for any.
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
            cuts = _cuts(table, Layout(sharding).places(topology))
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
    share = sum(map(_weight_bytes, tables)) / topology.ranks if largest else 0
    for group, table in largest.items():
        cuts = _cuts(table, topology.ranks) or [1]
        fit = [pieces for pieces in cuts if _weight_bytes(table) <= share * pieces]
        found.setdefault(group, table.dim // (fit[0] if fit else cuts[-1]))
    return found


def _weight_bytes(table: Table) -> int:
    return table.rows * table.dim * table.value_bytes


def _cuts(table: Table, places: int) -> list[int]:
    """Numbers of pieces of a width that FBGEMM takes: powers of two, no more of them than places."""
    powers = [1 << power for power in range(1, 16)]
    return [n for n in powers if n <= places and table.dim % (n * WIDTH_UNIT) == 0 and table.dim // n >= _NARROWEST]
