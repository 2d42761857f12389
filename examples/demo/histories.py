"""Synthetic user histories with heavy-tailed lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

NUM_ITEMS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Histories:
    """The batches of one rank, the same at every iteration.

    Attributes:
        rank: The rank that loads them.
        steps: Number of batches; the last is smaller, and differently so on each rank.
        batch_size: Samples per batch.
        max_length: Lengths are Zipf-distributed with exponent 1.2, clipped here.
    """

    rank: int
    steps: int
    batch_size: int
    max_length: int

    def __len__(self) -> int:
        return self.steps

    def ids(self, step: int) -> list[int]:
        """The samples of a batch."""
        first = (self.rank * self.steps + step) * self.batch_size
        shortage = (3 * self.rank + 1) % self.batch_size if step == self.steps - 1 else 0
        return list(range(first, first + self.batch_size - shortage))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for step in range(self.steps):
            ids = self.ids(step)
            rng = np.random.default_rng([self.rank, step])
            lengths = np.minimum(rng.zipf(1.2, len(ids)), self.max_length)
            # A user likes one end of the catalogue: the label can be learnt from the history.
            tastes = rng.random(len(ids)) < 0.5
            spread = rng.integers(0, NUM_ITEMS // 2, int(lengths.sum()))
            items = spread + np.repeat(tastes, lengths) * (NUM_ITEMS // 2)
            yield {
                "id": torch.tensor(ids, dtype=torch.int64),
                "num_items": torch.from_numpy(lengths.astype(np.int64)),
                "items": torch.from_numpy(items),
                "label": torch.from_numpy(tastes.astype(np.float32)),
            }
