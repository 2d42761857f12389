"""A batch of user sequences in the form that examples and benchmarks train on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches import BatchSpec


@dataclass(slots=True, kw_only=True)
class SequenceBatch:
    """Histories, candidates and context of n users; plain tensors, flattened over samples.

    A sample's sequence is its context features, its history (each item followed by its action where `actions` are
    interleaved), and its candidates.

    Attributes:
        sample: (n,) int64, a number that no other sample has.
        context: (n, context features) int64.
        num_history: (n,) int64, items in each history.
        history: (Σ num_history,) int64, items, oldest first.
        actions: (Σ num_history,) int64, what the user did with each.
        num_candidates: (n,) int64.
        candidates: (Σ num_candidates,) int64, items to be ranked.
        labels: (Σ num_candidates,) float32, 1 where the user liked the candidate.
    """

    sample: torch.Tensor
    context: torch.Tensor
    num_history: torch.Tensor
    history: torch.Tensor
    actions: torch.Tensor
    num_candidates: torch.Tensor
    candidates: torch.Tensor
    labels: torch.Tensor

    @property
    def size(self) -> int:
        """Samples n."""
        return self.sample.shape[0]

    @staticmethod
    def spec() -> BatchSpec:
        """What the flattened tensors belong to."""
        return BatchSpec(
            rows_per_sample={
                "history": "num_history",
                "actions": "num_history",
                "candidates": "num_candidates",
                "labels": "num_candidates",
            },
            sequence={"num_history"},
        )

    def sequence_lengths(self, interleaved: bool) -> torch.Tensor:
        """(n,) int64, tokens of each sequence: context, history with or without interleaved actions, candidates."""
        tokens = self.num_history * (2 if interleaved else 1)
        return tokens + self.num_candidates + self.context.shape[1]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> SequenceBatch:
        """The batch on `device`."""
        moved = {name: getattr(self, name).to(device, non_blocking=non_blocking) for name in self.__slots__}
        return SequenceBatch(**moved)

    def pin_memory(self) -> SequenceBatch:
        """The batch in page-locked memory."""
        return SequenceBatch(**{name: getattr(self, name).pin_memory() for name in self.__slots__})

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that another stream uses the batch; pipelines call it."""
        for name in self.__slots__:
            getattr(self, name).record_stream(stream)


def assemble(
    *,
    sample: NDArray[np.int64],
    context: NDArray[np.int64],
    num_history: NDArray[np.int64],
    history: NDArray[np.int64],
    actions: NDArray[np.int64],
    num_candidates: NDArray[np.int64],
    candidates: NDArray[np.int64],
    labels: NDArray[np.float32],
) -> SequenceBatch:
    """A batch around numpy arrays of the same names."""
    assert len(history) == len(actions) == num_history.sum()
    assert len(candidates) == len(labels) == num_candidates.sum()
    return SequenceBatch(
        sample=torch.from_numpy(sample),
        context=torch.from_numpy(context),
        num_history=torch.from_numpy(num_history),
        history=torch.from_numpy(history),
        actions=torch.from_numpy(actions),
        num_candidates=torch.from_numpy(num_candidates),
        candidates=torch.from_numpy(candidates),
        labels=torch.from_numpy(labels),
    )
