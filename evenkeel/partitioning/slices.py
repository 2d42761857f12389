"""What each rank needs of a plan: where its samples go, and how much it receives from whom, batch by batch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenkeel.partitioning.compile import kernel
from evenkeel.partitioning.problem import plain_array, whole_numbers

Lengths: TypeAlias = NDArray[np.int64] | NDArray[np.uint32]  # as ranks have them, and as the wire does


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One rank's part of the plan of one batch.

    Attributes:
        rank: The rank.
        destinations: (n_home,) int32, rank that trains each of its own samples of the batch, in home order.
        sources: (S,) int32, ranks that send something to this one, ascending, itself included.
        source_counts: (S,) int32, samples from each source.
        source_totals: (S, F) int64, values of each jagged field from each source.
    """

    rank: int
    destinations: NDArray[np.int32]
    sources: NDArray[np.int32]
    source_counts: NDArray[np.int32]
    source_totals: NDArray[np.int64]

    @classmethod
    def staying(cls, rank: int, lengths: Lengths) -> Slice:
        """That of a batch of which every sample stays, with its (n_home, F) lengths."""
        has_any = len(lengths) > 0
        return cls(
            rank=rank,
            destinations=np.full(len(lengths), rank, dtype=np.int32),
            sources=np.array([rank] if has_any else [], dtype=np.int32),
            source_counts=np.array([len(lengths)] if has_any else [], dtype=np.int32),
            source_totals=lengths.sum(axis=0, dtype=np.int64, keepdims=True)[: int(has_any)],
        )


@dataclass(frozen=True, slots=True, eq=False)
class Slices:
    """All ranks' slices of one plan, in shared arrays, of which `Slice` holds views.

    `slices[rank]` is the slice of a plan of one batch, `batches_of(rank)` those of a round's batches.

    Attributes:
        destinations: (n,) int32, of all samples.
        home_begin: (num_ranks + 1,) int64, where each rank's own samples begin.
        source_begin: (num_ranks * num_batches + 1,) int64, where the sources of each rank begin, batch by batch.
        sources: (pairs,) int32.
        source_counts: (pairs,) int32.
        source_totals: (pairs, F) int64.
        steps: (n,) int32, the batch that trains each sample; None: all are of one batch.
    """

    destinations: NDArray[np.int32]
    home_begin: NDArray[np.int64]
    source_begin: NDArray[np.int64]
    sources: NDArray[np.int32]
    source_counts: NDArray[np.int32]
    source_totals: NDArray[np.int64]
    steps: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return self.home_begin.size - 1

    @property
    def num_batches(self) -> int:
        """Batches of the plan."""
        return (self.source_begin.size - 1) // max(1, len(self))

    def __getitem__(self, rank: int) -> Slice:
        if not 0 <= rank < len(self):
            raise IndexError(f"rank {rank} is not one of {len(self)} ranks")
        (only,) = self.batches_of(rank)
        return only

    def batches_of(self, rank: int) -> tuple[Slice, ...]:
        """A rank's slice of each batch, over those of its own samples that the batch trains, in home order."""
        own = slice(int(self.home_begin[rank]), int(self.home_begin[rank + 1]))
        begins = self.source_begin[rank * self.num_batches : (rank + 1) * self.num_batches + 1].tolist()
        return tuple(
            Slice(
                rank=rank,
                destinations=self.destinations[own]
                if self.steps is None
                else self.destinations[own][self.steps[own] == batch],
                sources=self.sources[begin:end],
                source_counts=self.source_counts[begin:end],
                source_totals=self.source_totals[begin:end],
            )
            for batch, (begin, end) in enumerate(pairwise(begins))
        )


@kernel
def _slice_plan(
    places: NDArray[np.int32], num_places: int, home_begin: NDArray[np.int64], lengths: Lengths
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    """Sources of each place, by home; a place is a batch on a rank."""
    num_homes, num_fields = home_begin.size - 1, lengths.shape[1]
    last_source = np.full(num_places, -1, np.int32)
    source_begin = np.zeros(num_places + 1, np.int64)
    for home in range(num_homes):
        for i in range(home_begin[home], home_begin[home + 1]):
            place = places[i]
            if last_source[place] != home:
                last_source[place] = home
                source_begin[place + 1] += 1
    for place in range(num_places):
        source_begin[place + 1] += source_begin[place]
        last_source[place] = -1
    num_pairs = source_begin[num_places]
    sources, counts = np.empty(num_pairs, np.int32), np.zeros(num_pairs, np.int32)
    totals = np.zeros((num_pairs, num_fields), np.int64)
    pairs = source_begin[:-1] - 1
    for home in range(num_homes):
        for i in range(home_begin[home], home_begin[home + 1]):
            place = places[i]
            if last_source[place] != home:
                last_source[place] = home
                pairs[place] += 1
                sources[pairs[place]] = home
            pair = pairs[place]
            counts[pair] += 1
            for field in range(num_fields):
                totals[pair, field] += np.int64(lengths[i, field])
    return source_begin, sources, counts, totals


def _slice_plainly(
    places: NDArray[np.int32], num_places: int, home_begin: NDArray[np.int64], lengths: Lengths
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    """As `_slice_plan`, without compiled kernels: by sorting."""
    num_homes = home_begin.size - 1
    pairs = places.astype(np.int64) * num_homes + np.repeat(np.arange(num_homes), np.diff(home_begin))
    order = np.argsort(pairs, kind="stable")
    distinct, firsts, counts = np.unique(pairs[order], return_index=True, return_counts=True)
    totals = np.add.reduceat(lengths[order], firsts, axis=0, dtype=np.int64)
    source_begin = np.searchsorted(distinct, np.arange(num_places + 1) * num_homes)
    return source_begin, (distinct % num_homes).astype(np.int32), counts.astype(np.int32), totals


def slice_plan(
    destinations: ArrayLike,
    counts_at_home: ArrayLike,
    lengths: ArrayLike,
    steps: ArrayLike | None = None,
    num_steps: int = 1,
) -> Slices:
    """Cut a plan into what each rank needs, in one pass over samples × fields.

    Args:
        destinations: (n,) int32, rank of each sample; samples are ordered by (home, index at home).
        counts_at_home: (num_ranks,) number of samples of each home.
        lengths: (n, fields) int64, int32 or uint32, values of each jagged field of each sample.
        steps: (n,) batch of the round that trains each sample; None: all are of one batch.
        num_steps: Batches of the round.

    Returns:
        The slices of all ranks; a rank has at most as many sources as it receives samples.

    Raises:
        ValueError: If the shapes disagree, a destination is no rank or a step no batch.
    """
    n, num_ranks = np.size(destinations), np.size(counts_at_home)
    ranks = whole_numbers("destinations", destinations, None, "sample", num_ranks - 1)
    counts = whole_numbers("counts_at_home", counts_at_home, None, "rank", n)
    values = np.asarray(lengths)
    if counts.sum() != n:
        raise ValueError(f"counts_at_home add up to {counts.sum()}, but there are {n} destinations; pass one a sample")
    if values.shape[:1] != (n,) or values.ndim != 2 or (values.size and values.dtype.kind not in "iu"):
        raise ValueError(
            f"lengths has dtype {values.dtype} and shape {values.shape}; pass integers of ({n} samples, fields)"
        )
    if num_steps < 1 or (num_steps > 1 and steps is None):
        what = "are none" if steps is None else "are given"
        raise ValueError(f"num_steps is {num_steps}, and steps {what}; pass the batch of each of {n} samples")
    batches = None
    if steps is not None:
        batches = whole_numbers("steps", steps, n, "sample", num_steps - 1).astype(np.int32)
    return slices_of(plain_array(ranks, np.int32), counts, values, batches, num_steps)


def slices_of(
    destinations: NDArray[np.int32],
    counts_at_home: NDArray[Any],
    lengths: NDArray[Any],
    steps: NDArray[np.int32] | None,
    num_steps: int,
    *,
    compiled: bool = True,
) -> Slices:
    """As `slice_plan`, of arrays that fit together; by sorting while the kernel is compiled."""
    home_begin = np.zeros(counts_at_home.size + 1, np.int64)
    np.cumsum(counts_at_home, out=home_begin[1:])
    values = plain_array(lengths, np.uint32 if lengths.dtype == np.uint32 else np.int64)
    places = destinations if steps is None else destinations * np.int32(num_steps) + steps
    num_places = counts_at_home.size * num_steps
    found = (_slice_plan if compiled else _slice_plainly)(places, num_places, home_begin, values)
    return Slices(destinations, home_begin, *found, steps=steps)
