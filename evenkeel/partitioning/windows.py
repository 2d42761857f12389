"""Partition of a window of batches: heavy samples of several batches meet in one, where they can balance each other.

A sample heavier than a rank's share keeps all other ranks waiting in its batch. In a window of K batches such samples
are exchanged against light ones until they stand in as few batches as possible, side by side on different ranks. Each
batch keeps its number of samples, and no batch's lower bound rises.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenkeel.partitioning.api import Partition, partition
from evenkeel.partitioning.errors import PartitionError
from evenkeel.partitioning.regrouping import GIANT, regroup, step_bounds
from evenkeel.partitioning.slices import Slice, Slices, plan_digest, slice_plan

# How full the batches of heavy samples are made, as a share of what their heaviest sample leaves room for. The fullest
# has the least sum of bounds; the next is tried where its partition misses its bounds.
FILLS = (1.0, 0.95)
MISSED = 1.01
# A batch that is full to the brim of heavy samples is the hardest to partition: the last promille would cost most of
# the time and gain nothing beside what meeting gains.
TOLERANCE = 5e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPartition:
    """Which batch of the window, and which rank, trains each sample.

    Attributes:
        steps: (n,) int32, the batch of the window that trains each sample.
        destinations: (n,) int32, the rank that trains it.
        partitions: One per batch, over its samples in their order.
        largest: Per batch, the largest load over speed.
        changed: Samples that are trained in another batch than the one they were loaded in.
    """

    steps: NDArray[np.int32]
    destinations: NDArray[np.int32]
    partitions: tuple[Partition, ...]
    largest: tuple[float, ...]
    changed: int

    @property
    def total(self) -> float:
        """Sum over the batches of the largest load over speed: the time of the window's steps, in units of cost."""
        return sum(self.largest)

    @property
    def moved_samples(self) -> int:
        """Samples that change rank."""
        return sum(each.moved_samples for each in self.partitions)


def partition_window(
    costs: ArrayLike,
    homes: ArrayLike,
    steps: ArrayLike,
    num_ranks: int,
    num_steps: int,
    *,
    strategy: str = "minimal_move",
    sizes: ArrayLike | None = None,
    counts: str = "equal",
    tolerance: float = 1e-3,
    speeds: ArrayLike | None = None,
    memory: ArrayLike | None = None,
    memory_caps: ArrayLike | None = None,
    nodes: ArrayLike | None = None,
    min_samples: int = 0,
    meet: bool = True,
    stay: bool = False,
) -> WindowPartition:
    """Assign each sample of a window to one of its batches and a rank.

    Samples change their batch only where some batch has a lower bound above 1.02 times its mean load, and only when the
    sum over the batches of the largest load falls by that. Otherwise the result is `partition` of each batch.

    Args:
        costs: (n,) as for `partition`.
        homes: (n,) rank that holds each sample.
        steps: (n,) batch of the window, 0 to `num_steps` - 1, in which each sample was loaded.
        num_ranks: Number of ranks.
        num_steps: Number of batches K.
        strategy, sizes, counts, tolerance, speeds, memory, memory_caps, nodes, min_samples: As for `partition`; the
            caps hold in each batch.
        meet: Whether samples may change their batch; without, a window costs no more than its batches.
        stay: As for `partition`; samples do not change their batch then.

    Raises:
        PartitionError: If no assignment within the memory caps was found.
        ValueError: If an argument is wrong; the message names it and its remedy.
    """
    all_costs, all_homes = np.asarray(costs), np.asarray(homes)
    loaded = _steps_of(steps, all_costs.size, num_steps)

    def cut(values: ArrayLike | None, members: NDArray[np.int64]) -> NDArray[np.float64] | None:
        return None if values is None else np.asarray(values)[members]

    def attempt(which: NDArray[np.int32], tolerance: float) -> WindowPartition | PartitionError:
        destinations = np.empty(all_costs.size, np.int32)
        parts = []
        for step in range(num_steps):
            members = np.flatnonzero(which == step)
            try:
                part = partition(
                    all_costs[members],
                    all_homes[members],
                    num_ranks,
                    strategy=strategy,
                    sizes=cut(sizes, members),
                    counts=counts,
                    tolerance=tolerance,
                    speeds=speeds,
                    memory=cut(memory, members),
                    memory_caps=memory_caps,
                    nodes=nodes,
                    min_samples=min_samples,
                    stay=stay,
                )
            except PartitionError as error:
                return error
            destinations[members] = part.destinations
            parts.append(part)
        changed = int(np.count_nonzero(which != loaded))
        largest = tuple(float((part.loads / weights).max()) for part in parts)
        return WindowPartition(
            steps=which, destinations=destinations, partitions=tuple(parts), largest=largest, changed=changed
        )

    weights = np.ones(max(num_ranks, 1)) if speeds is None else np.asarray(speeds, np.float64)
    best = attempt(loaded, tolerance)  # checks all arguments; only the caps may have failed it
    if stay or not meet:
        return _found(best)
    bounds = step_bounds(all_costs, loaded, num_steps, weights, equal=counts == "equal")
    if num_steps < 2 or num_ranks < 2 or not (bounds.bound > GIANT * bounds.mean).any():
        return _found(best)
    for fill in FILLS:
        which = regroup(all_costs, loaded, num_steps, weights, equal=counts == "equal", fill=fill)
        if (which == loaded).all():
            continue
        found = attempt(which, max(tolerance, TOLERANCE))
        if isinstance(found, PartitionError):
            continue
        if isinstance(best, PartitionError) or found.total < best.total:
            best = found
        reachable = step_bounds(all_costs, which, num_steps, weights, equal=counts == "equal").bound.sum()
        if found.total <= MISSED * reachable:
            break
    return _found(best)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSlice:
    """One rank's part of the plan of a window.

    Attributes:
        steps: (n,) int32, the batch of the window that trains each of its own samples; None: as loaded.
        slices: One per batch of the window, over the own samples that it trains, in their order.
    """

    steps: NDArray[np.int32] | None
    slices: tuple[Slice, ...]


def slice_window(
    plan: WindowPartition, counts_at_home: ArrayLike, lengths: ArrayLike
) -> tuple[tuple[Slices, ...], bytes]:
    """Cut the plan of a window into what each rank needs.

    Args:
        plan: The plan; its samples are ordered by (home, batch, index in the batch).
        counts_at_home: (num_ranks,) samples of each home in all batches of the window.
        lengths: (n, fields) values of each jagged field of each sample.

    Returns:
        For each batch the slices of all ranks, and 16 bytes that name the whole plan.
    """
    counts, table = np.asarray(counts_at_home, np.int64), np.asarray(lengths)
    homes = np.repeat(np.arange(counts.size), counts)
    cuts = []
    for step, part in enumerate(plan.partitions):
        members = np.flatnonzero(plan.steps == step)
        at_home = np.bincount(homes[members], minlength=counts.size)
        cuts.append(slice_plan(part.destinations, at_home, table[members]))
    digest = hashlib.blake2b(plan_digest(plan.destinations, counts, table), digest_size=16)
    digest.update(plan.steps.astype("<i4").tobytes())
    digest.update(len(plan.partitions).to_bytes(8, "little"))
    return tuple(cuts), digest.digest()


def rank_slice(plan_steps: NDArray[np.int32], slices: tuple[Slices, ...], rank: int, begin: int) -> WindowSlice:
    """One rank's part of what `slice_window` cut.

    Args:
        plan_steps: (n,) `WindowPartition.steps`.
        slices: What `slice_window` returned.
        rank: The rank.
        begin: Index of its first sample among all.
    """
    mine = tuple(each[rank] for each in slices)
    own = sum(piece.destinations.size for piece in mine)
    return WindowSlice(steps=plan_steps[begin : begin + own], slices=mine)


def _steps_of(steps: ArrayLike, n: int, num_steps: int) -> NDArray[np.int32]:
    if num_steps < 1:
        raise ValueError(f"num_steps is {num_steps}; pass the number of batches of the window, at least 1")
    array = np.asarray(steps)
    if array.shape != (n,) or (n and array.dtype.kind not in "iu"):
        raise ValueError(f"steps is {array.dtype} of shape {array.shape}; pass one integer for each of {n} samples")
    bad = np.flatnonzero((array < 0) | (array >= num_steps))
    if bad.size:
        at = int(bad[0])
        raise ValueError(f"steps[{at}] is {array[at]}; it must be a batch of the window, 0 to {num_steps - 1}")
    return np.ascontiguousarray(array, np.int32)


def _found(best: WindowPartition | PartitionError) -> WindowPartition:
    if isinstance(best, PartitionError):
        raise best
    return best
