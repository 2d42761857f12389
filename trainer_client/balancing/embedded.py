"""Balancing without a service: gather what a partition needs over the job's own group, partition on every rank."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning import Partition, PartitionError, partition
from evenkeel.partitioning.slices import Slice, slice_plan
from evenkeel.partitioning.windows import WindowSlice, partition_window, rank_slice, slice_window
from trainer_client.balancing.groups import Groups
from trainer_client.balancing.options import BalanceOptions
from trainer_client.balancing.votes import Vote


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundData:
    """What a rank knows of its own samples of a round, on the host.

    Attributes:
        costs: (n,) int64 or float64, predicted work.
        lengths: (n, jagged fields) int64, values of each jagged field.
        sizes: (n,) int64, bytes that moving each sample takes.
        memory: (n,) float64, what the memory caps count, if there are caps.
        batch_sizes: Samples of each batch of a window, in order; they follow each other in the arrays.
    """

    costs: NDArray[np.int64] | NDArray[np.float64]
    lengths: NDArray[np.int64]
    sizes: NDArray[np.int64]
    memory: NDArray[np.float64] | None
    batch_sizes: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.costs)

    @property
    def steps(self) -> NDArray[np.int32]:
        """(n,) the batch of the window in which each sample was loaded."""
        sizes = self.batch_sizes or (len(self),)
        return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)

    def in_batch(self, batch: int) -> slice:
        """Where the samples of a batch of the window are; an empty range for one that this rank does not have."""
        sizes = self.batch_sizes or (len(self),)
        begin = sum(sizes[:batch])
        return slice(begin, begin + (sizes[batch] if batch < len(sizes) else 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedPlan:
    """The plan that every rank computed alike, and this rank's slice of it.

    Attributes:
        piece: This rank's part.
        partitions: One per batch of the window.
        sizes: Bytes of the samples of each.
        seconds: Time of the search.
    """

    piece: WindowSlice
    partitions: tuple[Partition, ...]
    sizes: tuple[int, ...]
    seconds: float

    @property
    def moved_samples(self) -> int:
        """Samples that change rank, over all ranks and batches."""
        return sum(part.moved_samples for part in self.partitions)


def balance_embedded(
    data: RoundData,
    votes: list[Vote],
    groups: Groups,
    options: BalanceOptions,
    nodes: NDArray[np.int32] | None,
    *,
    stay: bool = False,
) -> EmbeddedPlan | PartitionError:
    """Gathers all ranks' data and partitions. Collective; the result is the same on every rank, failure included.

    Args:
        data: This rank's samples.
        votes: The votes of the round: they tell how many samples each rank holds and in which type its costs are.
        groups: The stream's groups; one collective on `control`.
        options: Rank 0's options.
        nodes: (world size,) host of each rank.
        stay: Nothing is balanced; only `min_samples` makes samples move, and without regard to memory.

    Returns:
        The plan, or the error when no assignment within the memory caps was found.
    """
    as_float = any(vote.costs_float for vote in votes)
    has_memory, has_steps = options.memory_caps is not None, options.window > 1
    columns = [data.costs.astype(np.float64 if as_float else np.int64).view(np.int64), data.sizes]
    if has_memory:
        assert data.memory is not None
        columns.append(data.memory.view(np.int64))
    if has_steps:
        columns.append(data.steps.astype(np.int64))
    own = np.concatenate([np.stack(columns, axis=1), data.lengths], axis=1) if len(data) else np.empty(0, np.int64)
    width = len(columns) + data.lengths.shape[1]
    counts = np.array([vote.samples for vote in votes], dtype=np.int64)
    gathered = groups.gather_bytes(
        np.ascontiguousarray(own).view(np.uint8).reshape(-1), [int(n) * width * 8 for n in counts]
    )
    started = time.perf_counter()
    table = np.concatenate([np.frombuffer(row, dtype="<i8").reshape(-1, width) for row in gathered])
    costs = np.ascontiguousarray(table[:, 0])
    sizes = np.ascontiguousarray(table[:, 1])
    memory = np.ascontiguousarray(table[:, 2]).view(np.float64) if has_memory else None
    steps = np.ascontiguousarray(table[:, len(columns) - 1]) if has_steps else np.empty(0, np.int64)
    lengths = np.ascontiguousarray(table[:, len(columns) :])
    homes = np.repeat(np.arange(groups.world_size, dtype=np.int32), counts)
    how: _Options = {
        "strategy": options.strategy,
        "sizes": sizes,
        "counts": options.counts,
        "tolerance": options.tolerance,
        "speeds": None if options.speeds is None else np.asarray(options.speeds, dtype=np.float64),
        "memory": memory,
        "memory_caps": None if options.memory_caps is None else np.asarray(options.memory_caps, dtype=np.float64),
        "nodes": nodes,
        "min_samples": options.min_samples,
        "stay": stay,
    }
    if stay:
        how |= {"counts": "free", "memory": None, "memory_caps": None}
    all_costs = costs.view(np.float64) if as_float else costs
    try:
        if has_steps:
            window = partition_window(all_costs, homes, steps, groups.world_size, options.window, **how)
        else:
            plan = partition(all_costs, homes, groups.world_size, **how)
    except PartitionError as error:
        return error
    if has_steps:
        cuts, _ = slice_window(window, counts, lengths)
        piece = rank_slice(window.steps, cuts, groups.rank, int(counts[: groups.rank].sum()))
        partitions = window.partitions
        batch_sizes = np.bincount(window.steps, weights=sizes, minlength=options.window)
    else:
        piece = WindowSlice(steps=None, slices=(slice_plan(plan.destinations, counts, lengths)[groups.rank],))
        partitions, batch_sizes = (plan,), np.array([sizes.sum()])
    return EmbeddedPlan(
        piece=piece,
        partitions=partitions,
        sizes=tuple(int(size) for size in batch_sizes),
        seconds=time.perf_counter() - started,
    )


class _Options(TypedDict):
    strategy: str
    sizes: NDArray[np.int64]
    counts: str
    tolerance: float
    speeds: NDArray[np.float64] | None
    memory: NDArray[np.float64] | None
    memory_caps: NDArray[np.float64] | None
    nodes: NDArray[np.int32] | None
    min_samples: int
    stay: bool


def stay_home(rank: int, data: RoundData, num_batches: int = 1) -> WindowSlice:
    """The part of a rank in a round in which every sample stays where it is, in the batch in which it was loaded."""
    return WindowSlice(
        steps=None, slices=tuple(_stay_home(rank, data.lengths[data.in_batch(batch)]) for batch in range(num_batches))
    )


def _stay_home(rank: int, lengths: NDArray[np.int64]) -> Slice:
    held = len(lengths) > 0
    return Slice(
        rank=rank,
        destinations=np.full(len(lengths), rank, dtype=np.int32),
        sources=np.array([rank] if held else [], dtype=np.int32),
        source_counts=np.array([len(lengths)] if held else [], dtype=np.int32),
        source_totals=lengths.sum(axis=0, keepdims=True) if held else np.empty((0, lengths.shape[1]), dtype=np.int64),
    )


def sent_in(data: RoundData, piece: WindowSlice, batch: int) -> NDArray[np.int64]:
    """(m, jagged fields) lengths of the own samples that are trained in a batch of the window, somewhere."""
    return data.lengths[data.in_batch(batch) if piece.steps is None else piece.steps == batch]
