"""What a sample's time is made of: terms whose coefficients are fitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trainer_client.balancing.batches import BatchError, lookup


class Terms(Protocol):
    """Numbers per sample that the time of a batch is a weighted sum of."""

    @property
    def names(self) -> tuple[str, ...]:
        """One name per term."""
        ...

    def __call__(self, batch: Any) -> torch.Tensor:
        """(n, terms) float64 on the batch's device; nothing is read from it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceTerms:
    """Samples, tokens, attended pairs and candidates of sequences.

    With h history positions, c context positions among them, and k candidates, attention computes
    `h (h + 1) / 2 + k (h + 1)` pairs.

    Attributes:
        history: Path(s) of lengths that add up to the history: integer tensors, or jagged fields.
        candidates: Path(s) of the candidates.
        context: Context positions of each sample.
    """

    history: str | Sequence[str]
    candidates: str | Sequence[str] | None = None
    context: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """One name per term."""
        return ("samples", "tokens", "pairs", "candidates") if self.candidates else ("samples", "tokens", "pairs")

    def __call__(self, batch: Any) -> torch.Tensor:
        """(n, terms) float64 on the batch's device."""
        history = _count(batch, self.history) + self.context
        candidates = _count(batch, self.candidates) if self.candidates else torch.zeros_like(history)
        pairs = history * (history + 1) / 2 + candidates * (history + 1)
        columns = [torch.ones_like(history), history + candidates, pairs]
        return torch.stack([*columns, candidates] if self.candidates else columns, dim=1)


def _count(batch: Any, source: str | Sequence[str]) -> torch.Tensor:
    paths = (source,) if isinstance(source, str) else tuple(source)
    counts = []
    for path in paths:
        value = lookup(batch, path)
        lengths = value.lengths() if callable(getattr(value, "lengths", None)) else value
        if not isinstance(lengths, torch.Tensor) or lengths.dim() != 1:
            raise BatchError(f"{path!r} holds no lengths; name a jagged field or an integer tensor with one per sample")
        counts.append(lengths.double())
    return torch.stack(counts).sum(0)
