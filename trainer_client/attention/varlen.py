"""Causal softmax attention by PyTorch's variable-length kernels, over samples in pieces.

One node of the graph computes a piece's own block and what it sees of earlier pieces. In the backward pass both take
the merged output and logarithm, so that nothing is kept but what attention over whole samples keeps, and keys and
values that have arrived.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer_client.attention import over_pieces
from trainer_client.attention.dense import DenseSoftmax, visible, wide
from trainer_client.attention.exchange import Exchange
from trainer_client.attention.pieces import Pieces
from trainer_client.checks import check_whole

_HALVES = (torch.bfloat16, torch.float16)


class Packed(NamedTuple):
    """Where packed queries and keys begin, (n + 1,) int32 each, and the most of a sequence."""

    query_offsets: Tensor
    key_offsets: Tensor
    max_queries: int
    max_keys: int
    causal: bool  # each query sees the keys up to its own, of which there are as many; else all


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenSoftmax:
    """Causal softmax attention of packed sequences, some of which may be pieces: by PyTorch's flash kernels on GPUs.

    They take bfloat16 and float16. Other dtypes, and CPUs, are computed in plain PyTorch, one sequence after the other,
    which waits for a GPU; halves are computed in float32.

    Attributes:
        max_length: No sequence is longer.
        scale: Of the scores; default: 1 / √(head dim).
    """

    max_length: int
    scale: float | None = None

    def __post_init__(self) -> None:
        check_whole(self, max_length=1)
        if torch.cuda.is_available():
            _find_whole()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, pieces: Pieces | None) -> Tensor:
        """Attention as if each sample were whole.

        All ranks that share a sample call it in the same order, and all of them call `backward`.

        Args:
            query: (rows, heads, head dim), one sequence of the rank's batch after the other.
            key: (rows, key heads, head dim); heads are a multiple of key heads.
            value: (rows, key heads, value dim); the kernels want that of the head.
            offsets: (sequences + 1,) int32, where the sequences begin.
            pieces: Which sequences are pieces; None if none is.

        Returns:
            (rows, heads, value dim).

        Raises:
            ValueError: If a split sample is not causal: it has more than one candidate, or a context that sees all of
                the history.
        """
        if pieces is None and _by_flash(query):
            whole: Tensor = _whole(query, key, value, offsets, self.max_length, self.scale)
            return whole
        if pieces is not None:
            _check_causal(pieces)
        result: Tensor = over_pieces.untraced(_Attend.apply, self, pieces, offsets, query, key, value)
        return result

    def forward(self, query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
        """Outputs, and (heads, rows) logarithms of the sums of exponentials."""
        if not _by_flash(query):
            return self._plain(query, key, value, packed)
        out, logs, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, packed.query_offsets, packed.key_offsets, packed.max_queries, packed.max_keys, 0.0,
            packed.causal, return_debug_mask=False, scale=self.scale,
        )  # fmt: skip
        return out, logs

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logs: Tensor, packed: Packed
    ) -> tuple[Tensor, ...]:
        """Gradients of queries, keys and values; output and logarithms may be of more keys than these."""
        if not _by_flash(query):
            return self._plain_backward(grad, query, key, value, out, logs, packed)
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of random numbers, without dropout
        results: tuple[Tensor, ...] = torch.ops.aten._flash_attention_backward(
            grad, query, key, value, out, logs, packed.query_offsets, packed.key_offsets, packed.max_queries,
            packed.max_keys, 0.0, packed.causal, state, query.new_empty(0), scale=self.scale,
        )  # fmt: skip
        return results

    def _plain(self, query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
        queries, keys = packed.query_offsets.diff().tolist(), packed.key_offsets.diff().tolist()
        masks = [visible(length, 0, 0, query.device) if packed.causal else None for length in queries]
        out, logs = DenseSoftmax(scale=self.scale).over(query, key, value, queries, keys, masks)
        return out, logs.t()

    def _plain_backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logs: Tensor, packed: Packed
    ) -> tuple[Tensor, ...]:
        """Through these keys' part of the merged output, which is Σ exp(part's logarithm − logs) part."""
        grad = wide(grad)
        inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        with torch.enable_grad():
            part, part_logs = self._plain(wide(inputs[0]), wide(inputs[1]), wide(inputs[2]), packed)
        weights = (part_logs.detach() - logs).exp()
        of_logs = weights * ((part.detach() - wide(out)) * grad).sum(-1).t()
        return torch.autograd.grad([part, part_logs], inputs, [weights.t().unsqueeze(-1) * grad, of_logs])


_whole: Any = None
"""PyTorch's function for whole samples, which the compiler takes into the graph around it."""


def _find_whole() -> None:
    global _whole  # noqa: PLW0603
    if _whole is not None:
        return
    from torch.nn.attention.varlen import varlen_attn  # takes long to import

    # The flag for causal became the number of keys on both sides.
    by_size = "window_size" in inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if by_size else {"is_causal": True}

    def whole(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, max_length: int, scale: float | None) -> Any:
        options: dict[str, Any] = dict(causal)
        if query.shape[1] != key.shape[1]:
            options["enable_gqa"] = True
        if scale is not None:
            options["scale"] = scale
        return varlen_attn(query, key, value, offsets, offsets, max_length, max_length, **options)

    _whole = whole


def _by_flash(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in _HALVES and query.shape[0] > 0


class _Attend(torch.autograd.Function):
    """All of an attention: own blocks, the exchange, and blocks of queries with keys of earlier pieces."""

    @staticmethod
    def forward(ctx: Any, kernel: VarlenSoftmax, pieces: Pieces | None, offsets: Tensor, *rows_of: Tensor) -> Tensor:
        query, key, value = rows_of
        ctx.kernel, ctx.pieces = kernel, pieces
        packed = Packed(offsets, offsets, kernel.max_length, kernel.max_length, True)
        if pieces is None:
            out, logs = kernel.forward(query, key, value, packed)
            ctx.save_for_backward(query, key, value, out, logs, offsets)
            return out
        rows = pieces.rows(offsets)
        local_keys, local_values = key.index_select(0, rows), value.index_select(0, rows)
        exchange = Exchange(pieces, key[:0], value[:0], query[:0])
        keys, values, _ = exchange.start(local_keys, local_values, query[:0])
        out, logs = kernel.forward(query, key, value, packed)
        exchange.wait()
        blocks = _blocks(pieces, query.device)
        if blocks is not None:
            seeing = rows[: pieces.num_seeing]
            keys, values = pieces.keys_of(local_keys, keys), pieces.keys_of(local_values, values)
            results = kernel.forward(query.index_select(0, seeing), keys, values, blocks)
            _merge_into(out, logs, seeing, *results)
        ctx.save_for_backward(query, key, value, out, logs, offsets, rows, keys, values)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kernel, pieces = ctx.kernel, ctx.pieces
        query, key, value, out, logs, offsets, *others = ctx.saved_tensors
        grad = grads[0].contiguous()
        own = Packed(offsets, offsets, kernel.max_length, kernel.max_length, True)
        if pieces is None:
            return None, None, None, *kernel.backward(grad, query, key, value, out, logs, own)
        rows, keys, values = others
        seeing = rows[: pieces.num_seeing]
        blocks = _blocks(pieces, query.device)
        exchange = Exchange(pieces, key[:0], value[:0], query[:0])
        arrived = [like.new_zeros(pieces.num_keys, *like.shape[1:]) for like in (key, value)]
        of_queries: Tensor | None = None
        local: list[Tensor | None] = [None, None]
        if blocks is not None:
            of_queries, *of_packed = kernel.backward(
                grad.index_select(0, seeing), query.index_select(0, seeing), keys, values, out.index_select(0, seeing),
                logs.index_select(1, seeing), blocks,
            )  # fmt: skip
            local, arrived = map(list, zip(*map(pieces.unpack_keys, of_packed), strict=True))
        of_query, of_key, of_value = kernel.backward(grad, query, key, value, out, logs, own)
        exchange.start_home(arrived[0], arrived[1], query[:0])
        if of_queries is not None:
            of_query.index_add_(0, seeing, of_queries)
        home = exchange.finish_home()
        for total, *parts in zip((of_key, of_value), home, local, strict=False):
            for part in parts:
                if part is not None:
                    total.index_add_(0, rows, part)
        return None, None, None, of_query, of_key, of_value


def _check_causal(pieces: Pieces) -> None:
    if pieces.num_candidates > 1:
        raise ValueError(
            f"a split sample has {pieces.num_candidates} candidates, which must not see each other, but this attention "
            "is causal; use attend_over_pieces with a kernel that has the mask"
        )
    if pieces.num_context:
        raise ValueError(
            f"a split sample has {pieces.num_context} contextual positions, which see all of the history, but this "
            "attention is causal; use attend_over_pieces with a kernel that has the mask, or say in "
            "PieceGroup.pieces(contextual=False) that they are causal too"
        )


def _blocks(pieces: Pieces, device: torch.device) -> Packed | None:
    blocks = pieces.blocks(device)
    if blocks is None:
        return None
    return Packed(blocks.query_offsets, blocks.key_offsets, blocks.max_queries, blocks.max_keys, False)


def _merge_into(out: Tensor, logs: Tensor, rows: Tensor, results: Tensor, other_logs: Tensor) -> None:
    """Takes into some rows the results of their queries over other keys."""
    own_logs = logs.index_select(1, rows)
    merged = torch.logaddexp(own_logs, other_logs)
    weights = [(part - merged).exp().t().unsqueeze(-1) for part in (own_logs, other_logs)]
    sums = out.index_select(0, rows) * weights[0]
    sums.addcmul_(results.to(sums.dtype), weights[1].to(sums.dtype))
    out.index_copy_(0, rows, sums.to(out.dtype))
    logs.index_copy_(1, rows, merged)
