"""Batches that need no balancing, with the work of those that do: what a step would take if lengths cost nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from examples.datasets import SequenceBatch, SyntheticSequences
from examples.hstu.model import ModelOptions

Ideal = Literal["ideal", "fixed"]
IDEALS: tuple[Ideal, ...] = ("ideal", "fixed")


@dataclass(frozen=True, slots=True)
class GivenLengths:
    """The lengths of one batch, in tokens."""

    tokens: NDArray[np.int64]

    @property
    def maximum(self) -> int:
        """The longest."""
        return int(self.tokens.max(initial=0))

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """(count,) lengths, always the same."""
        del rng
        assert count == len(self.tokens)
        return self.tokens


def ideal_batches(
    kind: Ideal, flops: NDArray[np.float64], data: SyntheticSequences, model: ModelOptions
) -> list[SequenceBatch]:
    """One rank's batches.

    Args:
        kind: `ideal`: all ranks have the same lengths in a step, which together take the FLOPs of the step's batch as
            loaded: of the batch's samples in the order of their FLOPs, as many neighbours as there are ranks become as
            many samples of their mean. `fixed`: all samples of all steps take the same FLOPs, those of the mean sample.
        flops: (ranks, steps, samples) FLOPs of the samples as loaded.
        data: The rank's batches as loaded; the new ones have their keys' distribution.
        model: Whose FLOPs they are.
    """
    ranks, steps, samples = flops.shape
    if kind == "fixed":
        wanted = np.full((steps, samples), flops.mean())
    else:
        ordered = np.sort(flops.transpose(1, 0, 2).reshape(steps, ranks * samples))
        wanted = ordered.reshape(steps, samples, ranks).mean(axis=2)
    stride = 2 if model.interleaved else 1
    besides = data.num_context + data.num_candidates
    histories = np.arange((data.max_tokens - besides) // stride + 1)
    of_history = model.cost().flops(
        stride * histories.astype(np.float64), np.full(len(histories), float(data.num_candidates)),
        float(data.num_context),
    )  # fmt: skip
    middles = (of_history[1:] + of_history[:-1]) / 2
    tokens = besides + stride * np.searchsorted(middles, wanted)
    batches = []
    for step in range(steps):
        lengths = np.random.default_rng([data.seed, step]).permutation(tokens[step])  # the same order on all ranks
        batches.append(replace(data, lengths=GivenLengths(lengths)).batch(step))
    return batches
