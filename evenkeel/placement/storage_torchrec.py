"""Bytes that TorchRec's FBGEMM kernels take on a rank: FUSED, FUSED_UVM_CACHING and FUSED_UVM.

A cache is a 32-way set-associative one, whose state is in HBM beside it: 8 bytes a slot for its key, 8 a slot (LRU) or
a row (LFU) for its score, 4 a row for the map from rows to tables. Row-wise optimizer state stays in HBM in every
kernel; other state lives with the weights and is never cached. Tables that share a kernel share a cache, whose rows are
as wide as those of the widest table in it, and one allocation for each of these things: tables are not rounded up to
the allocator's granule, which is part of the workspace.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from evenkeel.placement.hit_rates import Eviction
from evenkeel.placement.model import Mode, Optimizer, Table
from evenkeel.placement.storage import HOST_GRANULE, Footprint, round_up

CACHE_WAYS = 32
_BESIDE = 16 << 10
"""Offsets, counters and padding of a table, at most."""


def state_bytes(table: Table, dim: int, *, training: bool) -> tuple[int, int]:
    """Optimizer state of a row: bytes that follow the weights, and bytes that are always in HBM."""
    if not training or table.optimizer is Optimizer.SGD:
        return 0, 0
    if table.optimizer is Optimizer.ROWWISE_ADAGRAD:
        return 0, 4
    return dim * 4 * (2 if table.optimizer is Optimizer.ADAM else 1), 0


def torchrec_footprint(
    table: Table,
    mode: Mode,
    ratios: npt.NDArray[np.float64],
    rows: int,
    dim: int,
    *,
    training: bool,
) -> Footprint:
    """Bytes of a shard of `rows` by `dim` of `table` in `mode` at each of `ratios`.

    A cache is as wide as the shard: one that is shared with wider tables takes more.

    Raises:
        AssertionError: If TorchRec does not have the mode (HYBRID).
    """
    weights = rows * dim * table.value_bytes
    follows, pinned = state_bytes(table, dim, training=training)
    zero = np.zeros(len(ratios), dtype=np.int64)
    resident = rows * pinned + _BESIDE
    if mode is Mode.HBM_ONLY:
        hbm = weights + rows * follows + resident
        return Footprint(zero + hbm, zero, zero + rows)
    host = round_up(weights, HOST_GRANULE) + round_up(rows * follows, HOST_GRANULE)
    if mode is Mode.HOST_ONLY:
        return Footprint(zero + resident, zero + host, zero)
    assert mode is Mode.CACHING, f"TorchRec has no {mode}"
    sets = np.maximum(1, (np.floor(rows * ratios).astype(np.int64) + CACHE_WAYS - 1) // CACHE_WAYS)
    slots = sets * CACHE_WAYS
    scores = slots * 8 if table.eviction is Eviction.LRU else zero + (rows + 1) * 8
    hbm = slots * dim * table.value_bytes + slots * 8 + scores + rows * 4
    return Footprint(hbm + resident, zero + host, slots)
