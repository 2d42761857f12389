"""Split samples as a stage of a round: each of its batches by itself, then the parts of all of them in order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.problem import PartitionError, PartitionNotFoundError
from evenkeel.partitioning.rounds import Figures, RoundOptions, RoundPlan, RoundSamples, partition_batches
from evenkeel.partitioning.splits.parts import PIECE_WIDTH, RoundParts
from evenkeel.partitioning.splits.samples import Divisible
from evenkeel.partitioning.splits.search import SplitPartition, split_batch, wants_splits

Integers = NDArray[np.int64]


def split_heavy(
    samples: RoundSamples, options: RoundOptions, found: RoundPlan | PartitionError
) -> RoundPlan | PartitionError:
    """The stage: a plan with samples in parts, in the batches in which that takes less time."""
    if not wants_splits(found, options):
        return found
    steps = samples.steps if isinstance(found, PartitionError) else found.steps
    batches: list[tuple[Integers, RoundSamples, RoundPlan | PartitionError, SplitPartition]] = []
    for batch in range(samples.num_batches):
        own = np.arange(len(samples.costs)) if steps is None else np.flatnonzero(steps == batch)
        one = _only(samples, own)
        whole = partition_batches(one, options) if isinstance(found, PartitionError) else _of_batch(found, batch, own)
        split = split_batch(one, options, whole)
        if split is None:
            if isinstance(whole, PartitionError):
                return _not_in_parts_either(whole, one, options)
            split = SplitPartition.of_whole(whole)
        batches.append((own, one, whole, split))
    if not isinstance(found, PartitionError) and not any(split.ends.any() for *_, split in batches):
        return found
    parts = [(own[split.samples], split.begins, split.ends, split.ranks) for own, _, _, split in batches]
    of, begins, ends, ranks = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.lexsort((begins, of))
    of, begins, ends, ranks = of[order], begins[order], ends[order], ranks[order]
    steps_of = None if steps is None else np.ascontiguousarray(steps[of])
    loads_before = samples.home_loads
    return RoundPlan(
        destinations=np.ascontiguousarray(ranks, np.int32),
        steps=steps_of,
        parts=_round_parts(samples, of, begins, ends, ranks, steps_of),
        loads_before=loads_before,
        loads_after=np.array([split.loads for *_, split in batches], np.float64),
        batches=tuple(
            _figures(one, options, before, whole, split)
            for (_, one, whole, split), before in zip(batches, loads_before, strict=True)
        ),
    )


def _only(samples: RoundSamples, own: Integers) -> RoundSamples:
    """Some samples of a round, ascending, as a round of one batch."""
    assert samples.divisible is not None
    which = samples.divisible[:, 0].astype(np.int64)
    inside = np.isin(which, own)
    divisible = samples.divisible[inside]
    divisible[:, 0] = np.searchsorted(own, which[inside])
    return replace(
        samples,
        batch_sizes=np.bincount(samples.homes[own], minlength=samples.num_ranks)[:, None],
        costs=samples.costs[own],
        lengths=samples.lengths[own],
        sizes=samples.moving_sizes[own],
        memory=None if samples.memory is None else samples.memory[own],
        divisible=divisible,
    )


def _of_batch(plan: RoundPlan, batch: int, own: Integers) -> RoundPlan:
    return replace(
        plan,
        destinations=plan.destinations[own],
        steps=None,
        loads_before=plan.loads_before[[batch]],
        loads_after=plan.loads_after[[batch]],
        batches=(plan.batches[batch],),
    )


def _not_in_parts_either(error: PartitionError, one: RoundSamples, options: RoundOptions) -> PartitionError:
    """Why neither whole samples nor parts of them keep within the memory caps."""
    assert one.divisible is not None
    if not len(one.divisible) or one.memory is None or float(np.sum(one.memory)) > float(np.sum(options.memory_caps)):
        return error
    why = str(error).partition("; ")[0]  # without what would help whole samples
    return PartitionNotFoundError(
        f"{why}; with samples split over ranks no assignment was found either; raise memory_caps, let counts be 'free',"
        " or take fewer or shorter samples"
    )


def _round_parts(
    samples: RoundSamples,
    of: Integers,
    begins: Integers,
    ends: Integers,
    ranks: NDArray[np.int32],
    steps: NDArray[np.int32] | None,
) -> RoundParts:
    """What ranks need to cut their samples, and attention to join them."""
    assert samples.divisible is not None
    divisible = Divisible.of_table(samples.divisible)
    places = np.minimum(np.searchsorted(divisible.samples, of), len(divisible) - 1)
    counted = (begins - divisible.first_items[places]) / divisible.spans.granule[places]
    items: Integers = np.where(begins > 0, np.rint(counted), 0).astype(np.int64)
    batch_of = np.zeros(of.size, np.int64) if steps is None else steps.astype(np.int64)
    split = np.flatnonzero(ends > 0)
    table = np.empty((split.size, PIECE_WIDTH), np.int64)
    table[:, 0], table[:, 1] = batch_of[split], of[split]
    table[:, 2] = divisible.spans.context[places[split]]
    table[:, 3] = divisible.spans.candidates[places[split]]
    table[:, 4], table[:, 5] = ranks[split], _arrivals(batch_of * samples.num_ranks + ranks)[split]
    table[:, 6], table[:, 7] = begins[split], ends[split]
    home_begin = np.concatenate([[0], np.cumsum(samples.counts_at_home)])
    return RoundParts(
        samples=of - home_begin[samples.homes[of]],
        begins=items,
        pieces=table[np.lexsort((table[:, 6], table[:, 1], table[:, 0]))],
    )


def _arrivals(places: Integers) -> Integers:
    """(m,) how many earlier parts go to the same place: parts arrive by home, then in home order."""
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    firsts = np.flatnonzero(np.diff(ordered, prepend=-1))
    numbers = np.empty(places.size, np.int64)
    numbers[order] = np.arange(places.size) - np.repeat(firsts, np.diff(np.append(firsts, places.size)))
    return numbers


def _figures(
    one: RoundSamples,
    options: RoundOptions,
    before: NDArray[np.float64],
    whole: RoundPlan | PartitionError,
    split: SplitPartition,
) -> Figures:
    speeds = np.array(options.speeds) if options.speeds else None
    known = None if isinstance(whole, PartitionError) else whole.batches[0]
    sizes, homes = one.moving_sizes[split.samples] * split.shares, one.homes[split.samples]
    nodes = np.zeros(one.num_ranks, np.int32) if one.nodes is None else one.nodes
    moves, is_piece = split.ranks != homes, split.ends > 0
    return Figures.of(
        before,
        split.loads,
        speeds,
        split.time,
        lower_bound=split.heaviest if known is None else known.lower_bound,
        samples=len(one.costs),
        moved_samples=int(np.count_nonzero(moves)),
        size=int(one.moving_sizes.sum()),
        moved_size=round(float(sizes[moves].sum())),
        moved_size_between_nodes=round(float(sizes[nodes[split.ranks] != nodes[homes]].sum())),
        split_samples=int(np.count_nonzero(is_piece & (split.begins == 0))),
        pieces=int(np.count_nonzero(is_piece)),
        exchanged=split.within + split.between,
        exchanged_between_nodes=split.between,
        max_load_whole=0.0 if known is None or not is_piece.any() else known.max_load_after,
    )
