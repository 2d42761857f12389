"""Which rank holds which part of a table: rows and columns of every shard, as TorchRec cuts them."""

from __future__ import annotations

from dataclasses import dataclass

from evenkeel.placement.model import Sharding, Table, Topology
from evenkeel.placement.plan import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A part of a table.

    Attributes:
        rank: The rank that holds it.
        first_row: Its first row.
        rows: Its rows; 0 where other ranks hold all.
        first_column: Its first column.
        columns: Its columns.
    """

    rank: int
    first_row: int
    rows: int
    first_column: int
    columns: int


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


def shards(table: Table, placed: Placement, topology: Topology) -> tuple[Shard, ...]:
    """Every shard of `table`, block of columns by block of columns, and in each from the first rows on."""
    blocks = column_blocks(placed, topology)
    replicated = placed.sharding is Sharding.DATA_PARALLEL
    columns = table.dim if replicated else table.dim // len(blocks)
    found = []
    for number, ranks in enumerate(blocks):
        height = -(-table.rows // len(ranks))
        for place, rank in enumerate(ranks):
            first = min(table.rows, place * height)
            shard = Shard(
                rank=rank,
                first_row=first,
                rows=min(height, table.rows - first),
                first_column=0 if replicated else number * columns,
                columns=columns,
            )
            found.append(shard)
    return tuple(found)
