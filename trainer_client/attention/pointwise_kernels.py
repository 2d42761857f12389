"""Triton kernels of pointwise attention: values are summed with the SiLU of their scores.

A program has a block of queries, or of keys, of one head of one sequence. Scores are computed again in the backward
pass, so nothing is kept for it.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _seen(rows, columns, num_rows, num_columns, first_candidate, causal: tl.constexpr):
    """Which keys each query sees: all, or the history up to its own and itself."""
    within = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
    if causal:
        history = (columns[None, :] < first_candidate) | (rows[:, None] == columns[None, :])
        within = within & (rows[:, None] >= columns[None, :]) & history
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
    first_query = tl.load(query_offsets + sequence).to(tl.int64)
    num_queries = (tl.load(query_offsets + sequence + 1) - first_query).to(tl.int32)
    start = tl.program_id(0) * block_rows
    if start >= num_queries:
        return
    first_key = tl.load(key_offsets + sequence).to(tl.int64)
    num_keys = (tl.load(key_offsets + sequence + 1) - first_key).to(tl.int32)
    first_candidate = num_keys
    if causal:
        first_candidate = num_keys - tl.load(candidates + sequence).to(tl.int32)
    rows = start + tl.arange(0, block_rows)
    dims, value_dims = tl.arange(0, room), tl.arange(0, value_room)
    q = tl.load(
        query + (first_query + rows[:, None]) * row_stride + head * dim + dims[None, :],
        mask=(rows[:, None] < num_queries) & (dims[None, :] < dim), other=0.0,
    )  # fmt: skip
    total = tl.zeros([block_rows, value_room], dtype=tl.float32)
    end = num_keys
    if causal:
        end = tl.minimum(num_keys, start + block_rows)
    for begin in range(0, end, block_columns):
        columns = begin + tl.arange(0, block_columns)
        k = tl.load(
            key + (first_key + columns[:, None]) * key_stride + head * dim + dims[None, :],
            mask=(columns[:, None] < num_keys) & (dims[None, :] < dim), other=0.0,
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision=precision) * scale
        weights = scores * tl.sigmoid(scores)
        weights = tl.where(_seen(rows, columns, num_queries, num_keys, first_candidate, causal), weights, 0.0)
        v = tl.load(
            value + (first_key + columns[:, None]) * value_stride + head * value_dim + value_dims[None, :],
            mask=(columns[:, None] < num_keys) & (value_dims[None, :] < value_dim), other=0.0,
        )  # fmt: skip
        total += tl.dot(weights.to(v.dtype), v, input_precision=precision)
    tl.store(
        out + (first_query + rows[:, None]) * out_stride + head * value_dim + value_dims[None, :],
        (total / divisor).to(out.dtype.element_ty),
        mask=(rows[:, None] < num_queries) & (value_dims[None, :] < value_dim),
    )


@triton.jit
def backward_query(
    grad, query, key, value, of_query, query_offsets, key_offsets, candidates, scale, divisor,
    row_stride, key_stride, value_stride, grad_stride, of_stride,
    dim: tl.constexpr, value_dim: tl.constexpr, room: tl.constexpr, value_room: tl.constexpr,
    causal: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of queries."""
    sequence, head = tl.program_id(1), tl.program_id(2)
    first_query = tl.load(query_offsets + sequence).to(tl.int64)
    num_queries = (tl.load(query_offsets + sequence + 1) - first_query).to(tl.int32)
    start = tl.program_id(0) * block_rows
    if start >= num_queries:
        return
    first_key = tl.load(key_offsets + sequence).to(tl.int64)
    num_keys = (tl.load(key_offsets + sequence + 1) - first_key).to(tl.int32)
    first_candidate = num_keys
    if causal:
        first_candidate = num_keys - tl.load(candidates + sequence).to(tl.int32)
    rows = start + tl.arange(0, block_rows)
    dims, value_dims = tl.arange(0, room), tl.arange(0, value_room)
    q = tl.load(
        query + (first_query + rows[:, None]) * row_stride + head * dim + dims[None, :],
        mask=(rows[:, None] < num_queries) & (dims[None, :] < dim), other=0.0,
    )  # fmt: skip
    g = tl.load(
        grad + (first_query + rows[:, None]) * grad_stride + head * value_dim + value_dims[None, :],
        mask=(rows[:, None] < num_queries) & (value_dims[None, :] < value_dim), other=0.0,
    )  # fmt: skip
    total = tl.zeros([block_rows, room], dtype=tl.float32)
    end = num_keys
    if causal:
        end = tl.minimum(num_keys, start + block_rows)
    for begin in range(0, end, block_columns):
        columns = begin + tl.arange(0, block_columns)
        k = tl.load(
            key + (first_key + columns[:, None]) * key_stride + head * dim + dims[None, :],
            mask=(columns[:, None] < num_keys) & (dims[None, :] < dim), other=0.0,
        )  # fmt: skip
        v = tl.load(
            value + (first_key + columns[:, None]) * value_stride + head * value_dim + value_dims[None, :],
            mask=(columns[:, None] < num_keys) & (value_dims[None, :] < value_dim), other=0.0,
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision=precision) * scale
        gate = tl.sigmoid(scores)
        of_scores = tl.dot(g, tl.trans(v), input_precision=precision) * (gate * (1.0 + scores * (1.0 - gate)))
        of_scores = tl.where(_seen(rows, columns, num_queries, num_keys, first_candidate, causal), of_scores, 0.0)
        total += tl.dot(of_scores.to(k.dtype), k, input_precision=precision)
    tl.store(
        of_query + (first_query + rows[:, None]) * of_stride + head * dim + dims[None, :],
        (total * (scale / divisor)).to(of_query.dtype.element_ty),
        mask=(rows[:, None] < num_queries) & (dims[None, :] < dim),
    )


@triton.jit
def backward_key(
    grad, query, key, value, of_key, of_value, query_offsets, key_offsets, candidates, scale, divisor,
    row_stride, key_stride, value_stride, grad_stride, of_key_stride, of_value_stride,
    dim: tl.constexpr, value_dim: tl.constexpr, room: tl.constexpr, value_room: tl.constexpr,
    causal: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of keys and values."""
    sequence, head = tl.program_id(1), tl.program_id(2)
    first_key = tl.load(key_offsets + sequence).to(tl.int64)
    num_keys = (tl.load(key_offsets + sequence + 1) - first_key).to(tl.int32)
    start = tl.program_id(0) * block_columns
    if start >= num_keys:
        return
    first_query = tl.load(query_offsets + sequence).to(tl.int64)
    num_queries = (tl.load(query_offsets + sequence + 1) - first_query).to(tl.int32)
    first_candidate = num_keys
    if causal:
        first_candidate = num_keys - tl.load(candidates + sequence).to(tl.int32)
    columns = start + tl.arange(0, block_columns)
    dims, value_dims = tl.arange(0, room), tl.arange(0, value_room)
    k = tl.load(
        key + (first_key + columns[:, None]) * key_stride + head * dim + dims[None, :],
        mask=(columns[:, None] < num_keys) & (dims[None, :] < dim), other=0.0,
    )  # fmt: skip
    v = tl.load(
        value + (first_key + columns[:, None]) * value_stride + head * value_dim + value_dims[None, :],
        mask=(columns[:, None] < num_keys) & (value_dims[None, :] < value_dim), other=0.0,
    )  # fmt: skip
    of_k = tl.zeros([block_columns, room], dtype=tl.float32)
    of_v = tl.zeros([block_columns, value_room], dtype=tl.float32)
    since = 0
    if causal:
        since = (start // block_rows) * block_rows
    for begin in range(since, num_queries, block_rows):
        rows = begin + tl.arange(0, block_rows)
        q = tl.load(
            query + (first_query + rows[:, None]) * row_stride + head * dim + dims[None, :],
            mask=(rows[:, None] < num_queries) & (dims[None, :] < dim), other=0.0,
        )  # fmt: skip
        g = tl.load(
            grad + (first_query + rows[:, None]) * grad_stride + head * value_dim + value_dims[None, :],
            mask=(rows[:, None] < num_queries) & (value_dims[None, :] < value_dim), other=0.0,
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision=precision) * scale
        gate = tl.sigmoid(scores)
        seen = _seen(rows, columns, num_queries, num_keys, first_candidate, causal)
        weights = tl.where(seen, scores * gate, 0.0)
        of_v += tl.dot(tl.trans(weights.to(g.dtype)), g, input_precision=precision)
        of_scores = tl.dot(g, tl.trans(v), input_precision=precision) * (gate * (1.0 + scores * (1.0 - gate)))
        of_scores = tl.where(seen, of_scores, 0.0)
        of_k += tl.dot(tl.trans(of_scores.to(q.dtype)), q, input_precision=precision)
    inside = columns[:, None] < num_keys
    tl.store(
        of_key + (first_key + columns[:, None]) * of_key_stride + head * dim + dims[None, :],
        (of_k * (scale / divisor)).to(of_key.dtype.element_ty), mask=inside & (dims[None, :] < dim),
    )  # fmt: skip
    tl.store(
        of_value + (first_key + columns[:, None]) * of_value_stride + head * value_dim + value_dims[None, :],
        (of_v / divisor).to(of_value.dtype.element_ty), mask=inside & (value_dims[None, :] < value_dim),
    )  # fmt: skip
