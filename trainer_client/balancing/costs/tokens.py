"""Tokens of a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.splits import SpanCosts
from trainer_client.balancing.costs.base import SampleCost, check_fields, check_sizes, count_positions, num_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCost(SampleCost):
    """Tokens of one sample: right where embeddings and dense layers dominate, and for caps on memory.

    Attributes:
        tokens: Jagged field(s) whose lengths add up, or an integer tensor with a count per sample.
        per_sample: What every sample costs besides, in tokens.
    """

    tokens: str | Sequence[str]
    per_sample: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "tokens")
        check_sizes(self, "per_sample", least=0)

    def __call__(self, batch: Any) -> NDArray[np.int64]:
        """(n,) tokens of each sample, in whole numbers."""
        return np.asarray(count_positions(batch, self.tokens)).astype(np.int64) + self.per_sample

    def spans(self, batch: Any) -> SpanCosts:
        """What each sample costs besides goes with its end."""
        counts = count_positions(batch, self.tokens)
        return SpanCosts.of(counts, per_position=1, fixed=self.per_sample, granule=num_fields(self.tokens))
