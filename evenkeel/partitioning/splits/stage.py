"""The stage of a round that splits samples which outweigh a rank's share into consecutive spans on several ranks.

Causal attention over such a sample needs the keys and values of earlier spans on the ranks of later ones. What sending
them takes has a price, in units of cost, and a sample is split only where that gains more than it takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenkeel.partitioning.api import partition
from evenkeel.partitioning.problem import Floats, Integers, PartitionError, PartitionNotFoundError
from evenkeel.partitioning.rounds import Figures, RoundOptions, RoundPlan, RoundSamples, partition_batches
from evenkeel.partitioning.splits.cutting import (
    Machine,
    Pieces,
    divide,
    filled,
    measure,
    pieces_at,
    place_pieces,
    recut,
    table_of,
)
from evenkeel.partitioning.splits.parts import PIECE_WIDTH, RoundParts
from evenkeel.partitioning.splits.samples import Divisible

# Times of ranks, over an even division, at which samples have as few pieces as may be: the lower, the more pieces.
LEVELS = (1.0, 1.04, 1.08, 1.13, 1.2, 1.35, 0.7)
# Beside the samples that are too heavy, so many of the next heaviest are split as well where that helps.
MORE = (0, 1, 2, 4, 8, 16, 32, 64)
NEAR = 1.005  # times an even division, where the search ends
BETTER = 0.998  # a plan with more samples in pieces must be shorter by that
FUTILE = 2  # numbers of samples in pieces, one after the other, that were not: there the search ends too
PASSES = 4  # over the split samples, while their cuts move to where the ranks have room
LEAST = 0.01  # of an even division, the room for whole samples on a rank that pieces fill
QUICK = "lpt"  # how whole samples are placed around pieces while plans are compared
TRIES = 48  # plans that are tried with one piece more or less of a sample than the best has
SLACK = 1.01  # times the best plan's, what one may take that is like it and moves fewer samples
TOLERANCE = 5e-3  # of the whole samples' partition, since pieces even out the rest
FULL = 0.4  # of a piece, the room on a rank below which the piece had better go to another node
ROUNDING = 1 + 1e-9  # times a memory cap

PART = np.dtype([("sample", np.int64), ("begin", np.int64), ("end", np.int64), ("rank", np.int32), ("share", float)])
"""Part of a sample: positions from `begin` to before `end`, both 0 if it is whole; its rank; its share of positions."""


class BatchParts(NamedTuple):
    """A batch of which samples may be in parts.

    Attributes:
        parts: (m,) of `PART`; a rank has one part of a sample at most.
        loads: (num_ranks,) float64, summed cost of each rank.
        figures: How even it is, with what the exchange of keys and values takes.
    """

    parts: NDArray[Any]
    loads: Floats
    figures: Figures


def split_heavy(
    samples: RoundSamples, options: RoundOptions, found: RoundPlan | PartitionError
) -> RoundPlan | PartitionError:
    """The stage: a plan with samples in parts, in the batches in which that takes less time."""
    if not wants_splits(found, options):
        return found
    steps = samples.steps if isinstance(found, PartitionError) else found.steps
    batches = []
    for batch in range(samples.num_batches):
        own = np.arange(len(samples)) if steps is None else np.flatnonzero(steps == batch)
        one = _only(samples, own)
        whole = partition_batches(one, options) if isinstance(found, PartitionError) else _of_batch(found, batch, own)
        planned = split_batch(one, options, whole)
        if planned is None:
            if isinstance(whole, PartitionError):
                return _not_in_parts_either(whole, one, options)
            parts = _parts(np.arange(own.size), whole.destinations)
            planned = BatchParts(parts, whole.loads_after[0], whole.batches[0])
        planned.parts["sample"] = own[planned.parts["sample"]]
        batches.append(planned)
    parts = np.concatenate([each.parts for each in batches])
    if not isinstance(found, PartitionError) and not parts["end"].any():
        return found
    parts = parts[np.lexsort((parts["begin"], parts["sample"]))]
    steps = None if steps is None else steps[parts["sample"]]
    return RoundPlan(
        destinations=parts["rank"].copy(),
        steps=steps,
        parts=_round_parts(samples, parts, steps),
        loads_before=samples.home_loads,
        loads_after=np.array([each.loads for each in batches], np.float64),
        batches=tuple(each.figures for each in batches),
    )


def wants_splits(found: RoundPlan | PartitionError, options: RoundOptions) -> bool:
    """Whether whole samples of some batch are too far from an even division, or fit no rank."""
    if isinstance(found, PartitionError):
        return True
    assert options.split is not None
    speed = float(sum(options.speeds)) if options.speeds else float(found.loads_after.shape[1])
    return any(
        figures.lower_bound * speed > (1 + options.split.above) * float(sum(loads.tolist()))
        for figures, loads in zip(found.batches, found.loads_after, strict=True)
    )


def split_batch(samples: RoundSamples, options: RoundOptions, whole: RoundPlan | PartitionError) -> BatchParts | None:
    """Splits samples of a batch where that takes less time than the best assignment of whole ones."""
    assert samples.divisible is not None
    if samples.num_ranks < 2 or not len(samples.divisible) or not wants_splits(whole, options):
        return None
    search = _Search(samples, options)
    best = search.best(math.inf if isinstance(whole, PartitionError) else whole.batches[0].max_load_after)
    return None if best is None else search.result(best, whole)


def _only(samples: RoundSamples, own: Integers) -> RoundSamples:
    """Some samples of a round, ascending, as a round of one batch."""
    assert samples.divisible is not None
    which = samples.divisible[:, 0].astype(np.int64)
    divisible = samples.divisible[np.isin(which, own)]
    divisible[:, 0] = np.searchsorted(own, divisible[:, 0])
    return replace(
        samples,
        batch_sizes=np.bincount(samples.homes[own], minlength=samples.num_ranks)[:, None],
        costs=samples.costs[own],
        lengths=samples.lengths[own],
        sizes=samples.moving_sizes[own],
        memory=None if samples.memory is None else samples.memory[own],
        users=None,
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


def _parts(
    samples: Integers, ranks: NDArray[Any], begins: ArrayLike = 0, ends: ArrayLike = 0, shares: ArrayLike = 1.0
) -> NDArray[Any]:
    parts = np.empty(samples.size, PART)
    for name, values in zip(PART.names or (), (samples, begins, ends, ranks, shares), strict=True):
        parts[name] = values
    return parts


def _round_parts(samples: RoundSamples, parts: NDArray[Any], steps: NDArray[np.int32] | None) -> RoundParts:
    """What ranks need to cut their samples, and attention to join them."""
    assert samples.divisible is not None
    divisible = Divisible.of_table(samples.divisible)
    of, begins, ranks = parts["sample"], parts["begin"], parts["rank"]
    entries = np.minimum(np.searchsorted(divisible.samples, of), len(divisible) - 1)
    counted = (begins - divisible.first_items[entries]) / divisible.spans.granule[entries]
    items: Integers = np.where(begins > 0, np.rint(counted), 0).astype(np.int64)
    batch_of = np.zeros(of.size, np.int64) if steps is None else steps.astype(np.int64)
    split = np.flatnonzero(parts["end"] > 0)
    table = np.empty((split.size, PIECE_WIDTH), np.int64)
    table[:, 0], table[:, 1] = batch_of[split], of[split]
    table[:, 2] = divisible.spans.context[entries[split]]
    table[:, 3] = divisible.spans.candidates[entries[split]]
    table[:, 4], table[:, 5] = ranks[split], _arrivals(batch_of * samples.num_ranks + ranks)[split]
    table[:, 6], table[:, 7] = begins[split], parts["end"][split]
    home_begin = np.concatenate([[0], np.cumsum(samples.counts_at_home)])
    return RoundParts(
        samples=of - home_begin[samples.homes[of]],
        begins=items,
        pieces=table[np.lexsort((table[:, 6], table[:, 1], table[:, 0]))],
    )


def _arrivals(targets: Integers) -> Integers:
    """(m,) how many earlier parts have the same target: parts arrive by home, then in home order."""
    order = np.argsort(targets, kind="stable")
    firsts = np.flatnonzero(np.diff(targets[order], prepend=-1))
    numbers = np.empty(targets.size, np.int64)
    numbers[order] = np.arange(targets.size) - np.repeat(firsts, np.diff(np.append(firsts, targets.size)))
    return numbers


class _Plan(NamedTuple):
    """Ranks of whole samples, and samples in pieces, with the largest time of a rank, and how pieces were chosen."""

    whole: Integers
    whole_ranks: Integers
    split: Integers
    pieces: Pieces
    time: float
    level: float
    full: float

    @property
    def counts(self) -> Integers:
        """(split,) pieces of each split sample."""
        return np.diff(self.pieces.firsts)


class _Search:
    """Plans for more and more samples in pieces, each by one partition of whole samples and pieces."""

    def __init__(self, samples: RoundSamples, options: RoundOptions) -> None:
        assert options.split is not None
        assert samples.divisible is not None
        num_ranks = samples.num_ranks
        self._samples, self._options, self._num_ranks = samples, options, num_ranks
        self._costs, self._homes, self._sizes = samples.costs.astype(np.float64), samples.homes, samples.moving_sizes
        divisible = Divisible.of_table(samples.divisible)
        self._divisible, self._spans, self._table = divisible.samples, divisible.spans, table_of(divisible.spans)
        self._own = self._costs[self._divisible]  # costs of those that may be split
        self._fixed = options.split.fixed
        self._speeds = np.array(options.speeds, np.float64) if options.speeds else np.ones(num_ranks)
        nodes = np.zeros(num_ranks, np.int64) if samples.nodes is None else samples.nodes
        _, numbers, sizes = np.unique(nodes, return_inverse=True, return_counts=True)
        self._num_nodes, self._largest_node = sizes.size, int(sizes.max())
        within, between = float(options.split.within), float(options.split.between)
        self._machine = Machine(self._speeds, numbers, within, between)
        # sums in a fixed order, since those of arrays may depend on the machine
        speed = float(sum(self._speeds.tolist()))
        self._even = float(sum(np.bincount(self._homes, self._costs, num_ranks).tolist())) / speed
        self._mean_speed = speed / num_ranks
        self._price = (within if self._largest_node > 1 else between) * self._mean_speed
        self._caps = np.array(options.memory_caps or [math.inf] * num_ranks, np.float64)
        capped = bool(options.memory_caps) and samples.memory is not None
        self._memory = samples.memory if capped and samples.memory is not None else np.zeros(self._costs.size)
        self._fewest, self._pieces = cache(self._find_fewest), cache(self._find_pieces)

    def best(self, time: float) -> _Plan | None:
        """The plan with samples in pieces that takes the least time; None if none takes less than whole samples do."""
        too_large = self._memory[self._divisible] > float(self._caps.max())
        heavy = too_large | (self._own > self._even * float(self._speeds.max()))
        order = np.lexsort((np.arange(self._own.size), -self._own, ~too_large, ~heavy))
        order = order[self._spans.num_cuts[order] > 0]
        least, futile, best = max(int(np.count_nonzero(heavy[order])), 1), 0, None
        time = enough = BETTER * time - self._fixed  # what a plan may take beside
        for more in MORE:
            found_none = futile >= FUTILE and time < math.inf
            if least + more > order.size or found_none or time <= BETTER * NEAR * self._even:
                break
            futile += 1
            for found in self._with_split(np.sort(order[: least + more])):
                if found.time < time:
                    best, time, futile = found, BETTER * found.time, 0
        if best is None:
            return None
        best = self._refined(best)
        # what was asked for leaves most samples where they are, and often has less to do for the slowest rank too
        careful = self._attempt(best.split, best.counts, best.level, best.full, self._options.strategy)
        return careful if careful is not None and careful.time <= min(SLACK * best.time, enough) else best

    def _refined(self, best: _Plan) -> _Plan:
        """The best plan, or a better one with more or fewer pieces of single samples, the heaviest first."""
        tries, improved = TRIES, True
        while improved and tries > 0:
            improved = False
            for sample in np.argsort(-self._own[best.split], kind="stable").tolist():
                for change in (1, -1):
                    counts = best.counts
                    counts[sample] += change
                    most = min(int(self._spans.num_cuts[best.split[sample]]) + 1, self._num_ranks)
                    if not 2 <= counts[sample] <= most or tries <= 0:
                        continue
                    tries -= 1
                    found = self._attempt(best.split, counts, best.level, best.full, QUICK)
                    if found is not None and found.time < best.time * (1 - 1e-3):
                        best, improved = found, True
                        break
        return best

    def _with_split(self, split: Integers) -> Iterator[_Plan]:
        """Plans in which these samples, numbers among those that may be split, are split."""
        tried = set()
        for level in LEVELS:
            wanted = self._counts(split, level)
            inside = tuple(min(count, self._largest_node) for count in wanted)
            # across nodes where one is full, and as few pieces as a node has ranks, in one where they can be
            for full, counts in ((FULL, wanted), (0.0, inside)) if self._num_nodes > 1 else ((0.0, wanted),):
                if (full, level, counts) in tried or min(counts) < 2:
                    continue
                tried.add((full, level, counts))
                found = self._attempt(split, np.array(counts), level, full, QUICK)
                if found is not None:
                    yield found

    def _counts(self, split: Integers, level: float) -> tuple[int, ...]:
        """The fewest pieces of each at a level, as many as there may be where it takes more."""
        most = np.minimum(self._spans.num_cuts[split] + 1, self._num_ranks)
        wanted = np.array([self._fewest(sample, level) for sample in split.tolist()])
        if 0 < float(self._caps.max()) < math.inf:
            of_cap = self._memory[self._divisible[split]] / (min(level, 1.0) * float(self._caps.max()))
            wanted = np.maximum(wanted, np.ceil(np.minimum(of_cap, self._num_ranks)))
        return tuple(np.clip(wanted, 2, most).astype(np.int64).tolist())

    def _find_fewest(self, sample: int, level: float) -> int:
        work = level * self._even * self._mean_speed
        return pieces_at(self._table, sample, work, self._price, self._num_ranks, *np.empty((2, self._num_ranks)))

    def _find_pieces(self, sample: int, level: float, count: int) -> Floats:
        """(2, count) what the pieces of a sample take and cost, first to last."""
        found = np.empty((2, count))
        divide(self._table, sample, level * self._even * self._mean_speed, self._price, *found)
        found[0] /= self._mean_speed
        return found

    def _attempt(self, split: Integers, counts: Integers, level: float, full: float, strategy: str) -> _Plan | None:
        """Places pieces first, whole samples in the room that they leave, and cuts by work or by room for memory."""
        samples = self._divisible[split]
        is_whole = np.ones(self._costs.size, np.bool_)
        is_whole[samples] = False
        whole, firsts = np.flatnonzero(is_whole), np.concatenate([[0], np.cumsum(counts)])
        each = zip(split.tolist(), counts.tolist(), strict=True)
        times, costs = np.concatenate([self._pieces(sample, level, count) for sample, count in each], axis=1)
        placed = place_pieces(
            np.argsort(-self._own[split], kind="stable"), self._homes[samples].astype(np.int64), firsts, times,
            self._machine, self._even * self._speeds, full,
        )  # fmt: skip
        memory = np.repeat(self._memory[samples] / counts, counts)
        try:
            whole_ranks = self._around(whole, placed, times * self._speeds[placed], memory, strategy)
        except PartitionError:
            return None
        begins, ends = np.zeros(placed.size, np.int64), np.zeros(placed.size, np.int64)
        ends[firsts[1:] - 1] = self._spans.positions[split]
        pieces = Pieces(self._table[split], firsts, placed, begins, ends)
        plan = _Plan(whole, whole_ranks, split, pieces, math.inf, level, full)
        plan = plan._replace(time=recut(self._base(plan), pieces, self._machine, costs, PASSES))
        if not self._has_enough(plan):
            return None
        if not self._fits(plan):
            self._cut_by_memory(plan)
            loads, exchange, _, _ = measure(self._base(plan), pieces, self._machine)
            plan = plan._replace(time=float((loads / self._speeds + exchange).max()))
        return plan if self._fits(plan) else None

    def _around(self, whole: Integers, placed: Integers, costs: Floats, memory: Floats, strategy: str) -> Integers:
        """Ranks of the whole samples, where pieces that cost so much are placed already: as if these were slower."""
        busy, options = np.bincount(placed, costs, self._num_ranks), self._options
        level = filled(busy / self._speeds, self._speeds, float(sum(self._costs[whole].tolist())))
        room = np.maximum(level * self._speeds - busy, LEAST * self._even)
        caps = np.maximum(self._caps - np.bincount(placed, memory, self._num_ranks), 0.0)
        found = partition(
            self._costs[whole],
            self._homes[whole],
            self._num_ranks,
            strategy=strategy,
            sizes=self._sizes[whole],
            counts=options.counts,
            tolerance=max(options.tolerance, TOLERANCE),
            move_price=options.move_price,
            speeds=np.clip(room / max(float(room.max()), np.finfo(np.float64).tiny), 1e-6, 1.0),
            memory=self._memory[whole] if options.memory_caps else None,
            memory_caps=caps if options.memory_caps else None,
            nodes=self._samples.nodes,
            min_samples=options.min_samples,
        )
        return found.destinations.astype(np.int64)

    def _cut_by_memory(self, plan: _Plan) -> None:
        room = self._caps - np.bincount(plan.whole_ranks, self._memory[plan.whole], self._num_ranks)
        _, firsts, ranks, begins, ends = plan.pieces
        for number, (first, last) in enumerate(pairwise(firsts.tolist())):
            own, span, order = ranks[first:last], self._table[plan.split[number]], np.arange(last - first - 1)
            share = np.cumsum(np.maximum(room[own], np.finfo(np.float64).tiny))
            cuts = np.rint((share[:-1] / share[-1] * span["positions"] - span["first_cut"]) / span["granule"])
            cuts = np.maximum.accumulate(np.maximum(cuts, 0) - order) + order  # no two the same
            cuts = np.minimum(cuts, span["num_cuts"] - order.size + order)
            begins[first + 1 : last] = ends[first : last - 1] = span["first_cut"] + cuts * span["granule"]
            each = self._memory[self._divisible[plan.split[number]]] / span["positions"]
            room[own] -= (ends[first:last] - begins[first:last]) * each

    def _base(self, plan: _Plan) -> Floats:
        """(num_ranks,) load of the whole samples."""
        return np.bincount(plan.whole_ranks, self._costs[plan.whole], self._num_ranks).astype(np.float64)

    def _parts(self, plan: _Plan) -> NDArray[Any]:
        """(m,) of `PART`, the whole samples and all pieces."""
        _, firsts, ranks, begins, ends = plan.pieces
        numbers = np.repeat(plan.split, np.diff(firsts))
        shares = (ends - begins) / self._spans.positions[numbers]
        pieces = _parts(self._divisible[numbers], ranks, begins, ends, shares)
        return np.concatenate([_parts(plan.whole, plan.whole_ranks), pieces])

    def _has_enough(self, plan: _Plan) -> bool:
        fewest = self._options.min_samples
        if not fewest or self._costs.size < fewest * self._num_ranks:
            return True
        return int(np.bincount(self._parts(plan)["rank"], minlength=self._num_ranks).min()) >= fewest

    def _fits(self, plan: _Plan) -> bool:
        if not self._options.memory_caps:
            return True
        parts = self._parts(plan)
        used = np.bincount(parts["rank"], self._memory[parts["sample"]] * parts["share"], self._num_ranks)
        return bool((used <= self._caps * ROUNDING).all())

    def result(self, plan: _Plan, whole: RoundPlan | PartitionError) -> BatchParts:
        """The plan, part by part, and its figures beside those of whole samples."""
        loads, _, near, far = measure(self._base(plan), plan.pieces, self._machine)
        parts, nodes, sizes = self._parts(plan), self._machine.nodes, self._sizes
        homes, sizes_of = self._homes[parts["sample"]], sizes[parts["sample"]] * parts["share"]
        moves, is_piece = parts["rank"] != homes, parts["end"] > 0
        known = None if isinstance(whole, PartitionError) else whole.batches[0]
        figures = Figures.of(
            self._samples.home_loads[0] if isinstance(whole, PartitionError) else whole.loads_before[0],
            loads,
            self._speeds if self._options.speeds else None,
            plan.time + self._fixed,
            lower_bound=max(self._even, float(self._costs.max() / self._speeds.max()))
            if known is None
            else known.lower_bound,
            samples=self._costs.size,
            moved_samples=int(np.count_nonzero(moves)),
            size=int(sizes.sum()),
            moved_size=round(float(sizes_of[moves].sum())),
            moved_size_between_nodes=round(float(sizes_of[nodes[parts["rank"]] != nodes[homes]].sum())),
            split_samples=plan.split.size,
            pieces=int(np.count_nonzero(is_piece)),
            exchanged=near + far,
            exchanged_between_nodes=far,
            max_load_whole=0.0 if known is None else known.max_load_after,
        )
        return BatchParts(parts, loads, figures)
