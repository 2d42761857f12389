"""Partition of a window of batches: heavy samples of several batches meet in one, where they can balance each other.

A sample heavier than a rank's share keeps all other ranks waiting in its batch. In a window of K batches such samples
are exchanged against light ones until they stand in as few batches as possible, side by side on different ranks. Each
batch keeps its number of samples, and no batch's lower bound rises.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenkeel.partitioning.api import DEFAULT_MOVE_PRICE, DEFAULT_TOLERANCE, Options, Partition, evenness, partition
from evenkeel.partitioning.errors import PartitionError
from evenkeel.partitioning.regrouping import GIANT, regroup, step_bounds
from evenkeel.partitioning.slices import checked_steps

# How full the batches of heavy samples are made, as a share of what their heaviest sample leaves room for. The fullest
# has the least sum of bounds; the next is tried where its partition misses its bounds.
FILLS = (1.0, 0.95)
MISSED = 1.01
# A batch that is full to the brim of heavy samples is the hardest to partition: the last promille would cost most of
# the time and gain nothing beside what meeting gains.
TOLERANCE = 5e-3
_OF_SAMPLES = ("sizes", "memory", "given")  # of the options of `partition`
_RANK = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPartition:
    """Which batch of the window, and which rank, trains each sample.

    Attributes:
        steps: (n,) int32, the batch of the window that trains each sample; None: all are of one batch.
        loaded: (n,) int32, the batch in which it was loaded; None as well.
        destinations: (n,) int32, the rank that trains it.
        partitions: One per batch, over its samples in their order; what they say of loads at home is of the samples
            that were loaded in the batch.
    """

    steps: NDArray[np.int32] | None
    loaded: NDArray[np.int32] | None
    destinations: NDArray[np.int32]
    partitions: tuple[Partition, ...]

    @property
    def changed(self) -> int:
        """Samples that are trained in another batch than the one they were loaded in."""
        return 0 if self.steps is None or self.loaded is None else int(np.count_nonzero(self.steps != self.loaded))

    @property
    def largest(self) -> tuple[float, ...]:
        """Per batch, the largest load over speed."""
        return tuple(evenness(part.loads, part.speeds)[0] for part in self.partitions)

    @property
    def total(self) -> float:
        """Sum over the batches of the largest load over speed: the time of the window's steps, in units of cost."""
        return sum(self.largest)

    @property
    def moved_share(self) -> float:
        """Share of the samples' sizes that changes rank."""
        size = sum(part.size for part in self.partitions)
        return sum(part.moved_size for part in self.partitions) / size if size > 0 else 0.0

    def time(self, move_price: float) -> float:
        """The time of the window's steps and of its moves, in units of cost; see `partition`."""
        return self.total + move_price * self.moved_share * sum(part.lower_bound for part in self.partitions)

    @property
    def moved_samples(self) -> int:
        """Samples that change rank."""
        return sum(each.moved_samples for each in self.partitions)


def partition_window(
    costs: ArrayLike,
    homes: ArrayLike,
    steps: ArrayLike | None,
    num_ranks: int,
    num_steps: int,
    *,
    meet: bool = True,
    given: NDArray[np.int64] | None = None,
    **options: Unpack[Options],
) -> WindowPartition:
    """Assign each sample of a window to one of its batches and a rank.

    Samples change their batch only where some batch has a lower bound above 1.02 times its mean load, and only when the
    sum over the batches of the largest load falls by that, and by more than the additional moves take. Otherwise the
    result is `partition` of each batch.

    Args:
        costs: (n,) as for `partition`.
        homes: (n,) rank that holds each sample.
        steps: (n,) batch of the window, 0 to `num_steps` - 1, in which each sample was loaded; None: in the only one.
        num_ranks: Number of ranks.
        num_steps: Number of batches K.
        meet: Whether samples may change their batch; without, a window costs no more than its batches.
        given: (n,) batch << 32 | rank of each sample, where that has been decided before; None: it is to be found.
        **options: As for `partition`; the caps hold in each batch, and with `stay` samples do not change their batch.

    Raises:
        PartitionError: If no assignment within the memory caps was found.
        ValueError: If an argument is wrong; the message names it and its remedy.
    """
    all_costs, all_homes = np.asarray(costs), np.asarray(homes)
    loaded = checked_steps(steps, all_costs.size, num_steps)
    if loaded is None:
        ranks = None if given is None else (given & _RANK).astype(np.int32)
        only = partition(all_costs, all_homes, num_ranks, given=ranks, **options)
        return WindowPartition(steps=None, loaded=None, destinations=only.destinations, partitions=(only,))
    chosen: dict[str, Any] = {**options}
    if given is not None:
        chosen["given"] = (given & _RANK).astype(np.int32)
    of_samples = {name: np.asarray(chosen[name]) for name in _OF_SAMPLES if chosen.get(name) is not None}

    def attempt(which: NDArray[np.int32], **changes: Any) -> WindowPartition | PartitionError:
        destinations = np.empty(all_costs.size, np.int32)
        parts = []
        for step in range(num_steps):
            own = np.flatnonzero(which == step)
            how = {**chosen, **changes, **{name: values[own] for name, values in of_samples.items()}}
            try:
                parts.append(partition(all_costs[own], all_homes[own], num_ranks, **how))
            except PartitionError as error:
                return error
            destinations[own] = parts[-1].destinations
        return WindowPartition(steps=which, loaded=loaded, destinations=destinations, partitions=tuple(parts))

    if given is not None:
        return _found(attempt((given >> 32).astype(np.int32)), all_costs, all_homes, num_ranks)
    best = attempt(loaded)  # checks all arguments; only the caps may have failed it
    if num_steps < 2 or num_ranks < 2 or chosen.get("stay") or not meet:
        return _found(best, all_costs, all_homes, num_ranks)
    speeds, equal = chosen.get("speeds"), chosen.get("counts", "equal") == "equal"
    weights = np.ones(num_ranks) if speeds is None else np.asarray(speeds, np.float64)
    bounds = step_bounds(all_costs, loaded, num_steps, weights, equal=equal)
    if not (bounds.bound > GIANT * bounds.mean).any():
        return _found(best, all_costs, all_homes, num_ranks)
    price = chosen.get("move_price", DEFAULT_MOVE_PRICE)
    for fill in FILLS:
        which = regroup(all_costs, loaded, num_steps, weights, equal=equal, fill=fill)
        if (which == loaded).all():
            continue
        found = attempt(which, tolerance=max(chosen.get("tolerance", DEFAULT_TOLERANCE), TOLERANCE))
        if isinstance(found, PartitionError):
            continue
        if isinstance(best, PartitionError) or found.time(price) < best.time(price):
            best = found
        reachable = step_bounds(all_costs, which, num_steps, weights, equal=equal).bound.sum()
        if found.total <= MISSED * reachable:
            break
    return _found(best, all_costs, all_homes, num_ranks)


def _found(
    best: WindowPartition | PartitionError, costs: NDArray[Any], homes: NDArray[Any], num_ranks: int
) -> WindowPartition:
    if isinstance(best, PartitionError):
        raise best
    if best.loaded is None or not best.changed:
        return best
    parts = best.partitions
    before = np.bincount(best.loaded * num_ranks + homes, costs, len(parts) * num_ranks).reshape(len(parts), -1)
    return replace(
        best,
        partitions=tuple(replace(part, home_loads=loads) for part, loads in zip(parts, before, strict=True)),
    )
