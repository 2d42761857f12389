"""The model: embeddings, HSTU-shaped layers, one score per candidate.

After Zhai et al., "Actions speak louder than words" (arXiv 2402.17152): U, V, Q and K of one projection with SiLU, the
attended values normalised and gated by U, one projection back, a residual. The attention is softmax attention, for
which PyTorch has variable-length kernels, or pointwise as in the paper; the work is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from examples.datasets import SequenceBatch
from examples.hstu.attention import TRACEABLE, Kernel, attend
from examples.hstu.sequences import arrange
from trainer_client.attention import Pieces
from trainer_client.balancing.costs import HSTUCost, TokenCost


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The model's shape.

    Attributes:
        num_layers: Layers.
        width: Width between layers.
        num_heads: Heads of attention.
        head_dim: Width of a head.
        embedding_dim: Width of the embedding tables.
        num_items: Size of the catalogue.
        num_actions: Kinds of actions.
        num_context_values: Values of a context feature.
        num_context: Context features.
        max_tokens: Longest sequence.
        interleaved: Whether actions are tokens of their own.
        kernel: Of the attention.
        compile: Whether to compile the layers.
        layers_per_call: Layers that are compiled into one call. More take less time of the host, but gradients come
            later, so that less of averaging them overlaps.
    """

    num_layers: int = 8
    width: int = 1024
    num_heads: int = 4
    head_dim: int = 256
    embedding_dim: int = 128
    num_items: int = 100_000
    num_actions: int = 8
    num_context_values: int = 1024
    num_context: int = 2
    max_tokens: int = 4096
    interleaved: bool = True
    kernel: Kernel = "dense"
    compile: bool = False
    layers_per_call: int = 2

    def tokens(self) -> TokenCost:
        """Tokens of each sample: what a rank's memory is proportional to."""
        history = ("num_history", "num_history") if self.interleaved else ("num_history",)
        return TokenCost(tokens=(*history, "num_candidates"), per_sample=self.num_context)

    def cost(self, *, backward: bool = True) -> HSTUCost:
        """FLOPs of each sample in the layers."""
        return HSTUCost(
            num_layers=self.num_layers,
            width=self.width,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            history=("num_history", "num_history") if self.interleaved else "num_history",
            candidates="num_candidates",
            context=self.num_context,
            backward=backward,
        )


class Layer(nn.Module):
    """One HSTU-shaped layer."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        inner = options.num_heads * options.head_dim
        self.norm = nn.LayerNorm(options.width)
        self.project_in = nn.Linear(options.width, 4 * inner)
        self.norm_attended = nn.LayerNorm(inner)
        self.project_out = nn.Linear(inner, options.width)
        # Numbers as attributes of the module are constants to the compiler, those of a closure are not.
        self._heads = (options.num_heads, options.head_dim)
        self._max_tokens = options.max_tokens
        self._kernel: Kernel = options.kernel
        self._compile = options.compile
        self._attend: Callable[..., torch.Tensor] = attend
        if options.compile and options.kernel not in TRACEABLE:
            self._attend = torch.compiler.disable(attend)  # type: ignore[no-untyped-call]

    def forward(
        self, tokens: torch.Tensor, offsets: torch.Tensor, num_candidates: torch.Tensor, pieces: Pieces | None = None
    ) -> torch.Tensor:
        """(tokens, width) to (tokens, width)."""
        if pieces is not None:
            return self._over_pieces(tokens, offsets, num_candidates, pieces)
        run = compiled_transform() if self._compile else transform
        return run((self,), tokens, offsets, num_candidates)

    def transform(self, tokens: torch.Tensor, offsets: torch.Tensor, num_candidates: torch.Tensor) -> torch.Tensor:
        """The same, to be compiled alone or with its neighbours."""
        gate, query, key, value = self.before(tokens)
        attended = self._attend(
            query, key, value, offsets, num_candidates, max_length=self._max_tokens, kernel=self._kernel
        )
        return self.after(tokens, gate, attended)

    def before(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gates, queries, keys and values of tokens."""
        gate, *views = functional.silu(self.project_in(self.norm(tokens))).chunk(4, dim=-1)
        value, query, key = (view.reshape(-1, *self._heads) for view in views)
        return gate, query, key, value

    def after(self, tokens: torch.Tensor, gate: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The tokens, with what they attended to."""
        projected: torch.Tensor = self.project_out(self.norm_attended(attended.flatten(1)) * gate)
        return tokens + projected

    def _over_pieces(
        self, tokens: torch.Tensor, offsets: torch.Tensor, num_candidates: torch.Tensor, pieces: Pieces
    ) -> torch.Tensor:
        """In steps in which this rank has parts of samples: what is compiled ends before the attention."""
        before, after = compiled_parts() if self._compile else (Layer.before, Layer.after)
        gate, query, key, value = before(self, tokens)
        attended = attend(
            query, key, value, offsets, num_candidates, max_length=self._max_tokens, kernel=self._kernel, pieces=pieces
        )
        return after(self, tokens, gate, attended)


def transform(
    layers: Sequence[Layer], tokens: torch.Tensor, offsets: torch.Tensor, num_candidates: torch.Tensor
) -> torch.Tensor:
    """(tokens, width) to (tokens, width) through some layers; calls no hooks."""
    for layer in layers:
        tokens = layer.transform(tokens, offsets, num_candidates)
    return tokens


@cache
def compiled_transform() -> Callable[..., torch.Tensor]:
    """`transform` as one call, compiled once for all stretches of as many layers."""
    return torch.compile(transform, dynamic=True)


@cache
def compiled_parts() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What a layer computes before and after its attention, compiled once for all layers."""
    return torch.compile(Layer.before, dynamic=True), torch.compile(Layer.after, dynamic=True)


class LocalEmbeddings(nn.Module):
    """Plain tables, a whole copy on each rank."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.items = nn.Embedding(options.num_items, options.embedding_dim)
        self.actions = nn.Embedding(options.num_actions, options.embedding_dim)
        self.context = nn.Embedding(options.num_context_values, options.embedding_dim)

    def forward(self, batch: SequenceBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Embeddings of context features, history items, actions and candidates, each (count, dim)."""
        history, candidates = self.look_up(batch)
        return self.context(batch.context.reshape(-1)), history, self.actions(batch.actions), candidates

    def look_up(self, batch: SequenceBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings of history and candidates."""
        return self.items(batch.history), self.items(batch.candidates)


class Ranker(nn.Module):
    """From a batch to one logit per candidate."""

    def __init__(self, options: ModelOptions, embeddings: nn.Module | None = None) -> None:
        super().__init__()
        self.options = options
        self.embeddings = embeddings if embeddings is not None else LocalEmbeddings(options)
        self.positions = nn.Parameter(0.02 * torch.randn(options.max_tokens, options.embedding_dim))
        self.widen = nn.Linear(options.embedding_dim, options.width)
        self.layers = nn.ModuleList(Layer(options) for _ in range(options.num_layers))
        self.norm = nn.LayerNorm(options.width)
        self.score = nn.Linear(options.width, 1)
        self.layers_apart = False  # where hooks shall be called

    def forward(self, batch: SequenceBatch, pieces: Pieces | None = None) -> torch.Tensor:
        """(Σ candidates,) logits; some samples of the batch may be pieces."""
        sequences = arrange(batch, interleaved=self.options.interleaved, pieces=pieces)
        context, history, actions, candidates = self.embeddings(batch)
        if sequences.beginnings is not None:
            context = context.view(*batch.context.shape, -1)[sequences.beginnings].flatten(0, 1)
        if self.options.interleaved:
            parts = torch.cat([context, history, actions, candidates])
        else:
            parts = torch.cat([context, history + actions, candidates])
        tokens = parts[sequences.order] + functional.embedding(sequences.positions, self.positions)
        state = self.widen(tokens)
        if pieces is not None:
            for layer in self.layers:
                state = layer(state, sequences.offsets, sequences.num_candidates, pieces)
        for layers in () if pieces is not None else self._stretches():
            run = layers[0] if len(layers) == 1 else partial(compiled_transform(), layers)
            state = run(state, sequences.offsets, sequences.num_candidates)
        logits: torch.Tensor = self.score(self.norm(state[sequences.candidates])).squeeze(-1)
        return logits

    def _stretches(self) -> list[tuple[Layer, ...]]:
        """The layers, as many together as are called at once."""
        layers = cast("tuple[Layer, ...]", tuple(self.layers))
        together = self.options.compile and self.options.kernel in TRACEABLE and not self.layers_apart
        size = self.options.layers_per_call if together else 1
        return [layers[begin : begin + size] for begin in range(0, len(layers), size)]


def loss_of(logits: torch.Tensor, batch: SequenceBatch) -> torch.Tensor:
    """Sum over candidates of the binary cross entropy."""
    return functional.binary_cross_entropy_with_logits(logits.float(), batch.labels, reduction="sum")
