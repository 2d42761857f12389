"""Cost of a sequence in an HSTU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.splits import SpanCosts
from trainer_client.balancing.costs.base import (
    ATTENTION_WITH_BACKWARD,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HSTUCost(SampleCost):
    """FLOPs of one sample in the layers of an HSTU (Zhai et al., arXiv 2402.17152).

    A sequence of `s = ctx + hist + cand` positions: contextual features, the history, and candidates to be ranked.
    Context attends to context and history; a history position to the context and to itself and earlier history; a
    candidate to context, history and itself. With E the width, H heads of width D, the (query, key) pairs are

        pairs = s * (ctx + hist) - hist * (hist - 1) / 2 + cand

    where the second term is the causal half that is not computed (MFU figures usually take hist² / 2, which leaves
    out half of the diagonal). A pair costs 2·D for its score and 2·D for its share of the output, in every head:

        attention = 4 * H * D * pairs

    Each position is projected to U, V, Q and K (2 · E · 4·H·D) and from the heads back (2 · H·D · E):

        products = 10 * E * H * D * s

    FLOPs per layer and sample are attention + products forward, 3.5 * attention + 3 * products with the backward pass:
    every product has two more, and attention kernels compute the scores again. Normalisation, gating and position
    bias, which do not depend on matrix units, are left out.

    Attributes:
        num_layers: Layers.
        width: Width E of the embeddings between layers.
        num_heads: Heads H.
        head_dim: Width D of queries and keys of a head.
        value_dim: Width of values and gates of a head; default: `head_dim`. With it set to V, a pair costs 2·(D + V),
            a position 2·E·H·(2·D + 2·V) + 2·H·V·E.
        history: Jagged field(s) that make up the history; interleaved items and actions are two fields that add up.
        candidates: Jagged field(s), or an integer tensor with the number of candidates of each sample, or a number
            for all.
        context: Contextual positions: a number for all samples, or field(s).
        history_includes_candidates: The history's fields hold the candidates too, at their end.
        backward: Whether to count the backward pass.
    """

    num_layers: int
    width: int
    num_heads: int
    head_dim: int
    history: str | Sequence[str]
    value_dim: int | None = None
    candidates: Source = None
    context: Source = None
    history_includes_candidates: bool = False
    backward: bool = True

    def __post_init__(self) -> None:
        check_sizes(self, "num_layers", "width", "num_heads", "head_dim")
        if self.value_dim is not None:
            check_sizes(self, "value_dim")
        check_fields(self, "history")
        check_sources(self, "candidates", "context")

    def __call__(self, batch: Any) -> NDArray[np.float64]:
        """(n,) FLOPs of each sample in all layers."""
        return self.flops(*self._count(batch))

    def spans(self, batch: Any) -> SpanCosts:
        """FLOPs of any positions; the fields of the history are taken as interleaved.

        A context's queries are counted where the context is, with all that they see.
        """
        history, candidates, context = self._count(batch)
        per_pair, per_position = self._per_pair_and_position()
        return SpanCosts.of(
            history + candidates + context,
            context=context,
            candidates=candidates,
            per_position=per_position,
            per_pair=per_pair,
            granule=num_fields(self.history),
        )

    def flops(self, history: Counts, candidates: Counts = 0.0, context: Counts = 0.0) -> NDArray[np.float64]:
        """(n,) FLOPs from counts of positions."""
        positions = context + history + candidates
        pairs = positions * (context + history) - history * (history - 1) / 2 + candidates
        per_pair, per_position = self._per_pair_and_position()
        return np.asarray(per_pair * pairs + per_position * positions)

    def _count(self, batch: Any) -> tuple[Counts, Counts, Counts]:
        """Positions of history, candidates and context."""
        history = np.asarray(count_positions(batch, self.history), np.float64)
        candidates = count_positions(batch, self.candidates)
        if self.history_includes_candidates:
            history = history - candidates
            if history.size and history.min() < 0:
                raise ValueError(
                    f"sample {int(history.argmin())} has more candidates than positions in {self.history!r}; "
                    "history_includes_candidates says that these hold the candidates too"
                )
        return history, candidates, count_positions(batch, self.context)

    def _per_pair_and_position(self) -> tuple[float, float]:
        """FLOPs of a (query, key) pair and of a position in all layers."""
        value_dim = self.head_dim if self.value_dim is None else self.value_dim
        per_pair = 2.0 * self.num_heads * (self.head_dim + value_dim)
        per_position = 2.0 * self.width * self.num_heads * (2 * (self.head_dim + value_dim) + value_dim)
        if self.backward:
            per_pair, per_position = ATTENTION_WITH_BACKWARD * per_pair, MATMUL_WITH_BACKWARD * per_position
        return self.num_layers * per_pair, self.num_layers * per_position
