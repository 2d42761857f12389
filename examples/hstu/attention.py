"""Attention over sequences of different lengths, packed one after the other, by PyTorch's own kernels.

A sequence is history, then candidates: the history attends causally, a candidate to the history and to itself. With at
most one candidate that is plain causal attention.
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

Kernel = Literal["auto", "varlen", "flex", "nested_flash", "nested_cudnn", "dense"]
KERNELS: tuple[Kernel, ...] = ("auto", "varlen", "flex", "nested_flash", "nested_cudnn", "dense")
CAUSAL_ONLY = frozenset({"varlen", "nested_flash", "nested_cudnn"})
TRACEABLE = frozenset({"varlen"})  # torch.compile takes it into the graph around it
# The flag for causal became a window.
_CAUSAL: dict[str, Any] = (
    {"window_size": (-1, 0)} if "window_size" in inspect.signature(varlen_attn).parameters else {"is_causal": True}
)


def choose_kernel(kernel: Kernel, device: torch.device, num_candidates: int) -> Kernel:
    """The kernel that "auto" stands for; refuses those that cannot compute the mask, or nothing on the device.

    Raises:
        ValueError: If the kernel is causal only and samples have several candidates, or it needs a GPU.
    """
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
) -> torch.Tensor:
    """Attention of each sequence with itself.

    Args:
        query: (tokens, heads, head dim).
        key: The same.
        value: The same.
        offsets: (n + 1,) int32, where the sequences begin.
        num_candidates: (n,) candidates at the end of each sequence; kernels that are causal take them as history.
        max_length: No sequence is longer; not read from the device.
        kernel: One of `KERNELS`, but not "auto".

    Returns:
        (tokens, heads, head dim).
    """
    if query.shape[0] == 0:
        return query + key + value  # no token: nothing to attend to, and still a part of the graph
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
    raise ValueError(f"the kernel is {kernel!r}; use one of {', '.join(KERNELS[1:])}")


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
def _compiled_flex() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(flex_attention, dynamic=True), torch.compile(create_block_mask, dynamic=True)


def _flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offsets: torch.Tensor, num_candidates: torch.Tensor
) -> torch.Tensor:
    flex_attention, create_block_mask = _compiled_flex()
    tokens = query.shape[0]
    lengths = torch.diff(offsets)
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=query.device), lengths, output_size=tokens)
    first_candidate = (offsets[1:] - num_candidates)[sequence]

    def visible(batch: Any, head: Any, row: Any, column: Any) -> Any:
        del batch, head
        causal = (sequence[row] == sequence[column]) & (row >= column)
        return causal & ((column < first_candidate[row]) | (row == column))

    mask = create_block_mask(visible, None, None, tokens, tokens, device=query.device)
    heads_first = [part.transpose(0, 1).unsqueeze(0) for part in (query, key, value)]
    result: torch.Tensor = flex_attention(*heads_first, block_mask=mask)
    return result.squeeze(0).transpose(0, 1)


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
