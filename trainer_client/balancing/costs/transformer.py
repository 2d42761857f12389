"""Cost of a sequence in a transformer."""

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
    SampleCost,
    Source,
    check_fields,
    check_sizes,
    check_sources,
    count_positions,
    num_fields,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerCost(SampleCost):
    """FLOPs of one sample in the layers of a transformer.

    With s positions, width E, H heads of width D of which K have keys and values of their own, and a feed-forward
    network of width F with m matrices (2, or 3 when gated):

        pairs     = s * (s + 1) / 2 if causal else s * s
        attention = 4 * H * D * pairs
        products  = (2 * E * (2 * H + 2 * K) * D + 2 * m * E * F) * s

    from queries and output (E × H·D each), keys and values (E × K·D each) and the network (E × F each), two FLOPs per
    multiplication and addition. Per layer they count once forward; with the backward pass 3.5 * attention + 3 *
    products, as in `HSTUCost`. An output layer over a vocabulary of V adds 2 * E * V * s, times 3, once.

    Attributes:
        num_layers: Layers.
        width: Width E between layers.
        num_heads: Heads H.
        tokens: Jagged field(s) whose lengths add up to the sequence, or an integer tensor with its length.
        head_dim: Width D of a head; default: width / num_heads.
        num_kv_heads: Heads K with keys and values of their own; default: all.
        feed_forward: Width F of the feed-forward network; default: 4 * width.
        gated: Whether the network has a gate, and so 3 matrices.
        context: More positions: a number for all samples, or field(s).
        causal: Whether a position attends only to itself and earlier ones.
        vocabulary: Size V of the output layer, computed at every position; 0 for none.
        backward: Whether to count the backward pass.
    """

    num_layers: int
    width: int
    num_heads: int
    tokens: str | Sequence[str]
    head_dim: int | None = None
    num_kv_heads: int | None = None
    feed_forward: int | None = None
    gated: bool = False
    context: Source = None
    causal: bool = True
    vocabulary: int = 0
    backward: bool = True

    def __post_init__(self) -> None:
        optional = ("head_dim", "num_kv_heads", "feed_forward")
        given = [name for name in optional if getattr(self, name) is not None]
        check_sizes(self, "num_layers", "width", "num_heads", *given)
        if self.head_dim is None and self.width % self.num_heads:
            raise ValueError(f"width {self.width} is no multiple of num_heads {self.num_heads}; give head_dim")
        check_fields(self, "tokens")
        check_sources(self, "context")
        if self.vocabulary < 0:
            raise ValueError(f"vocabulary is {self.vocabulary}; give its size, or 0 for no output layer")

    def __call__(self, batch: Any) -> NDArray[np.float64]:
        """(n,) FLOPs of each sample in all layers."""
        positions = count_positions(batch, self.tokens) + count_positions(batch, self.context)
        return self.flops(np.asarray(positions, dtype=np.float64))

    def spans(self, batch: Any) -> SpanCosts | None:
        """FLOPs of any positions; None unless causal."""
        if not self.causal:
            return None
        context = count_positions(batch, self.context)
        per_pair, per_position = self.per_pair_and_position()
        return SpanCosts.of(
            count_positions(batch, self.tokens) + context,
            per_position=per_position,
            per_pair=per_pair,
            head=context,
            granule=num_fields(self.tokens),
        )

    def flops(self, positions: NDArray[np.float64]) -> NDArray[np.float64]:
        """(n,) FLOPs from numbers of positions."""
        pairs = positions * (positions + 1) / 2 if self.causal else positions * positions
        per_pair, per_position = self.per_pair_and_position()
        return np.asarray(per_pair * pairs + per_position * positions)

    def per_pair_and_position(self) -> tuple[float, float]:
        """FLOPs of a (query, key) pair in all layers, and of a position in these and the output layer."""
        head_dim = self.width // self.num_heads if self.head_dim is None else self.head_dim
        kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        inner = 4 * self.width if self.feed_forward is None else self.feed_forward
        attention = 4.0 * self.num_heads * head_dim
        products = 2.0 * self.width * (2 * (self.num_heads + kv_heads) * head_dim + (3 if self.gated else 2) * inner)
        output = 2.0 * self.width * self.vocabulary
        if self.backward:
            attention = ATTENTION_WITH_BACKWARD * attention
            products, output = MATMUL_WITH_BACKWARD * products, MATMUL_WITH_BACKWARD * output
        return self.num_layers * attention, self.num_layers * products + output
