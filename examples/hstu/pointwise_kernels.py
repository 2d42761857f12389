"""Triton kernels of pointwise attention: values are summed with the SiLU of their scores.

A program has a block of queries, or of keys, of one head of one sequence. Scores are computed again in the backward
pass, so nothing is kept for it.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _span(offsets, sequence):
    """First row of a sequence, and its number of rows."""
    first = tl.load(offsets + sequence).to(tl.int64)
    return first, (tl.load(offsets + sequence + 1) - first).to(tl.int32)


@triton.jit
def _load(rows_of, first, rows, num_rows, stride, head, width: tl.constexpr, columns):
    """(rows, columns) of a head, zero beyond the sequence and the head's width."""
    at = rows_of + (first + rows[:, None]) * stride + head * width + columns[None, :]
    return tl.load(at, mask=(rows[:, None] < num_rows) & (columns[None, :] < width), other=0.0)


@triton.jit
def _store(rows_of, values, first, rows, num_rows, stride, head, width: tl.constexpr, columns):
    at = rows_of + (first + rows[:, None]) * stride + head * width + columns[None, :]
    tl.store(at, values.to(rows_of.dtype.element_ty), mask=(rows[:, None] < num_rows) & (columns[None, :] < width))


@triton.jit
def _seen(rows, keys, num_rows, num_keys, candidates, sequence, causal: tl.constexpr):
    """Which keys each query sees: all, or the history up to its own and itself."""
    within = (rows[:, None] < num_rows) & (keys[None, :] < num_keys)
    if causal:
        first_candidate = num_keys - tl.load(candidates + sequence).to(tl.int32)
        history = (keys[None, :] < first_candidate) | (rows[:, None] == keys[None, :])
        within = within & (rows[:, None] >= keys[None, :]) & history
    return within


@triton.jit
def forward(
    query, key, value, out, query_offsets, key_offsets, candidates, scale, divisor,
    row_stride, key_stride, value_stride, out_stride,
    dim: tl.constexpr, value_dim: tl.constexpr, room: tl.constexpr, value_room: tl.constexpr,
    causal: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Outputs of a block of queries."""
    sequence, head = tl.program_id(1), tl.program_id(2)
    first_query, num_queries = _span(query_offsets, sequence)
    start = tl.program_id(0) * block_rows
    if start >= num_queries:
        return
    first_key, num_keys = _span(key_offsets, sequence)
    rows = start + tl.arange(0, block_rows)
    dims, value_dims = tl.arange(0, room), tl.arange(0, value_room)
    q = _load(query, first_query, rows, num_queries, row_stride, head, dim, dims)
    total = tl.zeros([block_rows, value_room], dtype=tl.float32)
    end = num_keys
    if causal:
        end = tl.minimum(num_keys, start + block_rows)
    for begin in range(0, end, block_columns):
        keys = begin + tl.arange(0, block_columns)
        k = _load(key, first_key, keys, num_keys, key_stride, head, dim, dims)
        scores = tl.dot(q, tl.trans(k), input_precision=precision) * scale
        seen = _seen(rows, keys, num_queries, num_keys, candidates, sequence, causal)
        weights = tl.where(seen, scores * tl.sigmoid(scores), 0.0)
        v = _load(value, first_key, keys, num_keys, value_stride, head, value_dim, value_dims)
        total += tl.dot(weights.to(v.dtype), v, input_precision=precision)
    _store(out, total / divisor, first_query, rows, num_queries, out_stride, head, value_dim, value_dims)


@triton.jit
def backward_query(
    grad, query, key, value, of_query, query_offsets, key_offsets, candidates, scale, divisor,
    row_stride, key_stride, value_stride, grad_stride, of_stride,
    dim: tl.constexpr, value_dim: tl.constexpr, room: tl.constexpr, value_room: tl.constexpr,
    causal: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of queries."""
    sequence, head = tl.program_id(1), tl.program_id(2)
    first_query, num_queries = _span(query_offsets, sequence)
    start = tl.program_id(0) * block_rows
    if start >= num_queries:
        return
    first_key, num_keys = _span(key_offsets, sequence)
    rows = start + tl.arange(0, block_rows)
    dims, value_dims = tl.arange(0, room), tl.arange(0, value_room)
    q = _load(query, first_query, rows, num_queries, row_stride, head, dim, dims)
    g = _load(grad, first_query, rows, num_queries, grad_stride, head, value_dim, value_dims)
    total = tl.zeros([block_rows, room], dtype=tl.float32)
    end = num_keys
    if causal:
        end = tl.minimum(num_keys, start + block_rows)
    for begin in range(0, end, block_columns):
        keys = begin + tl.arange(0, block_columns)
        k = _load(key, first_key, keys, num_keys, key_stride, head, dim, dims)
        v = _load(value, first_key, keys, num_keys, value_stride, head, value_dim, value_dims)
        scores = tl.dot(q, tl.trans(k), input_precision=precision) * scale
        gate = tl.sigmoid(scores)
        of_scores = tl.dot(g, tl.trans(v), input_precision=precision) * (gate * (1.0 + scores * (1.0 - gate)))
        seen = _seen(rows, keys, num_queries, num_keys, candidates, sequence, causal)
        total += tl.dot(tl.where(seen, of_scores, 0.0).to(k.dtype), k, input_precision=precision)
    _store(of_query, total * (scale / divisor), first_query, rows, num_queries, of_stride, head, dim, dims)


@triton.jit
def backward_key(
    grad, query, key, value, of_key, of_value, query_offsets, key_offsets, candidates, scale, divisor,
    row_stride, key_stride, value_stride, grad_stride, of_key_stride, of_value_stride,
    dim: tl.constexpr, value_dim: tl.constexpr, room: tl.constexpr, value_room: tl.constexpr,
    causal: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of keys and values."""
    sequence, head = tl.program_id(1), tl.program_id(2)
    first_key, num_keys = _span(key_offsets, sequence)
    start = tl.program_id(0) * block_columns
    if start >= num_keys:
        return
    first_query, num_queries = _span(query_offsets, sequence)
    keys = start + tl.arange(0, block_columns)
    dims, value_dims = tl.arange(0, room), tl.arange(0, value_room)
    k = _load(key, first_key, keys, num_keys, key_stride, head, dim, dims)
    v = _load(value, first_key, keys, num_keys, value_stride, head, value_dim, value_dims)
    of_k = tl.zeros([block_columns, room], dtype=tl.float32)
    of_v = tl.zeros([block_columns, value_room], dtype=tl.float32)
    since = 0
    if causal:
        since = (start // block_rows) * block_rows
    for begin in range(since, num_queries, block_rows):
        rows = begin + tl.arange(0, block_rows)
        q = _load(query, first_query, rows, num_queries, row_stride, head, dim, dims)
        g = _load(grad, first_query, rows, num_queries, grad_stride, head, value_dim, value_dims)
        scores = tl.dot(q, tl.trans(k), input_precision=precision) * scale
        gate = tl.sigmoid(scores)
        seen = _seen(rows, keys, num_queries, num_keys, candidates, sequence, causal)
        weights = tl.where(seen, scores * gate, 0.0)
        of_v += tl.dot(tl.trans(weights.to(g.dtype)), g, input_precision=precision)
        of_scores = tl.dot(g, tl.trans(v), input_precision=precision) * (gate * (1.0 + scores * (1.0 - gate)))
        of_k += tl.dot(tl.trans(tl.where(seen, of_scores, 0.0).to(q.dtype)), q, input_precision=precision)
    _store(of_key, of_k * (scale / divisor), first_key, keys, num_keys, of_key_stride, head, dim, dims)
    _store(of_value, of_v / divisor, first_key, keys, num_keys, of_value_stride, head, value_dim, value_dims)
