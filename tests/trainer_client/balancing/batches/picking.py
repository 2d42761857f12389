"""Samples picked from a batch, as tests of its kinds need them."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch

from benchmarks.references.redistribution import select_samples
from trainer_client.balancing.batches import BatchSpec, flatten


def x(count: int = 3) -> torch.Tensor:
    return torch.arange(count) + 10


def picked(batch: Any, *samples: int, spec: BatchSpec | None = None) -> Any:
    """The batch of some samples; read twice, so that the second time it is recalled; and once through a pickle."""
    results = [select_samples(flatten(batch, spec), np.array(samples, dtype=int)).unflatten() for _ in range(2)]
    assert type(results[0]) is type(results[1])
    sent = pickle.loads(pickle.dumps(flatten(batch, spec)))
    return select_samples(sent, np.array(samples, dtype=int)).unflatten()


def picked_unsent(batch: Any, *samples: int, spec: BatchSpec) -> Any:
    """The batch of some samples, whose declarations cannot be sent."""
    return select_samples(flatten(batch, spec), np.array(samples)).unflatten()
