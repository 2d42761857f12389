"""What every cost of this library has in common, and the simplest of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.splits import SpanCosts
from trainer_client.balancing.batches import BatchError, read_lengths
from trainer_client.checks import is_whole

# Of a matrix product's FLOPs: once forward, twice backward (gradients of both factors).
MATMUL_WITH_BACKWARD = 3.0
# Of attention's two products: 2 forward; 5 backward, since kernels recompute the scores: (2 + 5) / 2.
ATTENTION_WITH_BACKWARD = 3.5


class SampleCost(ABC):
    """Predicted work of each sample of a batch.

    A cost is a callable from a batch to one finite number >= 0 per sample, so any function of a batch will do as
    well. Those here read lengths only, from the host's batch: nothing waits for a device.
    """

    @abstractmethod
    def __call__(self, batch: Any) -> NDArray[np.float64] | NDArray[np.int64]:
        """The costs of a batch.

        Args:
            batch: The user's batch, on the host, or a `FlatBatch`.

        Returns:
            (n,) one number per sample.

        Raises:
            BatchError: If a field is missing, has no lengths, or is on a device.
        """

    def spans(self, batch: Any) -> SpanCosts | None:  # noqa: ARG002
        """What any positions of each sample cost.

        Args:
            batch: As above.

        Returns:
            Of n samples, which cost the same as above; None if a sample's work cannot be told apart by positions.
        """
        return None


def count_positions(batch: Any, source: int | str | Sequence[str] | None) -> NDArray[np.float64] | float:
    """Positions of each sample in some part of its sequence.

    Args:
        batch: The batch.
        source: A number for all samples; the path of a jagged field or of an integer tensor; several paths, whose
            counts add up; or None for none.

    Returns:
        (n,) counts, or one number for all samples.
    """
    if source is None:
        return 0.0
    if isinstance(source, int):
        return float(source)
    paths = (source,) if isinstance(source, str) else tuple(source)
    if not paths:
        return 0.0
    counts = {path: read_lengths(batch, path).astype(np.float64) for path in dict.fromkeys(paths)}
    first = counts[paths[0]]
    for path, count in counts.items():
        if count.shape != first.shape:
            raise BatchError(
                f"{paths[0]!r} holds {first.size} samples, {path!r} {count.size}; name jagged fields, or tensors of "
                "lengths: of a flattened tensor those that rows_per_sample names for it"
            )
        if count.size and count.min() < 0:
            raise BatchError(f"sample {int(count.argmin())} of {path!r} is {int(count.min())}; give counts >= 0")
    return sum((counts[path] for path in paths[1:]), first)


def num_fields(paths: str | Sequence[str]) -> int:
    """Fields of a sequence: tokens of an item, where each field has one of it."""
    return 1 if isinstance(paths, str) else len(paths)


def check_sizes(options: object, *names: str, least: int = 1) -> None:
    """Checks that options are whole numbers of at least `least`.

    Raises:
        ValueError: If one is not.
    """
    _check(options, names, lambda value: is_whole(value) and value >= least, f"give a whole number >= {least}")


def check_fields(options: object, *names: str) -> None:
    """Checks that options name one field or several.

    Raises:
        ValueError: If one does not.
    """
    _check(options, names, _names_fields, "name at least one field")


def check_sources(options: object, *names: str) -> None:
    """Checks that options are what `count_positions` takes.

    Raises:
        ValueError: If one is not.
    """

    def counts(value: Any) -> bool:
        return value is None or (is_whole(value) and value >= 0) or _names_fields(value)

    _check(options, names, counts, "give a whole number >= 0 or name fields")


def _check(options: object, names: Sequence[str], is_valid: Callable[[Any], bool], remedy: str) -> None:
    for name in names:
        value = getattr(options, name)
        if not is_valid(value):
            raise ValueError(f"{type(options).__name__}: {name} is {value!r}; {remedy}")


def _names_fields(value: Any) -> bool:
    paths = (value,) if isinstance(value, str) else value
    return isinstance(paths, Sequence) and bool(paths) and all(isinstance(path, str) and path for path in paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCost(SampleCost):
    """Tokens of one sample: right where embeddings and dense layers dominate, and for caps on memory.

    Attributes:
        tokens: Jagged field(s) whose lengths add up, or an integer tensor with a count per sample.
        per_sample: What every sample costs besides, in tokens.
    """

    tokens: str | Sequence[str]
    per_sample: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "tokens")
        check_sizes(self, "per_sample", least=0)

    def __call__(self, batch: Any) -> NDArray[np.int64]:
        """(n,) tokens of each sample; see `SampleCost`."""
        counts = np.asarray(count_positions(batch, self.tokens))
        return counts.astype(np.int64) + self.per_sample

    def spans(self, batch: Any) -> SpanCosts:
        """Tokens of any positions of each sample; see `SampleCost`. What each costs besides goes with its end."""
        return SpanCosts.of(
            count_positions(batch, self.tokens),
            per_position=1,
            fixed=self.per_sample,
            granule=num_fields(self.tokens),
        )
