"""Pointwise attention as HSTU's, for GPUs: values are summed with the SiLU of their scores, by Triton kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer_client.attention import Blocks

# Rows and columns of a block, warps, and blocks that are loaded ahead, by whether heads are wide, so that blocks must
# be smaller to fit in registers and shared memory, and whether numbers are of 32 bits.
_WIDE = 128
_SHAPES = {
    (False, False): (64, 64, 4, 3), (True, False): (64, 64, 8, 2), (False, True): (64, 32, 4, 2),
    (True, True): (32, 32, 4, 1),
}  # fmt: skip
_SHAPES_BACK = {
    (False, False): (64, 64, 4, 2), (True, False): (32, 64, 8, 2), (False, True): (32, 32, 4, 1),
    (True, True): (16, 32, 4, 1),
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
        self, query: Tensor, key: Tensor, value: Tensor, query_offsets: Tensor, key_offsets: Tensor,
        candidates: Tensor | None, max_queries: int, max_keys: int,
    ) -> Tensor:  # fmt: skip
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

    def options(self, query: Tensor, value: Tensor, shapes: dict[tuple[bool, bool], Any]) -> dict[str, Any]:
        dim, value_dim, single = query.shape[2], value.shape[2], query.dtype.itemsize > 2
        rows, columns, warps, stages = shapes[max(dim, value_dim) > _WIDE, single]
        return {
            "dim": dim, "value_dim": value_dim, "room": _room(dim), "value_room": _room(value_dim),
            "causal": self.causal, "block_rows": rows, "block_columns": columns, "num_warps": warps,
            "num_stages": stages, "precision": "ieee" if query.dtype == torch.float32 else "tf32",
        }  # fmt: skip


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Tensor:
        from examples.hstu import pointwise_kernels as kernels  # Triton is on machines with a GPU only

        query_offsets, key_offsets, candidates, *inputs = tensors
        query, key, value = map(_rows, inputs)
        ctx.call = call
        ctx.save_for_backward(query_offsets, key_offsets, candidates, query, key, value)
        out = value.new_empty(query.shape[0], query.shape[1], value.shape[2])
        options = call.options(query, value, _SHAPES)
        grid = (-(-call.max_queries // options["block_rows"]), query_offsets.shape[0] - 1, query.shape[1])
        if out.numel() and all(grid):
            kernels.forward[grid](
                query, key, value, out, query_offsets, key_offsets, candidates, call.scale, call.divisor,
                query.stride(0), key.stride(0), value.stride(0), out.stride(0), **options,
            )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from examples.hstu import pointwise_kernels as kernels

        call: _Call = ctx.call
        query_offsets, key_offsets, candidates, query, key, value = ctx.saved_tensors
        inputs = _rows(grads[0]), query, key, value
        of_query, of_key, of_value = (
            torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs[1:]
        )
        options = call.options(query, value, _SHAPES_BACK)
        sequences, heads = query_offsets.shape[0] - 1, query.shape[1]
        common = query_offsets, key_offsets, candidates, call.scale, call.divisor, *(t.stride(0) for t in inputs[1:])
        common = *common, inputs[0].stride(0)
        grid = (-(-call.max_queries // options["block_rows"]), sequences, heads)
        if query.numel() and key.numel() and all(grid):
            kernels.backward_query[grid](*inputs, of_query, *common, of_query.stride(0), **options)
            grid = (-(-call.max_keys // options["block_columns"]), sequences, heads)
            kernels.backward_key[grid](
                *inputs, of_key, of_value, *common, of_key.stride(0), of_value.stride(0), **options
            )
        return None, None, None, None, of_query, of_key, of_value


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with the heads of a row one after the other, as the kernels read them."""
    return tensor if tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2] else tensor.contiguous()


def _room(dim: int) -> int:
    """Triton's blocks are powers of two, and those of products at least 16."""
    return max(16, 1 << (dim - 1).bit_length())
