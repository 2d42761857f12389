"""How many rows of each table are worth being hot: held by all ranks during a step, so that no All2All carries them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from evenkeel.placement.access import popularity
from evenkeel.placement.fields import require
from evenkeel.placement.hardware import Runtime
from evenkeel.placement.request import PlanRequest, Sharding

_KEY = 8
"""Bytes of a key on its way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HotRows:
    """The hot rows of one table, the most popular ones.

    Attributes:
        table: Name of the table.
        rows: How many pay.
        hbm_bytes: HBM of a rank that they take during a step.
        all_to_all_bytes: Of keys, rows and gradients that a rank sends by All2All in a step, each key once.
        without_bytes: The same where no row is hot.
    """

    table: str
    rows: int
    hbm_bytes: int
    all_to_all_bytes: float
    without_bytes: float


def with_hot_rows(request: PlanRequest, hbm_bytes: int) -> tuple[PlanRequest, tuple[HotRows, ...]]:
    """The same request with less HBM for tables, by what hot rows take of it; and these, of the tables that have any.

    A row pays where the ranks that want it would move more bytes over a rank's link, or a host's where there are
    several, than all ranks do that hold it. Keys are on ranks evenly and looked up independently.

    Args:
        request: Tables, machines and the step.
        hbm_bytes: HBM of a rank that hot rows may take, twice their values; the first tables get theirs first.

    Raises:
        InvalidInputError: If the runtime is TorchRec, which has no hot rows.
    """
    remedy = "plan with runtime dynamicemb, or without hot rows"
    require(request.runtime is not Runtime.TORCHREC, "runtime", request.runtime.value, "has no hot rows", remedy)
    ranks, local, step = request.topology.ranks, request.topology.local_ranks, request.step
    by_link = local if local < ranks else 1
    found, left = [], float(hbm_bytes)
    for table in request.tables if ranks > 1 else ():
        if Sharding.ROW_WISE not in table.shardings:
            continue
        own, width = table.ids_per_sample * step.samples_per_rank, 2 * table.dim * table.value_bytes
        keys = popularity(table.access, table.rows, own * ranks)
        count, chance = keys.keys, keys.touched(own)
        # Chance from which on a row pays: as a hot one it goes around all links, else from its owner's link.
        pays = width * (ranks - 1) / ranks / ((width + _KEY) * (ranks - by_link) * by_link / ranks)
        order = np.cumsum(count)
        rows = int(min(float(count @ (chance > pays)), left // width))
        left -= rows * width
        taken = np.clip(rows - (order - count), 0, count)
        each = (ranks - 1) / ranks * (width + _KEY)
        found.append(
            HotRows(
                table=table.name,
                rows=rows,
                hbm_bytes=rows * width,
                all_to_all_bytes=float((count - taken) @ chance) * each,
                without_bytes=float(count @ chance) * each,
            )
        )
    reserved = request.topology.hbm_reserved_bytes + sum(each.hbm_bytes for each in found)
    topology = replace(request.topology, hbm_reserved_bytes=reserved)
    return replace(request, topology=topology), tuple(each for each in found if each.rows)
