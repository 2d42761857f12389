"""Splitting the samples of a round: each batch of its window by itself, and then the parts of all of them in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.api import Options, Partition, partition
from evenkeel.partitioning.errors import PartitionError, PartitionNotFoundError
from evenkeel.partitioning.samples import RoundSamples
from evenkeel.partitioning.splits.parts import PIECE_WIDTH, RoundParts
from evenkeel.partitioning.splits.samples import Divisible, SplitOptions
from evenkeel.partitioning.splits.search import SplitPartition, split_partition, wants_splits
from evenkeel.partitioning.windows import WindowPartition

_OF_SAMPLES = ("sizes", "memory")
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitBatch:
    """A batch of a window.

    Attributes:
        whole: The best assignment found of whole samples; None if none is within the memory caps.
        split: One with samples in parts; None where all stay whole.
        home_loads: (num_ranks,) as loaded.
    """

    whole: Partition | None
    split: SplitPartition | None
    home_loads: NDArray[Any]

    @property
    def loads(self) -> NDArray[Any]:
        """(num_ranks,) as planned."""
        if self.split is not None:
            return self.split.loads
        assert self.whole is not None
        return self.whole.loads


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitWindow:
    """A window some of whose samples are split, over all its parts: by home, then in home order.

    Attributes:
        batches: How each is partitioned.
        samples: (m,) int64, the sample of each part, ascending.
        destinations: (m,) int32, the rank that trains it.
        steps: (m,) int32, the batch that does; None: all are of one.
        parts: Which are parts of which sample.
    """

    batches: tuple[SplitBatch, ...]
    samples: Integers
    destinations: NDArray[np.int32]
    steps: NDArray[np.int32] | None
    parts: RoundParts


def split_window(
    window: WindowPartition | PartitionError,
    samples: RoundSamples,
    homes: NDArray[np.int32],
    split: SplitOptions,
    options: Options,
) -> SplitWindow | None:
    """Splits samples in the batches of a window in which that takes less time.

    Args:
        window: The best assignment of whole samples, or why there is none.
        samples: Those of the round, with those that may be split.
        homes: (n,) rank that holds each.
        split: When samples are split.
        options: As for `partition`.

    Returns:
        None where all samples stay whole.

    Raises:
        PartitionError: If a batch has no assignment within the memory caps, not of parts either.
    """
    assert samples.divisible is not None
    divisible = Divisible.of_table(samples.divisible)
    failed = isinstance(window, PartitionError)
    if not isinstance(window, PartitionError) and not any(wants_splits(one, split) for one in window.partitions):
        return None
    steps = samples.steps if isinstance(window, PartitionError) else window.steps
    loaded = samples.steps
    batches = []
    for batch in range(samples.num_batches):
        own = np.arange(homes.size) if steps is None else np.flatnonzero(steps == batch)
        how: dict[str, Any] = {**options}
        how |= {name: np.asarray(how[name])[own] for name in _OF_SAMPLES if how.get(name) is not None}
        costs, own_homes = samples.costs[own], homes[own]
        found: Partition | PartitionError
        if failed:
            try:
                found = partition(costs, own_homes, samples.num_ranks, **how)
            except PartitionError as error:
                found = error
        else:
            assert isinstance(window, WindowPartition)
            found = window.partitions[batch]
        places = np.searchsorted(own, divisible.samples)
        held = np.flatnonzero(np.append(own, -1)[places] == divisible.samples)
        chosen = divisible.take(held)
        chosen = Divisible(samples=places[held], first_items=chosen.first_items, spans=chosen.spans)
        parted = split_partition(found, costs, own_homes, samples.num_ranks, chosen, split, how)
        if parted is None and isinstance(found, PartitionError):
            raise _not_in_parts_either(found, how) if len(chosen) else found
        at_home = own if loaded is None else np.flatnonzero(loaded == batch)
        home_loads = np.bincount(homes[at_home], samples.costs[at_home], samples.num_ranks)
        whole = found if isinstance(found, Partition) else None
        batches.append((own, SplitBatch(whole=whole, split=parted, home_loads=home_loads)))
    if not failed and not any(batch.split for _, batch in batches):
        return None
    return _assembled(batches, samples, homes, divisible, steps)


def _not_in_parts_either(error: PartitionError, how: dict[str, Any]) -> PartitionError:
    """Why neither whole samples nor parts of them keep within the memory caps."""
    if float(np.sum(how["memory"])) > float(np.sum(how["memory_caps"])):
        return error
    why = str(error).partition("; ")[0]  # without what would help whole samples
    return PartitionNotFoundError(
        f"{why}; with samples split over ranks no assignment was found either; raise memory_caps, let counts be 'free',"
        " or take fewer or shorter samples"
    )


def _assembled(
    batches: list[tuple[Integers, SplitBatch]],
    samples: RoundSamples,
    homes: NDArray[np.int32],
    divisible: Divisible,
    steps: NDArray[np.int32] | None,
) -> SplitWindow:
    found: list[tuple[Integers, Integers, Integers, NDArray[np.int32]]] = []
    for own, batch in batches:
        if batch.split is not None:
            one = batch.split
            found.append((own[one.samples], one.begins, one.ends, one.ranks))
        else:
            assert batch.whole is not None
            none = np.zeros(own.size, np.int64)
            found.append((own, none, none, batch.whole.destinations))
    of, begins, ends, ranks = (np.concatenate(columns) for columns in zip(*found, strict=True))
    order = np.lexsort((begins, of))
    of, begins, ends, ranks = of[order], begins[order], ends[order], np.ascontiguousarray(ranks[order])
    places = np.minimum(np.searchsorted(divisible.samples, of), len(divisible) - 1)
    counted = (begins - divisible.first_items[places]) / divisible.spans.granule[places]
    items: Integers = np.where(begins > 0, np.rint(counted), 0).astype(np.int64)
    steps_of = None if steps is None else np.ascontiguousarray(steps[of])
    home_begin = np.concatenate([[0], np.cumsum(samples.counts_at_home)])
    split = np.flatnonzero(ends > 0)
    batch_of = np.zeros(of.size, np.int64) if steps_of is None else steps_of.astype(np.int64)
    table = np.empty((split.size, PIECE_WIDTH), np.int64)
    table[:, 0], table[:, 1] = batch_of[split], of[split]
    table[:, 2] = divisible.spans.context[places[split]]
    table[:, 3] = divisible.spans.candidates[places[split]]
    table[:, 4], table[:, 5] = ranks[split], _arrivals(batch_of * samples.num_ranks + ranks)[split]
    table[:, 6], table[:, 7] = begins[split], ends[split]
    table = table[np.lexsort((table[:, 6], table[:, 1], table[:, 0]))]
    return SplitWindow(
        batches=tuple(batch for _, batch in batches),
        samples=of,
        destinations=ranks,
        steps=steps_of,
        parts=RoundParts(samples=of - home_begin[homes[of]], begins=items, pieces=table),
    )


def _arrivals(places: Integers) -> Integers:
    """(m,) how many earlier parts go to the same place: parts arrive by home, then in home order."""
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    firsts = np.flatnonzero(np.diff(ordered, prepend=-1))
    numbers = np.empty(places.size, np.int64)
    numbers[order] = np.arange(places.size) - np.repeat(firsts, np.diff(np.append(firsts, places.size)))
    return numbers
