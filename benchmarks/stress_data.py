"""Samples that can be told apart, and a ledger of those that were trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

MAX_LENGTH = 48
ROWS = 5000  # keys of each table


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Batches of all ranks; odd ranks end a step early.

    Attributes:
        steps: Batches of rank 0.
        world: Number of ranks.
        batch_size: Samples of a batch, or their mean.
        features: Jagged features of a sample.
        uneven: Batches hold half to one and a half times as many samples; else all the same.
        window: Batches among which a sample may be trained.
        seed: Of sizes and lengths.
    """

    steps: int
    world: int
    batch_size: int
    features: int
    uneven: bool = False
    window: int = 1
    seed: int = 0

    @property
    def capacity(self) -> int:
        """Ids of each rank and step."""
        return 2 * self.batch_size

    @property
    def num_ids(self) -> int:
        """Ids of all ranks and steps, most of them of no sample."""
        return self.steps * self.world * self.capacity

    def sizes(self, rank: int) -> NDArray[np.int64]:
        """(steps,) samples of each batch of a rank."""
        num_steps = max(1, self.steps - rank % 2)
        if not self.uneven:
            return np.full(num_steps, self.batch_size)
        rng = np.random.default_rng((self.seed, rank))
        return rng.integers(self.batch_size // 2, 3 * self.batch_size // 2 + 1, num_steps)

    def ids(self, rank: int, step: int, size: int) -> NDArray[np.int64]:
        """(size,) ids of a batch's samples."""
        first: NDArray[np.int64] = (step * self.world + rank) * self.capacity + np.arange(size)
        return first

    def batches(self, rank: int, device: torch.device, *, keyed: bool) -> Iterator[dict[str, Any]]:
        """A rank's batches on the host, page-locked for a GPU.

        Args:
            rank: The rank.
            device: Where they will be trained.
            keyed: Features as a TorchRec `KeyedJaggedTensor`, else one of them as plain tensors.
        """
        rng = np.random.default_rng((self.seed, rank, 1))
        for step, size in enumerate(self.sizes(rank)):
            ids = self.ids(rank, step, int(size))
            # one sample in twenty is long
            long = rng.random((self.features, size)) < 0.05
            lengths = np.where(
                long, rng.integers(MAX_LENGTH // 2, MAX_LENGTH + 1, long.shape), rng.integers(1, 5, long.shape)
            )
            owner = np.repeat(np.tile(ids, self.features), lengths.ravel())
            values = (owner * 7919 + np.arange(owner.size) * 31) % ROWS
            begins = np.cumsum(lengths.ravel()) - lengths.ravel()
            sums = np.add.reduceat(values, begins) if values.size else np.zeros(0, np.int64)
            total = lengths.sum(axis=0)
            batch: dict[str, Any] = {
                "id": torch.from_numpy(ids),
                "check": torch.from_numpy(sums.reshape(lengths.shape).sum(axis=0)),
                "cost": torch.from_numpy(total + total**2 // 16),
                "label": torch.from_numpy((ids % 3 == 0).astype(np.float32)),
            }  # fmt: skip
            if keyed:
                from torchrec import KeyedJaggedTensor

                batch["features"] = KeyedJaggedTensor(
                    keys=[f"f{feature}" for feature in range(self.features)],
                    values=torch.from_numpy(values),
                    lengths=torch.from_numpy(lengths.ravel()),
                )
            else:
                batch["length"] = torch.from_numpy(lengths.ravel())
                batch["values"] = torch.from_numpy(values)
            if device.type == "cuda":
                batch = {key: value.pin_memory() for key, value in batch.items()}
            yield batch


class Ledger:
    """Counts on the device what was trained; read once, at the end."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self._workload = workload
        self._seen = torch.zeros(workload.num_ids, dtype=torch.int32, device=device)
        self._wrong = torch.zeros(2, dtype=torch.int64, device=device)  # in another step; with other values
        self._loss = torch.zeros((), device=device)
        self.steps = 0

    def note(self, ids: torch.Tensor, values: torch.Tensor, checks: torch.Tensor, loss: torch.Tensor) -> None:
        """Enters the batch that was trained as the next step.

        Args:
            ids: (n,) its samples.
            values: Values of all its features.
            checks: (n,) for each sample the sum of its values, computed where it was loaded.
            loss: Of the batch.
        """
        self._seen.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        per_window = self._workload.world * self._workload.capacity * self._workload.window
        self._wrong[0] += (ids // per_window != self.steps // self._workload.window).sum()
        self._wrong[1] += (values.sum() != checks.sum()).long()
        self._loss += loss.detach()
        self.steps += 1

    def close(self) -> dict[str, Any]:
        """What became of all samples, the same on all ranks; collective."""
        for tensor in (self._seen, self._wrong):
            dist.all_reduce(tensor)
        seen = self._seen.cpu().numpy()
        expected = np.zeros(self._workload.num_ids, dtype=bool)
        for rank in range(self._workload.world):
            for step, size in enumerate(self._workload.sizes(rank)):
                expected[self._workload.ids(rank, step, int(size))] = True
        misplaced, corrupted = self._wrong.tolist()
        return {
            "samples": int(expected.sum()),
            "lost": int((expected & (seen == 0)).sum()),
            "doubled": int(np.maximum(seen - 1, 0).sum()),
            "unknown": int((~expected & (seen > 0)).sum()),
            "in_another_step": misplaced,
            "batches_with_other_values": corrupted,
            "loss_is_finite": bool(torch.isfinite(self._loss)),
        }
