"""Pointwise attention as HSTU's, for GPUs: values are summed with the SiLU of their scores, by Triton kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer_client.attention.pieces import Blocks


class _Shape(NamedTuple):
    """How a call is laid out: rows and columns of a block, warps, and blocks that are loaded ahead."""

    rows: int
    columns: int
    warps: int
    stages: int


_WIDE = 128  # width of a head from which blocks are smaller, so that they fit in registers and shared memory
# By whether heads are wide, and whether numbers are of 32 bits.
_SHAPES = {
    (False, False): _Shape(64, 64, 4, 3), (True, False): _Shape(64, 64, 8, 2),
    (False, True): _Shape(64, 32, 4, 2), (True, True): _Shape(32, 32, 4, 1),
}  # fmt: skip
_SHAPES_BACK = {
    (False, False): _Shape(64, 64, 4, 2), (True, False): _Shape(32, 64, 8, 2),
    (False, True): _Shape(32, 32, 4, 1), (True, True): _Shape(16, 32, 4, 1),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PointwiseSilu:
    """The pointwise attention of HSTU on a GPU: what `DenseSilu` computes, for float32, bfloat16 and float16.

    `own` and `other` are what `attend_over_pieces` takes. Contextual positions are causal.

    Attributes:
        max_length: No sequence is longer.
        scale: Of the scores; default: 1 / √(head dim).
        divisor: Of the sums; a constant such as the longest sequence of all, which no division of samples changes.
    """

    max_length: int
    scale: float | None = None
    divisor: float = 1.0

    def own(
        self, query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, num_candidates: Tensor | int = 0
    ) -> Tensor:
        """Attention of each sequence with itself.

        Args:
            query: (rows, heads, head dim).
            key: The same.
            value: (rows, heads, value dim).
            offsets: (n + 1,) integers, where the sequences begin.
            num_candidates: (n,) candidates at the end of each sequence; a number for all.

        Returns:
            (rows, heads, value dim).
        """
        candidates = torch.as_tensor(num_candidates, device=query.device).expand(offsets.shape[0] - 1).contiguous()
        return self._attend(query, key, value, offsets, offsets, candidates, self.max_length, self.max_length)

    def other(self, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks) -> Tensor:
        """Attention in which each query of a block sees all keys of the block."""
        offsets = blocks.query_offsets, blocks.key_offsets
        return self._attend(query, key, value, *offsets, None, blocks.max_queries, blocks.max_keys)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_offsets: Tensor,
        key_offsets: Tensor,
        candidates: Tensor | None,
        max_queries: int,
        max_keys: int,
    ) -> Tensor:
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        call = _Call(candidates is not None, scale, self.divisor, max_queries, max_keys)
        tables = query_offsets, key_offsets, query_offsets if candidates is None else candidates
        result: Tensor = _Attend.apply(call, *tables, query, key, value)  # type: ignore[no-untyped-call]
        return result


class _Call(NamedTuple):
    """What kernels need beside tensors."""

    causal: bool
    scale: float
    divisor: float
    max_queries: int
    max_keys: int

    def options(self, query: Tensor, value: Tensor, shape: _Shape) -> dict[str, Any]:
        dim, value_dim = query.shape[2], value.shape[2]
        return {
            "dim": dim, "value_dim": value_dim, "room": _room(dim), "value_room": _room(value_dim),
            "causal": self.causal, "block_rows": shape.rows, "block_columns": shape.columns, "num_warps": shape.warps,
            "num_stages": shape.stages,
            "precision": "ieee" if query.dtype == torch.float32 else "tf32",
        }  # fmt: skip


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        query_offsets: Tensor,
        key_offsets: Tensor,
        candidates: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        from trainer_client.attention import pointwise_kernels as kernels  # Triton is on machines with a GPU only

        query, key, value = (_rows(tensor) for tensor in (query, key, value))
        ctx.call = call
        ctx.save_for_backward(query_offsets, key_offsets, candidates, query, key, value)
        out = value.new_empty(query.shape[0], query.shape[1], value.shape[2])
        shape = _SHAPES[_kind(query, value)]
        grid = (-(-call.max_queries // shape.rows), query_offsets.shape[0] - 1, query.shape[1])
        if out.numel() and all(grid):
            kernels.forward[grid](
                query, key, value, out, query_offsets, key_offsets, candidates, call.scale, call.divisor,
                query.stride(0), key.stride(0), value.stride(0), out.stride(0), **call.options(query, value, shape),
            )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from trainer_client.attention import pointwise_kernels as kernels

        call: _Call = ctx.call
        query_offsets, key_offsets, candidates, query, key, value = ctx.saved_tensors
        grad = _rows(grads[0])
        of_query, of_key, of_value = (torch.zeros_like(tensor, memory_format=torch.contiguous_format)
                                      for tensor in (query, key, value))  # fmt: skip
        shape = _SHAPES_BACK[_kind(query, value)]
        sequences, heads = query_offsets.shape[0] - 1, query.shape[1]
        options = call.options(query, value, shape)
        tables = query_offsets, key_offsets, candidates, call.scale, call.divisor
        strides = query.stride(0), key.stride(0), value.stride(0), grad.stride(0)
        grid = (-(-call.max_queries // shape.rows), sequences, heads)
        if query.numel() and key.numel() and all(grid):
            kernels.backward_query[grid](
                grad, query, key, value, of_query, *tables, *strides, of_query.stride(0), **options
            )
            grid = (-(-call.max_keys // shape.columns), sequences, heads)
            kernels.backward_key[grid](
                grad, query, key, value, of_key, of_value, *tables, *strides, of_key.stride(0), of_value.stride(0),
                **options,
            )  # fmt: skip
        return None, None, None, None, of_query, of_key, of_value


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with the heads of a row one after the other, as the kernels read them."""
    return tensor if tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2] else tensor.contiguous()


def _kind(query: Tensor, value: Tensor) -> tuple[bool, bool]:
    return max(query.shape[2], value.shape[2]) > _WIDE, query.dtype.itemsize > 2


def _room(dim: int) -> int:
    """Triton's blocks are powers of two, and those of products at least 16."""
    return max(16, 1 << (dim - 1).bit_length())
