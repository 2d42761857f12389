"""Costs of sequences, from their lengths: tokens, and FLOPs in the layers of an HSTU or a transformer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.splits import SpanCosts
from trainer_client.balancing.costs.base import Counts, SampleCost, Source, check_sources, count_positions
from trainer_client.checks import check_whole

# Of a matrix product's FLOPs: once forward, twice backward (gradients of both factors).
MATMUL_WITH_BACKWARD = 3.0
# Of attention's two products: 2 forward; 5 backward, since kernels recompute the scores: (2 + 5) / 2.
ATTENTION_WITH_BACKWARD = 3.5


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
        check_sources(self, needed=("tokens",))
        check_whole(self, per_sample=0)

    def __call__(self, batch: Any) -> NDArray[np.int64]:
        """(n,) tokens of each sample, in whole numbers."""
        return np.asarray(count_positions(batch, self.tokens)).astype(np.int64) + self.per_sample

    def spans(self, batch: Any) -> SpanCosts:
        """What each sample costs besides goes with its end."""
        counts = count_positions(batch, self.tokens)
        return SpanCosts.of(counts, per_position=1, fixed=self.per_sample, granule=num_fields(self.tokens))


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
        check_whole(self, num_layers=1, width=1, num_heads=1, head_dim=1, **_given(self, "value_dim"))
        check_sources(self, "candidates", "context", needed=("history",))

    def spans(self, batch: Any) -> SpanCosts:
        """FLOPs of any positions; the fields of the history are taken as interleaved.

        A context's queries are counted where the context is, with all that they see.
        """
        history = np.asarray(count_positions(batch, self.history), np.float64)
        candidates = count_positions(batch, self.candidates)
        if self.history_includes_candidates:
            history = history - candidates
            if history.size and history.min() < 0:
                raise ValueError(
                    f"sample {int(history.argmin())} has more candidates than positions in {self.history!r}; "
                    "history_includes_candidates says that these hold the candidates too"
                )
        return self._spans(history, candidates, count_positions(batch, self.context))

    def flops(self, history: Counts, candidates: Counts = 0.0, context: Counts = 0.0) -> NDArray[np.float64]:
        """(n,) FLOPs from counts of positions."""
        return self._spans(history, candidates, context).whole

    def _spans(self, history: Counts, candidates: Counts, context: Counts) -> SpanCosts:
        value_dim = self.head_dim if self.value_dim is None else self.value_dim
        per_pair = 2.0 * self.num_heads * (self.head_dim + value_dim)
        per_position = 2.0 * self.width * self.num_heads * (2 * (self.head_dim + value_dim) + value_dim)
        if self.backward:
            per_pair, per_position = ATTENTION_WITH_BACKWARD * per_pair, MATMUL_WITH_BACKWARD * per_position
        return SpanCosts.of(
            history + candidates + context,
            context=context,
            candidates=candidates,
            per_position=self.num_layers * per_position,
            per_pair=self.num_layers * per_pair,
            granule=num_fields(self.history),
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
        optional = _given(self, "head_dim", "num_kv_heads", "feed_forward")
        check_whole(self, num_layers=1, width=1, num_heads=1, vocabulary=0, **optional)
        if self.head_dim is None and self.width % self.num_heads:
            raise ValueError(f"width {self.width} is no multiple of num_heads {self.num_heads}; give head_dim")
        check_sources(self, "context", needed=("tokens",))

    def __call__(self, batch: Any) -> NDArray[np.float64]:
        """(n,) FLOPs of each sample in all layers."""
        return self.flops(np.asarray(count_positions(batch, self.tokens) + count_positions(batch, self.context)))

    def spans(self, batch: Any) -> SpanCosts | None:
        """FLOPs of any positions; None unless causal."""
        if not self.causal:
            return None
        context = count_positions(batch, self.context)
        per_pair, per_position = self._per_pair_and_position()
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
        per_pair, per_position = self._per_pair_and_position()
        return np.asarray(per_pair * pairs + per_position * positions)

    def _per_pair_and_position(self) -> tuple[float, float]:
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
        check_whole(self, levels=1, codebook=1)
        check_sources(self, "targets", "context", needed=("items",))
        self._layers()

    def spans(self, batch: Any) -> SpanCosts:
        """FLOPs of any positions."""
        targets = self.levels * np.asarray(count_positions(batch, self.targets), np.float64)
        context = count_positions(batch, self.context)
        per_pair, per_position = self._layers()._per_pair_and_position()
        return SpanCosts.of(
            self.levels * count_positions(batch, self.items) + targets + context,
            per_position=per_position,
            per_pair=per_pair,
            targets=targets,
            per_target=2.0 * self.width * self.codebook * (MATMUL_WITH_BACKWARD if self.backward else 1.0),
            head=context,
            granule=self.levels * num_fields(self.items),
        )

    def _layers(self) -> TransformerCost:
        return TransformerCost(
            num_layers=self.num_layers, width=self.width, num_heads=self.num_heads, tokens=self.items,
            feed_forward=self.feed_forward, backward=self.backward,
        )  # fmt: skip


def num_fields(paths: str | Sequence[str]) -> int:
    """Fields of a sequence: tokens of an item, where each field has one of it."""
    return 1 if isinstance(paths, str) else len(paths)


def _given(options: object, *names: str) -> dict[str, int]:
    return {name: 1 for name in names if getattr(options, name) is not None}
