"""Batches with a giant for `benchmarks.giants_gpu`, the work in them, and plans that are made ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evenkeel.partitioning.splits import SpanCosts
from examples.datasets import Keys, SequenceBatch, SyntheticSequences
from examples.hstu.model import ModelOptions
from trainer_client.balancing.batches import read_lengths
from trainer_client.balancing.costs.base import SampleCost

Ints = NDArray[np.int64]
LONG = "long"
_LONGEST_OTHER = 4096


@dataclass(frozen=True, slots=True)
class Given:
    """Lengths that are drawn as they were given."""

    lengths: tuple[int, ...]

    @property
    def maximum(self) -> int:
        """The longest."""
        return max(self.lengths)

    def draw(self, _rng: np.random.Generator, count: int) -> Ints:
        """All of them."""
        assert count == len(self.lengths)
        return np.array(self.lengths, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A kind of batch: as many samples a rank, one of all being a giant of so many tokens; 0: long histories."""

    giant: int
    samples: int

    @property
    def name(self) -> str:
        """For results."""
        return f"{self.giant or LONG} x {self.samples}"

    def lengths(self, ranks: int, step: int = 0, scale: int = 1) -> Ints:
        """(ranks, samples) tokens; the giant is on another rank in each step, the rest is the same.

        `scale` divides all of them, for machines without a GPU.
        """
        rng = np.random.default_rng([self.giant, self.samples])
        if not self.giant:  # a public set of long histories: median 2,695, mean 4,763
            drawn = np.clip(rng.lognormal(np.log(2695), 1.067, (ranks, self.samples)), 64, 27_738)
        else:
            drawn = np.clip(rng.lognormal(6.0, 0.9, (ranks, self.samples)), 64, _LONGEST_OTHER)
            drawn[0, 0] = self.giant
        return np.roll(np.maximum(drawn / scale, 16).astype(np.int64), step % ranks, axis=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCost(SampleCost):
    """Milliseconds of a sample in the layers, from what a position and a pair of positions take on this machine.

    Attributes:
        per_position: Milliseconds.
        per_pair: Milliseconds.
        context: Contextual positions, which are causal in this model.
    """

    per_position: float
    per_pair: float
    context: int = 2

    def __call__(self, batch: Any) -> NDArray[np.float64]:
        """(n,) milliseconds."""
        return self.spans(batch).whole

    def spans(self, batch: Any) -> SpanCosts:
        """Of any positions."""
        history, candidates = read_lengths(batch, "num_history"), read_lengths(batch, "num_candidates")
        return self.of(self.context + 2 * history + candidates, candidates)

    def of(self, positions: Any, candidates: Any = 1) -> SpanCosts:
        """Of samples of so many positions."""
        return SpanCosts.of(
            positions, candidates=candidates, per_position=self.per_position, per_pair=self.per_pair,
            head=self.context, granule=2,
        )  # fmt: skip


def make_batch(lengths: Sequence[int] | Ints, model: ModelOptions, *, rank: int, step: int) -> SequenceBatch:
    """Samples of so many tokens."""
    given = tuple(int(length) for length in lengths)
    data = SyntheticSequences(
        num_batches=1, batch_size=len(given), lengths=Given(given), items=Keys(count=model.num_items, exponent=1.05),
        num_context=model.num_context, seed=step, rank=rank,
    )  # fmt: skip
    batch = data.batch(0)
    return batch.pin_memory() if torch.cuda.is_available() else batch


def even_lengths(lengths: Ints, rank: int, model: ModelOptions) -> Ints:
    """A rank's samples in an even division: its own without the giant, and one that fills up to the mean FLOPs."""

    def flops(tokens: Ints) -> NDArray[np.float64]:
        history = np.maximum(tokens - model.num_context - 1, 0).astype(np.float64)
        return model.cost().flops(history, 1.0, float(model.num_context))

    mean = flops(lengths.reshape(-1)).sum() / len(lengths)
    longest = np.unravel_index(int(lengths.argmax()), lengths.shape)
    own = np.delete(lengths[rank], longest[1]) if rank == longest[0] else lengths[rank][1:]
    room = mean - flops(own).sum()
    low, high = 4, int(lengths.max())
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if flops(np.array([middle]))[0] <= room else (low, middle)
    return np.concatenate([[low], own])


def batches_of(
    cell: Cell, steps: int, model: ModelOptions, *, rank: int, ranks: int, even: bool, scale: int
) -> Iterator[SequenceBatch]:
    """This rank's batches, with a giant or of an even division of the same FLOPs."""
    for step in range(steps):
        lengths = cell.lengths(ranks, step, scale)
        own = even_lengths(lengths, rank, model) if even else lengths[rank]
        yield make_batch(own, model, rank=rank, step=step)
