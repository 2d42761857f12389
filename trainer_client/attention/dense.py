"""Attention in plain PyTorch, one sequence after the other: for CPUs, and the reference of faster kernels.

Both give what `attend_over_pieces` takes: `own` of sequences with themselves, `other` of queries that see all keys of
their block. They read lengths, so a GPU is waited for. Halves are computed in float32, also under autocast.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from trainer_client.attention.over_pieces import Attended
from trainer_client.attention.pieces import Blocks


def visible(length: int, num_context: int, num_candidates: int, device: torch.device | str = "cpu") -> Tensor:
    """(length, length) bool, which keys each query of a sequence sees; see `SplitSample`."""
    history = length - num_candidates
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    mask[:num_context, :history] = True
    mask[:, history:] = False
    return mask | torch.eye(length, dtype=torch.bool, device=device)


def wide(tensor: Tensor) -> Tensor:
    """In a dtype in which scores, and sums over keys, are as exact as halves are: float32 or wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dense(ABC):
    scale: float | None = None

    @abstractmethod
    def attend(self, scores: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
        """(heads, …, dim) of one sequence or block; the mask is (queries, keys), None if all are seen."""

    def own(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        offsets: Tensor,
        num_context: Tensor | int = 0,
        num_candidates: Tensor | int = 0,
    ) -> Attended:
        """Attention of each sequence with itself.

        Args:
            query: (rows, heads, head dim).
            key: (rows, key heads, head dim); heads are a multiple of key heads.
            value: (rows, key heads, value dim).
            offsets: (n + 1,) where the sequences begin.
            num_context: (n,) contextual positions at the beginning of each sequence; a number for all.
            num_candidates: (n,) candidates at the end of each sequence; a number for all.
        """
        lengths = offsets.diff()
        context, candidates = (
            torch.as_tensor(count).expand(len(lengths)).tolist() for count in (num_context, num_candidates)
        )
        masks = [visible(*counts, query.device) for counts in zip(lengths.tolist(), context, candidates, strict=True)]
        return _attended(self.over(query, key, value, lengths.tolist(), lengths.tolist(), masks))

    def other(self, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks) -> Attended:
        """Attention in which each query of a block sees all keys of the block."""
        queries, keys = blocks.query_offsets.diff().tolist(), blocks.key_offsets.diff().tolist()
        return _attended(self.over(query, key, value, queries, keys, [None] * len(queries)))

    def over(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_lengths: list[int],
        key_lengths: list[int],
        masks: Sequence[Tensor | None],
    ) -> tuple[Tensor, ...]:
        """Results of packed queries over packed keys, by sequence; a mask of None: all keys are seen."""
        dtype, repeats = value.dtype, query.shape[1] // key.shape[1]
        query, key, value = map(wide, (query, key, value))
        key, value = (part.repeat_interleave(repeats, 1) if repeats > 1 else part for part in (key, value))
        queries, keys, values = (
            part.transpose(0, 1).split(lengths, 1)  # type: ignore[no-untyped-call]
            for part, lengths in ((query, query_lengths), (key, key_lengths), (value, key_lengths))
        )
        with torch.autocast(query.device.type, enabled=False):
            scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
            scores = [(q @ k.transpose(1, 2)) * scale for q, k in zip(queries, keys, strict=True)]
            results = [self.attend(*each) for each in zip(scores, values, masks, strict=True)]
            if not results:  # still a part of the graph
                query, key, value = (part.transpose(0, 1) for part in (query, key, value))
                results = [self.attend(query @ key.transpose(1, 2), value, None)]
        sums, *logs = (torch.cat(part, 1).transpose(0, 1) for part in zip(*results, strict=True))
        return sums.to(dtype), *logs


def _attended(parts: tuple[Tensor, ...]) -> Attended:
    return parts[0] if len(parts) == 1 else (parts[0], parts[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSoftmax(_Dense):
    """Softmax attention.

    Attributes:
        scale: Of the scores; default: 1 / √(head dim).
    """

    def attend(self, scores: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
        """Weighted means of values, and the logarithms of the sums of exponentials."""
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ value, scores.logsumexp(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSilu(_Dense):
    """The pointwise attention of HSTU: values are summed with the SiLU of their scores.

    Attributes:
        scale: Of the scores; default: 1 / √(head dim).
        divisor: Of the sums; a constant such as the longest sequence of all, which no division of samples changes.
    """

    divisor: float = 1.0

    def attend(self, scores: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
        """Sums of values."""
        weights = functional.silu(scores) / self.divisor
        if mask is not None:
            weights = weights.masked_fill(~mask, 0.0)
        return (weights @ value,)
