"""What each rank needs of a plan: where its samples go, and how much it receives from whom, batch by batch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenkeel.partitioning.compile import kernel, plain_array

_LENGTHS = (np.int64, np.uint32)  # the others become int64


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


class Slices(Sequence[Slice]):
    """All ranks' slices of one plan, in shared arrays, of which `Slice` holds views.

    `slices[rank]` is the slice of a plan of one batch, `batches_of(rank)` those of a window's batches.

    Attributes:
        destinations: (n,) int32, of all samples.
        home_begin: (num_ranks + 1,) int64, where each rank's own samples begin.
        source_begin: (num_ranks * num_batches + 1,) int64, where the sources of each rank begin, batch by batch.
        sources: (pairs,) int32.
        source_counts: (pairs,) int32.
        source_totals: (pairs, F) int64.
        steps: (n,) int32, the batch that trains each sample; None: all are of one batch.
    """

    __slots__ = ("destinations", "home_begin", "source_begin", "source_counts", "source_totals", "sources", "steps")

    def __init__(
        self,
        destinations: NDArray[np.int32],
        home_begin: NDArray[np.int64],
        source_begin: NDArray[np.int64],
        sources: NDArray[np.int32],
        counts: NDArray[np.int32],
        totals: NDArray[np.int64],
        steps: NDArray[np.int32] | None = None,
    ) -> None:
        self.destinations = destinations
        self.home_begin = home_begin
        self.source_begin = source_begin
        self.sources = sources
        self.source_counts = counts
        self.source_totals = totals
        self.steps = steps

    def __len__(self) -> int:
        return self.home_begin.size - 1

    @property
    def num_batches(self) -> int:
        """Batches of the plan."""
        return (self.source_begin.size - 1) // max(1, len(self))

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """The shared arrays, in the order in which they are passed on."""
        arrays = (self.destinations, self.home_begin, self.source_begin, self.sources, self.source_counts)
        return (*arrays, self.source_totals, *(() if self.steps is None else (self.steps,)))

    @property
    def nbytes(self) -> int:
        """Memory of the shared arrays."""
        return sum(array.nbytes for array in self.arrays)

    @overload
    def __getitem__(self, index: int) -> Slice: ...
    @overload
    def __getitem__(self, index: slice) -> list[Slice]: ...
    def __getitem__(self, index: int | slice) -> Slice | list[Slice]:
        if isinstance(index, slice):
            return [self[rank] for rank in range(*index.indices(len(self)))]
        rank = index + len(self) if index < 0 else index
        if not 0 <= rank < len(self):
            raise IndexError(f"rank {index} is not one of {len(self)} ranks")
        (only,) = self.batches_of(rank)
        return only

    def __iter__(self) -> Iterator[Slice]:
        return (self[rank] for rank in range(len(self)))

    def steps_of(self, rank: int) -> NDArray[np.int32] | None:
        """(n_home,) the batch that trains each of a rank's own samples; None: all are of one batch."""
        return None if self.steps is None else self.steps[self.home_begin[rank] : self.home_begin[rank + 1]]

    def batches_of(self, rank: int) -> tuple[Slice, ...]:
        """A rank's slice of each batch, over those of its own samples that the batch trains, in home order."""
        own, steps = self.destinations[self.home_begin[rank] : self.home_begin[rank + 1]], self.steps_of(rank)
        begins = self.source_begin[rank * self.num_batches : (rank + 1) * self.num_batches + 1].tolist()
        return tuple(
            Slice(
                rank=rank,
                destinations=own if steps is None else own[steps == batch],
                sources=self.sources[begin:end],
                source_counts=self.source_counts[begin:end],
                source_totals=self.source_totals[begin:end],
            )
            for batch, (begin, end) in enumerate(pairwise(begins))
        )


@kernel
def _first_outside(numbers: NDArray[np.int32], end: int) -> int:
    """Index of the first number that is not one of 0 to `end` - 1, or -1."""
    for i in range(numbers.size):
        if numbers[i] < 0 or numbers[i] >= end:
            return i
    return -1


@kernel
def _sum_within(counts: NDArray[np.int64], most: int) -> int:
    """The sum of counts of 0 to `most` each; -1 if one is not, since their sum might wrap around."""
    total = 0
    for count in counts:
        if count < 0 or count > most:
            return -1
        total += count
    return total


@kernel
def _slice_plan(
    places: NDArray[np.int32],
    num_places: int,
    home_begin: NDArray[np.int64],
    words: NDArray[np.uint32],
    num_fields: int,
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    """Sources of each place, by home; a place is a batch on a rank.

    `words` are the lengths of `num_fields` fields in one or two words each, the lower one first.
    """
    num_homes, wide = home_begin.size - 1, words.shape[1] > num_fields
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
                if wide:
                    high = np.int64(words[i, 2 * field + 1]) << 32
                    totals[pair, field] += high | np.int64(words[i, 2 * field])
                else:
                    totals[pair, field] += np.int64(words[i, field])
    return source_begin, sources, counts, totals


def _whole_numbers(field: str, values: ArrayLike, dtype: type[np.int32] | type[np.int64]) -> NDArray[Any]:
    """As an array of the dtype; what it cannot hold is refused instead of wrapped around."""
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{field} has dtype {array.dtype}; pass {np.dtype(dtype)} numbers")
    if array.size and not np.can_cast(array.dtype, dtype):
        known = np.iinfo(dtype)
        for value in (int(array.min()), int(array.max())):
            if not known.min <= value <= known.max:
                raise ValueError(f"{field} contains {value}, beyond {np.dtype(dtype)}")
    return plain_array(array, dtype)


def _plan_arrays(
    destinations: ArrayLike, counts_at_home: ArrayLike, lengths: ArrayLike
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64] | NDArray[np.uint32]]:
    ranks = _whole_numbers("destinations", destinations, np.int32)
    counts = _whole_numbers("counts_at_home", counts_at_home, np.int64)
    values = np.asarray(lengths)
    if values.size and values.dtype.kind not in "iu":
        raise ValueError(f"lengths has dtype {values.dtype}; pass int64, int32 or uint32 numbers")
    values = plain_array(values, values.dtype if values.dtype in _LENGTHS else np.int64)
    if ranks.ndim != 1 or counts.ndim != 1:
        raise ValueError("destinations and counts_at_home must have one dimension each")
    total = _sum_within(counts, ranks.size)
    if total < 0:
        bad = int(counts.argmin() if counts.min() < 0 else counts.argmax())
        wrong = "; counts must not be negative" if counts[bad] < 0 else f", but there are {ranks.size} destinations"
        raise ValueError(f"counts_at_home[{bad}] is {int(counts[bad])}{wrong}")
    if total != ranks.size:
        raise ValueError(
            f"counts_at_home add up to {total}, but there are {ranks.size} destinations; pass one a sample"
        )
    if values.ndim != 2 or values.shape[0] != ranks.size:
        raise ValueError(f"lengths has shape {values.shape}; it must be (samples, fields), here ({ranks.size}, fields)")
    return ranks, counts, values


def checked_steps(steps: ArrayLike | None, num_samples: int, num_steps: int) -> NDArray[np.int32] | None:
    """The batch of the window of each sample; None: all are of one batch.

    Raises:
        ValueError: If a sample has none, or the window has no batch.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps is {num_steps}; pass the number of batches of the window, at least 1")
    if steps is None:
        if num_steps > 1:
            raise ValueError(f"num_steps is {num_steps}, but steps is None; pass the batch of each sample")
        return None
    array = _whole_numbers("steps", steps, np.int32)
    if array.shape != (num_samples,):
        raise ValueError(f"steps has shape {array.shape}; pass one integer for each of {num_samples} samples")
    bad = _first_outside(array, num_steps)
    if bad >= 0:
        raise ValueError(f"steps[{bad}] is {int(array[bad])}; it must be a batch of the window, 0 to {num_steps - 1}")
    return array


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
        steps: (n,) batch of the window that trains each sample; None: all are of one batch.
        num_steps: Batches of the window.

    Returns:
        The slices of all ranks; a rank has at most as many sources as it receives samples.

    Raises:
        ValueError: If the shapes disagree, a destination is no rank or a step no batch.
    """
    ranks, counts, values = _plan_arrays(destinations, counts_at_home, lengths)
    batches = checked_steps(steps, ranks.size, num_steps)
    bad = _first_outside(ranks, counts.size)
    if bad >= 0:
        raise ValueError(f"destinations[{bad}] is {int(ranks[bad])}; it must be a rank, 0 to {counts.size - 1}")
    home_begin = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts, out=home_begin[1:])
    places = ranks if batches is None else ranks * np.int32(num_steps) + batches
    words, num_fields = values.view(np.uint32), values.shape[1]
    found = _slice_plan(places, counts.size * num_steps, home_begin, words, num_fields)
    return Slices(ranks, home_begin, *found, steps=batches)


def slice_plainly(
    destinations: NDArray[np.int32],
    counts_at_home: NDArray[np.int64],
    lengths: NDArray[np.int64] | NDArray[np.uint32],
    steps: NDArray[np.int32] | None = None,
    num_steps: int = 1,
) -> Slices:
    """What `slice_plan` gives, without compiled kernels: by sorting."""
    ranks = counts_at_home.size
    homes = np.repeat(np.arange(ranks), counts_at_home)
    places = destinations.astype(np.int64) * num_steps + (0 if steps is None else steps)
    pairs = places * ranks + homes
    order = np.argsort(pairs, kind="stable")
    distinct, firsts = np.unique(pairs[order], return_index=True)
    totals = np.zeros((distinct.size, lengths.shape[1]), np.int64)
    if totals.size:
        totals = np.add.reduceat(lengths[order].astype(np.int64), firsts, axis=0)
    return Slices(
        destinations,
        np.concatenate([[0], np.cumsum(counts_at_home)]).astype(np.int64),
        np.searchsorted(distinct, np.arange(ranks * num_steps + 1) * ranks),
        (distinct % ranks).astype(np.int32),
        np.diff(firsts, append=pairs.size).astype(np.int32),
        totals,
        steps,
    )
