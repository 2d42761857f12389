"""Numbers of each sample that the time of a batch is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from evenkeel.partitioning.splits import SpanCosts
from trainer_client.balancing.batches import BatchError, FlatBatch, lookup

__all__ = ["SequenceTerms", "Terms"]


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

    def spans(self, batch: Any, coefficients: NDArray[np.float64]) -> SpanCosts:
        """What any positions of each sample of the host's batch cost, given what a unit of each term costs."""
        history = _count(batch, self.history).numpy() + self.context
        candidates = _count(batch, self.candidates).numpy() if self.candidates else np.zeros(len(history))
        samples, tokens, pairs, *rest = coefficients.tolist()
        return SpanCosts.of(
            history + candidates,
            candidates=candidates,
            per_position=tokens,
            per_pair=pairs,
            targets=candidates,
            per_target=rest[0] if rest else 0.0,
            fixed=samples,
            head=self.context,
            granule=1 if isinstance(self.history, str) else len(self.history),
        )


def _count(batch: Any, source: str | Sequence[str]) -> torch.Tensor:
    paths = (source,) if isinstance(source, str) else tuple(source)
    counts = []
    for path in paths:
        if isinstance(batch, FlatBatch):
            counts.append(torch.from_numpy(batch.lengths_of(path).astype(np.float64)))
            continue
        value = lookup(batch, path)
        lengths = value.lengths() if callable(getattr(value, "lengths", None)) else value
        if not isinstance(lengths, torch.Tensor) or lengths.dim() != 1:
            raise BatchError(f"{path!r} holds no lengths; name a jagged field or an integer tensor with one per sample")
        counts.append(lengths.double())
    return torch.stack(counts).sum(0)
