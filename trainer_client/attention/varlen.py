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
from trainer_client.attention.dense import wide
from trainer_client.attention.exchange import Exchange
from trainer_client.attention.pieces import Pieces
from trainer_client.checks import check_whole

_HALVES = (torch.bfloat16, torch.float16)


class Packed(NamedTuple):
    """Where packed queries and keys begin, (n + 1,) int32 each, and the most of a sequence.

    Attributes:
        query_offsets: Of queries.
        key_offsets: Of keys.
        max_queries: No sequence has more.
        max_keys: No sequence has more.
        causal: Each query sees the keys up to its own, of which there are as many; else all.
    """

    query_offsets: Tensor
    key_offsets: Tensor
    max_queries: int
    max_keys: int
    causal: bool


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
        result: Tensor = over_pieces.apart(_attend, self, pieces, offsets, query, key, value)
        return result

    def forward(self, query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
        """Outputs, and (heads, rows) logarithms of the sums of exponentials."""
        if not _by_flash(query):
            with torch.autocast(query.device.type, enabled=False):
                return _plain_forward(query, key, value, packed, self._scale_of(query))
        out, logs, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, packed.query_offsets, packed.key_offsets, packed.max_queries, packed.max_keys, 0.0,
            packed.causal, return_debug_mask=False, scale=self.scale,
        )  # fmt: skip
        return out, logs

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logs: Tensor, packed: Packed
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values; output and logarithms may be of more keys than these."""
        if not _by_flash(query):
            return _plain_backward(grad, query, key, value, out, logs, packed, self._scale_of(query))
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of random numbers, without dropout
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            grad, query, key, value, out, logs, packed.query_offsets, packed.key_offsets, packed.max_queries,
            packed.max_keys, 0.0, packed.causal, state, query.new_empty(0), scale=self.scale,
        )  # fmt: skip
        return found

    def _scale_of(self, query: Tensor) -> float:
        return float(query.shape[-1] ** -0.5) if self.scale is None else self.scale


def _attend(*arguments: Any) -> Tensor:
    result: Tensor = _Attend.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


_whole: Any = None
"""PyTorch's function for whole samples, which the compiler takes into the graph around it."""


def _find_whole() -> None:
    global _whole  # noqa: PLW0603
    if _whole is not None:
        return
    from torch.nn.attention.varlen import varlen_attn  # takes long to import

    # The flag for causal became a window.
    by_window = "window_size" in inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if by_window else {"is_causal": True}

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
    def forward(
        ctx: Any,
        kernel: VarlenSoftmax,
        pieces: Pieces | None,
        offsets: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        ctx.kernel, ctx.pieces = kernel, pieces
        own = Packed(offsets, offsets, kernel.max_length, kernel.max_length, True)
        if pieces is None:
            out, logs = kernel.forward(query, key, value, own)
            ctx.save_for_backward(query, key, value, out, logs, offsets)
            return out
        rows = pieces.rows(offsets)
        exchange = Exchange(pieces)
        own_keys, own_values = key.index_select(0, rows), value.index_select(0, rows)
        keys, values, _ = exchange.start(query[:0], own_keys, own_values)
        out, logs = kernel.forward(query, key, value, own)
        exchange.wait()
        blocks = _blocks(pieces, query.device)
        if blocks is not None:
            seeing = rows[: pieces.num_seeing]
            keys, values = pieces.keys_of(own_keys, keys), pieces.keys_of(own_values, values)
            found = kernel.forward(query.index_select(0, seeing), keys, values, blocks)
            _merge_into(out, logs, seeing, *found)
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
        exchange = Exchange(pieces, like=(query, key, value))
        of_queries, kept = None, None
        arrived = [like.new_zeros(pieces.keys.num_arriving, *like.shape[1:]) for like in (key, value)]
        if blocks is not None:
            of_queries, of_keys, of_values = kernel.backward(
                grad.index_select(0, seeing), query.index_select(0, seeing), keys, values, out.index_select(0, seeing),
                logs.index_select(1, seeing), blocks,
            )  # fmt: skip
            (kept_keys, arrived[0]), (kept_values, arrived[1]) = map(pieces.apart, (of_keys, of_values))
            kept = kept_keys, kept_values
        of_query, of_key, of_value = kernel.backward(grad, query, key, value, out, logs, own)
        exchange.start_home(arrived[0], arrived[1], query[:0])
        if of_queries is not None:
            of_query.index_add_(0, seeing, of_queries)
        _, *home = exchange.finish_home()
        for total, found, from_here in zip((of_key, of_value), home, kept or (None, None), strict=True):
            for part in (found, from_here):
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


def _merge_into(out: Tensor, logs: Tensor, rows: Tensor, found: Tensor, found_logs: Tensor) -> None:
    """Takes into some rows what their queries found among other keys."""
    own_logs = logs.index_select(1, rows)
    merged = torch.logaddexp(own_logs, found_logs)
    weights = [(part - merged).exp().t().unsqueeze(-1) for part in (own_logs, found_logs)]
    sums = out.index_select(0, rows) * weights[0]
    sums.addcmul_(found.to(sums.dtype), weights[1].to(sums.dtype))
    out.index_copy_(0, rows, sums.to(out.dtype))
    logs.index_copy_(1, rows, merged)


def _sequences(packed: Packed) -> list[tuple[int, int, int, int]]:
    queries, keys = packed.query_offsets.tolist(), packed.key_offsets.tolist()
    return list(zip(queries, queries[1:], keys, keys[1:], strict=False))


def _scores(query: Tensor, key: Tensor, scale: float, *, causal: bool) -> Tensor:
    """(heads, queries, keys)."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if causal:
        seen = torch.ones(query.shape[0], key.shape[0], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores


def _plain_forward(query: Tensor, key: Tensor, value: Tensor, packed: Packed, scale: float) -> tuple[Tensor, Tensor]:
    dtype = value.dtype
    query, key, value = map(wide, (query, key, value))
    out = query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
    logs = query.new_zeros(query.shape[1], query.shape[0])
    key, value = (_for_each_head(tensor, query) for tensor in (key, value))
    for q, q_end, k, k_end in _sequences(packed):
        scores = _scores(query[q:q_end], key[k:k_end], scale, causal=packed.causal)
        logs[:, q:q_end] = scores.logsumexp(-1)
        out[q:q_end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[k:k_end])
    return out.to(dtype), logs


def _plain_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logs: Tensor,
    packed: Packed,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    shapes, dtypes = (key.shape, value.shape), (query.dtype, key.dtype, value.dtype)
    grad, query, key, value, out = map(wide, (grad, query, key, value, out))
    key, value = (_for_each_head(tensor, query) for tensor in (key, value))
    of_query, of_key, of_value = (torch.zeros_like(tensor) for tensor in (query, key, value))
    for q, q_end, k, k_end in _sequences(packed):
        here, there = slice(q, q_end), slice(k, k_end)
        weights = (_scores(query[here], key[there], scale, causal=packed.causal) - logs[:, here, None]).exp()
        of_value[there] = torch.einsum("hqk,qhd->khd", weights, grad[here])
        of_weights = torch.einsum("qhd,khd->hqk", grad[here], value[there])
        of_scores = weights * (of_weights - (grad[here] * out[here]).sum(-1).t()[..., None]) * scale
        of_query[here] = torch.einsum("hqk,khd->qhd", of_scores, key[there])
        of_key[there] = torch.einsum("hqk,qhd->khd", of_scores, query[here])
    repeats = query.shape[1] // shapes[0][1]
    of_key, of_value = (
        part.view(*shape[:2], repeats, shape[2]).sum(2) for part, shape in zip((of_key, of_value), shapes, strict=True)
    )
    of_query, of_key, of_value = map(Tensor.to, (of_query, of_key, of_value), dtypes)
    return of_query, of_key, of_value


def _for_each_head(tensor: Tensor, query: Tensor) -> Tensor:
    """Keys or values once for each head of the queries."""
    repeats = query.shape[1] // tensor.shape[1]
    return tensor.repeat_interleave(repeats, 1) if repeats > 1 else tensor
