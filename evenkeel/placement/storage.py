"""Bytes that a table takes on the fullest rank, in HBM and in host memory, for each mode and ratio.

DynamicEmb's row-wise shards hold `ceil(rows / ranks)` rows, so rank 0 is the fullest. A row takes its embedding and its
optimizer state, rounded up to 16 bytes. The index (key, digest, scores, reference count, bucket counter) is in HBM for
the rows of every tier, and a cache has an index of its own.

TorchRec has FBGEMM's kernels FUSED, FUSED_UVM_CACHING and FUSED_UVM. A cache is a 32-way set-associative one, whose
state is in HBM beside it: 8 bytes a slot for its key, 8 a slot (LRU) or a row (LFU) for its score, 4 a row for the map
from rows to tables. Row-wise optimizer state stays in HBM in every kernel; other state lives with the weights and is
never cached. Tables that share a kernel share a cache, whose rows are as wide as those of the widest table in it, and
one allocation for each of these things: tables are not rounded up to the allocator's granule, which is part of the
workspace.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from evenkeel.placement.access import Eviction, FloatArray, IntArray
from evenkeel.placement.request import Mode, Optimizer, Table

HBM_GRANULE = 2 << 20
HOST_GRANULE = 4096
BUCKET_ROWS = 128
CACHE_ROWS_STEP = 1024
CACHE_OVERFLOW_ROWS = 3072
_ROWWISE_STATE_BYTES = 16
CACHE_WAYS = 32
_BESIDE = 16 << 10
"""Offsets, counters and padding of a table, at most."""

Footprint: TypeAlias = tuple[IntArray, IntArray, IntArray]
"""Bytes in HBM, bytes in host memory, and rows that HBM holds, at each of some ratios."""


def round_up(value: IntArray | int, step: int) -> IntArray:
    """The next multiple of `step`."""
    return -(-np.asarray(value, dtype=np.int64) // step) * step


def bucket_rows(rows: int, ranks: int) -> int:
    """Rows of the fullest of `ranks` ranks, in whole buckets of DynamicEmb."""
    return int(round_up(-(-rows // ranks), BUCKET_ROWS))


def row_bytes(table: Table, *, training: bool) -> int:
    """Bytes of a row with its optimizer state, as DynamicEmb stores it."""
    embedding = table.dim * table.value_bytes
    state = {
        Optimizer.SGD: 0,
        Optimizer.ADAM: 2 * embedding,
        Optimizer.ADAGRAD: embedding,
        Optimizer.ROWWISE_ADAGRAD: _ROWWISE_STATE_BYTES,
    }[table.optimizer]
    return int(round_up(embedding + (state if training else 0), 16))


def index_bytes(rows: IntArray | int, score_words: int) -> IntArray:
    """Bytes of the index of `rows` rows: key 8, digest 1, scores 8 each, reference count 4, and 4 a bucket."""
    rows = np.asarray(rows, dtype=np.int64)
    per_row = 8 + 1 + 8 * score_words + 4
    return rows * per_row + -(-rows // BUCKET_ROWS) * 4


def dynamicemb_footprint(table: Table, mode: Mode, ratios: FloatArray, ranks: int, *, training: bool) -> Footprint:
    """What `table` takes on the fullest of `ranks` ranks in `mode` at each of `ratios`."""
    row = row_bytes(table, training=training)
    capacity = bucket_rows(table.rows, ranks)
    zero = np.zeros(len(ratios), dtype=np.int64)
    held, cached = zero + capacity, mode is Mode.CACHING
    host_rows = zero
    if mode is Mode.HOST_ONLY:
        held, host_rows = host_rows, held
    elif mode is not Mode.HBM_ONLY:
        assert np.all((ratios > 0) & (ratios < 1)), "HBM holds a part of the table"
        held = round_up(np.maximum(1, np.floor(capacity * ratios)).astype(np.int64), CACHE_ROWS_STEP)
        rest = np.maximum(1, np.floor(capacity * (1 - ratios))).astype(np.int64)
        host_rows = zero + capacity if cached else round_up(rest, BUCKET_ROWS)
    values = (held + CACHE_OVERFLOW_ROWS if cached else held) * row
    indices = [host_rows, held] if cached else [held + host_rows]
    hbm = round_up(values, HBM_GRANULE)
    hbm += sum(round_up(index_bytes(rows, table.score_words), HBM_GRANULE) for rows in indices)
    if table.admission_rows:
        hbm += round_up(index_bytes(bucket_rows(table.admission_rows, ranks), 1), HBM_GRANULE)
    return hbm, round_up(host_rows * row, HOST_GRANULE), held


def state_bytes(table: Table, dim: int, *, training: bool) -> tuple[int, int]:
    """Optimizer state of a row: bytes that follow the weights, and bytes that are always in HBM."""
    if not training or table.optimizer is Optimizer.SGD:
        return 0, 0
    if table.optimizer is Optimizer.ROWWISE_ADAGRAD:
        return 0, 4
    return dim * 4 * (2 if table.optimizer is Optimizer.ADAM else 1), 0


def torchrec_footprint(
    table: Table, mode: Mode, ratios: FloatArray, rows: int, dim: int, *, training: bool
) -> Footprint:
    """What a shard of `rows` by `dim` of `table` takes in `mode` at each of `ratios`.

    A cache is as wide as the shard: one that is shared with wider tables takes more.
    """
    weights = rows * dim * table.value_bytes
    follows, pinned = state_bytes(table, dim, training=training)
    zero = np.zeros(len(ratios), dtype=np.int64)
    resident = rows * pinned + _BESIDE
    if mode is Mode.HBM_ONLY:
        hbm = weights + rows * follows + resident
        return zero + hbm, zero, zero + rows
    host = round_up(weights, HOST_GRANULE) + round_up(rows * follows, HOST_GRANULE)
    if mode is Mode.HOST_ONLY:
        return zero + resident, zero + host, zero
    assert mode is Mode.CACHING, f"TorchRec has no {mode}"
    sets = np.maximum(1, (np.floor(rows * ratios).astype(np.int64) + CACHE_WAYS - 1) // CACHE_WAYS)
    slots = sets * CACHE_WAYS
    scores = slots * 8 if table.eviction is Eviction.LRU else zero + (rows + 1) * 8
    hbm = slots * dim * table.value_bytes + slots * 8 + scores + rows * 4
    return hbm + resident, zero + host, slots
