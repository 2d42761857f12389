"""Synthetic user sequences whose lengths and keys follow chosen distributions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from examples.datasets.batch import SequenceBatch, assemble
from examples.datasets.keys import Keys
from examples.datasets.lengths import Lengths, ZipfLengths
from trainer_client.checks import check_whole

_SAMPLES_PER_RANK = 1 << 40  # so that sample numbers differ between ranks with different numbers of batches


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticSequences:
    """The batches of one rank, the same at every iteration and on every machine.

    A drawn length counts the whole sequence in tokens: context features, history with interleaved actions, candidates.
    Labels can be learnt: each user likes one half of the catalogue, which shows in the actions of the history.

    Attributes:
        num_batches: Batches per iteration.
        batch_size: Samples per batch.
        lengths: Distribution of the sequence length in tokens. Shorter ones than context and candidates become those.
        items: The catalogue.
        num_candidates: Candidates of each sample.
        num_context: Context features of each sample.
        interleaved: Whether an action follows each history item as a token of its own.
        num_actions: Kinds of actions.
        seed: Of the whole data set; ranks draw from streams of their own.
        rank: Which rank's batches these are.
    """

    num_batches: int
    batch_size: int = 32
    lengths: Lengths = field(default_factory=ZipfLengths)
    items: Keys = field(default_factory=lambda: Keys(count=100_000, exponent=1.05))
    num_candidates: int = 1
    num_context: int = 2
    interleaved: bool = True
    num_actions: int = 8
    seed: int = 0
    rank: int = 0

    def __post_init__(self) -> None:
        check_whole(self, num_batches=0, batch_size=1, num_candidates=0, num_context=0, num_actions=2, seed=0, rank=0)
        for name, example in (("lengths", "ZipfLengths()"), ("items", "Keys(count=100_000)")):
            value = getattr(self, name)
            if not hasattr(value, "draw"):
                raise ValueError(f"{name} is {value!r}; give a distribution such as {example}")

    @property
    def max_tokens(self) -> int:
        """No sequence is longer."""
        return max(self.lengths.maximum, self.num_context + self.num_candidates)

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[SequenceBatch]:
        return (self.batch(number) for number in range(self.num_batches))

    def batch(self, number: int) -> SequenceBatch:
        """The batch of that number."""
        rng = np.random.default_rng([self.seed, self.rank, number])
        tokens = self.lengths.draw(rng, self.batch_size)
        rest = np.maximum(tokens - self.num_context - self.num_candidates, 0)
        num_history = rest // (2 if self.interleaved else 1)
        num_candidates = np.full(self.batch_size, self.num_candidates, dtype=np.int64)
        history = self.items.draw(rng, int(num_history.sum()), number)
        candidates = self.items.draw(rng, int(num_candidates.sum()), number)
        taste = rng.integers(0, 2, self.batch_size)
        liked = history % 2 == np.repeat(taste, num_history)
        kind = rng.integers(0, self.num_actions // 2, len(history))
        first = self.rank * _SAMPLES_PER_RANK + number * self.batch_size
        return assemble(
            sample=np.arange(first, first + self.batch_size, dtype=np.int64),
            context=np.stack([taste, *rng.integers(0, 1024, (max(self.num_context - 1, 0), self.batch_size))], axis=1)[
                :, : self.num_context
            ].astype(np.int64),
            num_history=num_history,
            history=history,
            actions=2 * kind + liked,
            num_candidates=num_candidates,
            candidates=candidates,
            labels=(candidates % 2 == np.repeat(taste, num_candidates)).astype(np.float32),
        )
