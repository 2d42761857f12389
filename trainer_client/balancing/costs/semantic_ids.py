"""Cost of a sequence of items that are tuples of codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.splits import SpanCosts
from trainer_client.balancing.costs.base import (
    MATMUL_WITH_BACKWARD,
    Counts,
    SampleCost,
    Source,
    check_fields,
    check_sizes,
    check_sources,
    count_positions,
    num_fields,
)
from trainer_client.balancing.costs.transformer import TransformerCost


@dataclass(frozen=True, slots=True, kw_only=True)
class SemanticIdCost(SampleCost):
    """FLOPs of one sample in a causal transformer that reads and generates items as tuples of codes.

    As in TIGER (Rajput et al., arXiv 2305.05065) each item is `levels` tokens, so h items of history and t targets are

        positions = levels * (h + t) + context

    with the work of `TransformerCost` at each, and the output layer over the codes of a level, 2 * E * codebook, at the
    levels * t positions that are predicted only; three times that with the backward pass.

    Attributes:
        num_layers: Layers.
        width: Width E between layers.
        num_heads: Heads.
        items: Jagged field(s) of history items, or an integer tensor with their number. Fields that hold codes, not
            items, go with `levels` 1.
        levels: Codes of an item.
        targets: Items to be generated: a number for all samples, or field(s).
        codebook: Codes of a level.
        context: More positions: a number for all samples, or field(s).
        feed_forward: Width of the feed-forward network; default: 4 * width.
        backward: Whether to count the backward pass.
    """

    num_layers: int
    width: int
    num_heads: int
    items: str | Sequence[str]
    levels: int = 3
    targets: Source = 1
    codebook: int = 256
    context: Source = None
    feed_forward: int | None = None
    backward: bool = True

    def __post_init__(self) -> None:
        check_sizes(self, "levels", "codebook")
        check_fields(self, "items")
        check_sources(self, "targets", "context")
        self._layers()

    def _layers(self) -> TransformerCost:
        return TransformerCost(
            num_layers=self.num_layers,
            width=self.width,
            num_heads=self.num_heads,
            tokens=self.items,
            feed_forward=self.feed_forward,
            backward=self.backward,
        )

    def __call__(self, batch: Any) -> NDArray[np.float64]:
        """(n,) FLOPs of each sample."""
        positions, targets, _ = self._count(batch)
        return self._layers().flops(positions) + self._per_target * targets

    def spans(self, batch: Any) -> SpanCosts:
        """FLOPs of any positions."""
        positions, targets, context = self._count(batch)
        per_pair, per_position = self._layers().per_pair_and_position()
        return SpanCosts.of(
            positions,
            per_position=per_position,
            per_pair=per_pair,
            targets=targets,
            per_target=self._per_target,
            head=context,
            granule=self.levels * num_fields(self.items),
        )

    def _count(self, batch: Any) -> tuple[NDArray[np.float64], NDArray[np.float64], Counts]:
        """All positions, those that are predicted, and those of the context."""
        targets = self.levels * np.asarray(count_positions(batch, self.targets), np.float64)
        context = count_positions(batch, self.context)
        return np.asarray(self.levels * count_positions(batch, self.items) + targets + context), targets, context

    @property
    def _per_target(self) -> float:
        return 2.0 * self.width * self.codebook * (MATMUL_WITH_BACKWARD if self.backward else 1.0)
