"""What several tests of batches need."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.references.redistribution import select_samples
from trainer_client.balancing.batches import BatchSpec, flatten


class OnDevice(torch.Tensor):
    """A tensor that says it is on another device."""

    is_cpu = False  # type: ignore[assignment]


def x(count: int = 3) -> torch.Tensor:
    return torch.arange(count) + 10


def select(batch: Any, *samples: int, spec: BatchSpec | None = None) -> Any:
    """The batch of some samples."""
    return select_samples(flatten(batch, spec), np.array(samples, dtype=int)).unflatten(spec)
