"""Attention over sequences of different lengths, packed one after the other; of parts of sequences too.

A sequence is history, then candidates: the history attends causally, a candidate to the history and to itself. With at
most one candidate that is plain causal attention. Softmax attention is by PyTorch's own kernels; the pointwise one of
HSTU, which sums values with the SiLU of their scores, by Triton on GPUs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from examples.hstu.pointwise import PointwiseSilu
from trainer_client.attention import (
    Blocks,
    DenseSilu,
    DenseSoftmax,
    Pieces,
    VarlenSoftmax,
    attend_over_pieces,
)

Kernel = Literal["auto", "varlen", "flex", "nested_flash", "nested_cudnn", "dense", "silu", "dense_silu"]
KERNELS: tuple[Kernel, ...] = ("auto", "varlen", "flex", "nested_flash", "nested_cudnn", "dense")
Attention = Literal["softmax", "silu"]
ATTENTIONS: tuple[Attention, ...] = ("softmax", "silu")
OVER_PARTS = frozenset({"varlen", "flex", "dense", "silu", "dense_silu"})
CAUSAL_ONLY = frozenset({"varlen", "nested_flash", "nested_cudnn"})
TRACEABLE = frozenset({"varlen"})  # torch.compile takes it into the graph around it
# The flag for causal became a window.
_CAUSAL: dict[str, Any] = (
    {"window_size": (-1, 0)} if "window_size" in inspect.signature(varlen_attn).parameters else {"is_causal": True}
)


def choose_kernel(
    kernel: Kernel, device: torch.device, num_candidates: int, *, attention: Attention = "softmax", split: bool = False
) -> Kernel:
    """The kernel that "auto" stands for; refuses those that cannot compute the mask, or nothing on the device.

    Raises:
        ValueError: If the kernel is causal only and samples have several candidates, it needs a GPU, or it cannot
            compute the attention, or parts of samples.
    """
    if attention == "silu":
        if kernel not in ("auto", "dense"):
            raise ValueError(f"the kernel {kernel!r} is of softmax attention; use auto or dense for silu")
        return "silu" if kernel == "auto" and device.type == "cuda" else "dense_silu"
    if split and kernel not in ("auto", *OVER_PARTS):
        raise ValueError(f"the kernel {kernel!r} gives no logarithms of sums, by which parts of a sample are merged; "
                         "use varlen, flex or dense")  # fmt: skip
    if kernel == "auto":
        if device.type != "cuda":
            return "dense"
        return "varlen" if num_candidates <= 1 else "flex"
    if device.type != "cuda" and kernel != "dense":
        raise ValueError(f"the kernel {kernel!r} needs a GPU; use dense or auto")
    if kernel in CAUSAL_ONLY and num_candidates > 1:
        raise ValueError(f"the kernel {kernel!r} is causal, and {num_candidates} candidates must not see each other; "
                         "use flex or dense")  # fmt: skip
    return kernel


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: torch.Tensor,
    num_candidates: torch.Tensor,
    *,
    max_length: int,
    kernel: Kernel,
    pieces: Pieces | None = None,
) -> torch.Tensor:
    """Attention of each sequence with itself, and of those that are pieces of samples with what comes before them.

    Args:
        query: (tokens, heads, head dim).
        key: The same.
        value: The same.
        offsets: (n + 1,) int32, where the sequences begin.
        num_candidates: (n,) candidates at the end of each sequence; kernels that are causal take them as history.
        max_length: No sequence is longer; not read from the device.
        kernel: One of `KERNELS`, but not "auto"; "silu" and "dense_silu" are pointwise, divided by `max_length`.
        pieces: Of samples that other ranks have the rest of.

    Returns:
        (tokens, heads, head dim).
    """
    if query.shape[0] == 0:
        return query + key + value  # no token: nothing to attend to, and still a part of the graph
    if pieces is not None:
        return _over_pieces(query, key, value, offsets, num_candidates, max_length, kernel, pieces)
    match kernel:
        case "varlen":
            return _varlen(query, key, value, offsets, max_length)
        case "flex":
            return _flex(query, key, value, offsets, num_candidates)
        case "nested_flash" | "nested_cudnn":
            backend = SDPBackend.FLASH_ATTENTION if kernel == "nested_flash" else SDPBackend.CUDNN_ATTENTION
            return _nested(query, key, value, offsets, max_length, backend)
        case "dense":
            return _dense(query, key, value, offsets, num_candidates)
        case "silu" | "dense_silu":
            own, _ = _silu(offsets, num_candidates, max_length, kernel)
            attended: torch.Tensor = own(query, key, value)
            return attended
    raise ValueError(f"the kernel is {kernel!r}; use one of {', '.join(KERNELS[1:])}")


def _over_pieces(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: torch.Tensor,
    num_candidates: torch.Tensor,
    max_length: int,
    kernel: Kernel,
    pieces: Pieces,
) -> torch.Tensor:
    own: Callable[..., Any]
    other: Callable[..., Any]
    match kernel:
        case "varlen":
            return VarlenSoftmax(max_length=max_length)(query, key, value, offsets, pieces)
        case "flex":
            own, other = partial(_flex_parts, offsets=offsets, num_candidates=num_candidates), _flex_blocks
        case "dense":
            softmax = DenseSoftmax()
            own, other = partial(softmax.own, offsets=offsets, num_candidates=num_candidates), softmax.other
        case "silu" | "dense_silu":
            own, other = _silu(offsets, num_candidates, max_length, kernel)
        case _:
            raise ValueError(f"the kernel {kernel!r} does not attend over pieces; use one of {', '.join(OVER_PARTS)}")
    return attend_over_pieces(query, key, value, offsets, pieces, own=own, other=other)


def _silu(
    offsets: torch.Tensor, num_candidates: torch.Tensor, max_length: int, kernel: Kernel
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Attention of sequences with themselves, and of blocks."""
    silu = (
        PointwiseSilu(max_length=max_length, divisor=max_length) if kernel == "silu" else DenseSilu(divisor=max_length)
    )
    return partial(silu.own, offsets=offsets, num_candidates=num_candidates), silu.other


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offsets: torch.Tensor, max_length: int
) -> torch.Tensor:
    result = varlen_attn(query, key, value, offsets, offsets, max_length, max_length, **_CAUSAL)
    assert isinstance(result, torch.Tensor)
    return result


def _nested(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: torch.Tensor,
    max_length: int,
    backend: SDPBackend,
) -> torch.Tensor:
    make = partial(torch.nested.nested_tensor_from_jagged, offsets=offsets, min_seqlen=1, max_seqlen=max_length)
    q, k, v = (make(part).transpose(1, 2) for part in (query, key, value))
    with sdpa_kernel(backend):
        result = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return result.transpose(1, 2).values()


@lru_cache(maxsize=1)
def _compiled_flex() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    def with_logarithms(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_mask: Any) -> Any:
        out, more = flex_attention(query, key, value, block_mask=block_mask, return_aux=AuxRequest(lse=True))
        return out, more.lse

    plain, both, mask = (
        torch.compile(each, dynamic=True) for each in (flex_attention, with_logarithms, create_block_mask)
    )
    return plain, both, mask


def _flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offsets: torch.Tensor, num_candidates: torch.Tensor
) -> torch.Tensor:
    flex_attention, _, create_block_mask = _compiled_flex()
    tokens = query.shape[0]
    visible = _causal(offsets, num_candidates, tokens)
    mask = create_block_mask(visible, None, None, tokens, tokens, device=query.device)
    heads_first = [part.transpose(0, 1).unsqueeze(0) for part in (query, key, value)]
    result: torch.Tensor = flex_attention(*heads_first, block_mask=mask)
    return result.squeeze(0).transpose(0, 1)


def _causal(offsets: torch.Tensor, num_candidates: torch.Tensor, tokens: int) -> Callable[..., Any]:
    """What each query sees, as FlexAttention wants to know it."""
    sequence = _owners(offsets, tokens)
    first_candidate = (offsets[1:] - num_candidates)[sequence]

    def visible(batch: Any, head: Any, row: Any, column: Any) -> Any:
        del batch, head
        causal = (sequence[row] == sequence[column]) & (row >= column)
        return causal & ((column < first_candidate[row]) | (row == column))

    return visible


def _flex_parts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, offsets: torch.Tensor, num_candidates: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each sequence with itself, and the logarithms of its sums."""
    return _with_logarithms(query, key, value, _causal(offsets, num_candidates, query.shape[0]))


def _flex_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Blocks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in which each query of a block sees all keys of the block."""
    of_rows, of_columns = (
        _owners(offsets, packed.shape[0])
        for offsets, packed in ((blocks.query_offsets, query), (blocks.key_offsets, key))
    )

    def visible(batch: Any, head: Any, row: Any, column: Any) -> Any:
        del batch, head
        return of_rows[row] == of_columns[column]

    return _with_logarithms(query, key, value, visible)


def _owners(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """(rows,) which sequence each row is of."""
    numbers = torch.arange(offsets.shape[0] - 1, device=offsets.device)
    return torch.repeat_interleave(numbers, torch.diff(offsets), output_size=rows)


def _with_logarithms(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: Callable[..., Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    _, flex_attention, create_block_mask = _compiled_flex()
    mask = create_block_mask(visible, None, None, query.shape[0], key.shape[0], device=query.device)
    heads_first = [part.transpose(0, 1).unsqueeze(0) for part in (query, key, value)]
    out, logarithms = flex_attention(*heads_first, block_mask=mask)
    return out.squeeze(0).transpose(0, 1), logarithms.squeeze(0).transpose(0, 1)


def _dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offsets: torch.Tensor, num_candidates: torch.Tensor
) -> torch.Tensor:
    """One sequence after the other; reads the lengths, so for CPUs and as the reference."""
    parts = []
    lengths = torch.diff(offsets).tolist()
    pieces = (torch.split(part, lengths) for part in (query, key, value))
    for *piece, candidates in zip(*pieces, num_candidates.tolist(), strict=True):
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in piece)
        size = q.shape[2]
        if candidates <= 1:
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mask = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
            mask[:, size - candidates :] = torch.eye(size, dtype=torch.bool, device=q.device)[:, size - candidates :]
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        parts.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(parts)
