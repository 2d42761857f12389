"""What every cost of this library has in common; `TokenCost` is the simplest of them.

A cost of your own is a subclass with `spans`, or any function from a batch to one number per sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.splits import SpanCosts
from trainer_client.balancing.batches import BatchError, read_lengths
from trainer_client.checks import is_whole

Source = int | str | Sequence[str] | None
"""Positions of samples: a number for all; a jagged field or an integer tensor; several, which add up; None for none."""
Counts = NDArray[np.float64] | float
Cost = Callable[[Any], Any]
"""From a batch to one number for each sample."""


class SampleCost:
    """Predicted work of each sample of a batch: one finite number >= 0.

    Those here read lengths only, from the host's batch: nothing waits for a device. A subclass says in `spans` what
    positions cost, which adds up to the cost of a sample; or, where that cannot be told apart, gives it in `__call__`.
    """

    def __call__(self, batch: Any) -> NDArray[np.float64] | NDArray[np.int64]:
        """The costs of a batch.

        Args:
            batch: The user's batch, on the host, or a `FlatBatch`.

        Returns:
            (n,) one number per sample.

        Raises:
            BatchError: If a field is missing, has no lengths, or is on a device.
        """
        spans = self.spans(batch)
        if spans is None:
            raise NotImplementedError(f"{type(self).__name__} has neither spans nor __call__; give one of them")
        return spans.whole

    def spans(self, batch: Any) -> SpanCosts | None:  # noqa: ARG002
        """What any positions of each sample cost, as for `__call__`; None: they cannot be told apart."""
        return None


def count_positions(batch: Any, source: Source) -> Counts:
    """(n,) counts of positions, or one number for all samples."""
    if source is None or isinstance(source, int):
        return float(source or 0)
    paths = (source,) if isinstance(source, str) else tuple(source)
    counts = {path: read_lengths(batch, path).astype(np.float64) for path in dict.fromkeys(paths)}
    for path, count in counts.items():
        if count.shape != counts[paths[0]].shape:
            raise BatchError(
                f"{paths[0]!r} holds {counts[paths[0]].size} samples, {path!r} {count.size}; name jagged fields, or "
                "tensors of lengths: of a flattened tensor those that rows_per_sample names for it"
            )
        if count.size and count.min() < 0:
            raise BatchError(f"sample {int(count.argmin())} of {path!r} is {int(count.min())}; give counts >= 0")
    return sum((counts[path] for path in paths[1:]), counts[paths[0]])


def check_sources(options: object, *names: str, needed: tuple[str, ...] = ()) -> None:
    """Raises a ValueError unless these options are what `count_positions` takes, the needed ones fields."""
    for name in (*needed, *names):
        value = getattr(options, name)
        paths = (value,) if isinstance(value, str) else value
        if isinstance(paths, Sequence) and paths and all(isinstance(path, str) and path for path in paths):
            continue
        if name in needed:
            raise ValueError(f"{type(options).__name__}: {name} is {value!r}; name at least one field")
        if value is not None and not (is_whole(value) and value >= 0):
            raise ValueError(f"{type(options).__name__}: {name} is {value!r}; give a whole number >= 0 or name fields")
