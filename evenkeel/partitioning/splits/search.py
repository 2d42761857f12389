"""Partition in which samples that outweigh a rank's share are split into consecutive spans on several ranks.

Causal attention over such a sample needs the keys and values of earlier spans on the ranks of later ones. What sending
them takes has a price, in units of cost, and a sample is split only where that gains more than it takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.api import partition
from evenkeel.partitioning.problem import PartitionError
from evenkeel.partitioning.rounds import RoundOptions, RoundPlan, RoundSamples
from evenkeel.partitioning.splits.cutting import (
    Machine,
    Pieces,
    divide,
    measure,
    pieces_at,
    place_pieces,
    recut,
    table_of,
)
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
HELD = 1 + 1e-9  # times a memory cap, for rounding

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitPartition:
    """Which rank trains which positions of which samples of a batch. A sample that is whole is one part.

    Attributes:
        samples: (m,) int64, the sample of each part, ascending; parts of a sample in the order of positions.
        begins: (m,) int64, first position; 0 of a sample that is whole.
        ends: (m,) int64, the one after the last; 0 of a sample that is whole.
        ranks: (m,) int32, the rank that trains it; a rank has one part of a sample at most.
        shares: (m,) float64, of the sample's positions that the part has.
        loads: (num_ranks,) float64, summed cost of each rank.
        exchange: (num_ranks,) float64, what its keys and values take: the more of what it sends and what it receives,
            and what it passes on.
        within: Positions whose keys and values go to another rank of the same node, counted for each rank.
        between: Positions whose keys and values go to another node, counted for each node.
        time: Largest sum of load over speed and exchange, and what splitting takes in any step.
        heaviest: A bound of whole samples: an even division, or the heaviest of them on the fastest rank.
    """

    samples: Integers
    begins: Integers
    ends: Integers
    ranks: NDArray[np.int32]
    shares: Floats
    loads: Floats
    exchange: Floats
    within: int
    between: int
    time: float
    heaviest: float

    @classmethod
    def of_whole(cls, plan: RoundPlan) -> SplitPartition:
        """A batch of which no sample is split."""
        n, num_ranks, (figures,) = plan.destinations.size, plan.loads_after.shape[1], plan.batches
        none = np.zeros(n, np.int64)
        return cls(
            samples=np.arange(n), begins=none, ends=none, ranks=plan.destinations, shares=np.ones(n),
            loads=plan.loads_after[0], exchange=np.zeros(num_ranks), within=0, between=0, time=figures.max_load_after,
            heaviest=figures.lower_bound,
        )  # fmt: skip


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


def split_batch(
    samples: RoundSamples, options: RoundOptions, whole: RoundPlan | PartitionError
) -> SplitPartition | None:
    """Splits samples of a batch where that takes less time than the best assignment of whole ones."""
    assert samples.divisible is not None
    if samples.num_ranks < 2 or not len(samples.divisible) or not wants_splits(whole, options):
        return None
    search = _Search(samples, options)
    time = math.inf if isinstance(whole, PartitionError) else whole.batches[0].max_load_after
    best = search.best(time)
    return None if best is None else search.result(best)


class _Plan(NamedTuple):
    """Ranks of whole samples, and samples in pieces, with the largest time of a rank, and how pieces were chosen."""

    whole: Integers
    whole_ranks: Integers
    split: Integers
    pieces: Pieces
    time: float
    level: float
    full: float


class _Search:
    """Plans for more and more samples in pieces, each by one partition of whole samples and pieces."""

    def __init__(self, samples: RoundSamples, options: RoundOptions) -> None:
        assert options.split is not None
        assert samples.divisible is not None
        num_ranks = samples.num_ranks
        self._samples, self._options, self._num_ranks = samples, options, num_ranks
        self._costs, self._homes, self._sizes = samples.costs.astype(np.float64), samples.homes, samples.moving_sizes
        self._divisible = Divisible.of_table(samples.divisible)
        self._spans = self._divisible.spans
        self._fixed = options.split.fixed
        self._speeds = np.array(options.speeds, np.float64) if options.speeds else np.ones(num_ranks)
        nodes = np.zeros(num_ranks, np.int64) if samples.nodes is None else samples.nodes
        _, numbers, sizes = np.unique(nodes, return_inverse=True, return_counts=True)
        self._num_nodes, self._largest_node = sizes.size, int(sizes.max())
        within, between = float(options.split.within), float(options.split.between)
        self._machine = Machine(self._speeds, numbers, within, between)
        # sums in a fixed order, since those of arrays may depend on the machine
        total = sum(np.bincount(self._homes, self._costs, num_ranks).tolist())
        self._even = float(total) / float(sum(self._speeds.tolist()))
        self._caps = np.array(options.memory_caps or [math.inf] * num_ranks, np.float64)
        capped = bool(options.memory_caps) and samples.memory is not None
        self._memory = samples.memory if capped and samples.memory is not None else np.zeros(self._costs.size)
        self._own = self._costs[self._divisible.samples]  # costs of those that may be split
        self._table, self._mean_speed = table_of(self._spans), float(sum(self._speeds.tolist())) / num_ranks
        self._price = (within if self._largest_node > 1 else between) * self._mean_speed
        self._fewest, self._pieces = cache(self._find_fewest), cache(self._find_pieces)

    def best(self, time: float) -> _Plan | None:
        """The plan with samples in pieces that takes the least time; None if none takes less than whole samples do."""
        count = len(self._divisible)
        too_large = self._memory[self._divisible.samples] > float(self._caps.max())
        heavy = too_large | (self._own > self._even * float(self._speeds.max()))
        order = np.lexsort((np.arange(count), -self._own, ~too_large, ~heavy))
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
        careful = self._attempt(best.split, np.diff(best.pieces.firsts), best.level, best.full, self._options.strategy)
        return careful if careful is not None and careful.time <= min(SLACK * best.time, enough) else best

    def _refined(self, best: _Plan) -> _Plan:
        """The best plan, or a better one with more or fewer pieces of single samples, the heaviest first."""
        tries, improved = TRIES, True
        while improved and tries > 0:
            improved = False
            for place in np.argsort(-self._own[best.split], kind="stable").tolist():
                for change in (1, -1):
                    counts = np.diff(best.pieces.firsts)
                    counts[place] += change
                    most = min(int(self._spans.num_cuts[best.split[place]]) + 1, self._num_ranks)
                    if not 2 <= counts[place] <= most or tries <= 0:
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
            held = self._memory[self._divisible.samples[split]] / (min(level, 1.0) * float(self._caps.max()))
            wanted = np.maximum(wanted, np.ceil(np.minimum(held, self._num_ranks)))
        return tuple(np.clip(wanted, 2, most).astype(np.int64).tolist())

    def _find_fewest(self, sample: int, level: float) -> int:
        room = np.empty((2, self._num_ranks))
        work = level * self._even * self._mean_speed
        return pieces_at(self._table, sample, work, self._price, self._num_ranks, *room)

    def _find_pieces(self, sample: int, level: float, count: int) -> Floats:
        """(2, count) what the pieces of a sample take and cost, first to last."""
        found = np.empty((2, count))
        divide(self._table, sample, level * self._even * self._mean_speed, self._price, *found)
        found[0] /= self._mean_speed
        return found

    def _attempt(self, split: Integers, counts: Integers, level: float, full: float, strategy: str) -> _Plan | None:
        """Places pieces first, whole samples in the room that they leave, and cuts by work or by room for memory."""
        samples = self._divisible.samples[split]
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
        base = np.bincount(whole_ranks, self._costs[whole], self._num_ranks).astype(np.float64)
        pieces = Pieces(self._table[split], firsts, placed, begins, ends)
        plan = _Plan(
            whole, whole_ranks, split, pieces, recut(base, pieces, self._machine, costs, PASSES), level, full
        )  # fmt: skip
        if not self._has_enough(plan):
            return None
        if not self._fits(plan):
            self._cut_by_memory(plan)
            loads, exchange, _, _ = self._measured(plan)
            plan = plan._replace(time=float((loads / self._speeds + exchange).max()))
        return plan if self._fits(plan) else None

    def _around(self, whole: Integers, placed: Integers, costs: Floats, memory: Floats, strategy: str) -> Integers:
        """Ranks of the whole samples, where pieces that cost so much are placed already: as if these were slower."""
        held, options = np.bincount(placed, costs, self._num_ranks), self._options
        level = _filled(held / self._speeds, self._speeds, float(sum(self._costs[whole].tolist())))
        room = np.maximum(level * self._speeds - held, LEAST * self._even)
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
            own, row, order = ranks[first:last], self._table[plan.split[number]], np.arange(last - first - 1)
            share = np.cumsum(np.maximum(room[own], np.finfo(np.float64).tiny))
            places = np.rint((share[:-1] / share[-1] * row[0] - row[8]) / row[9])
            places = np.maximum.accumulate(np.maximum(places, 0) - order) + order  # no two the same
            places = np.minimum(places, row[10] - order.size + order)
            begins[first + 1 : last] = ends[first : last - 1] = row[8] + places * row[9]
            each = self._memory[self._divisible.samples[plan.split[number]]] / row[0]
            room[own] -= (ends[first:last] - begins[first:last]) * each

    def _measured(self, plan: _Plan) -> tuple[Floats, Floats, int, int]:
        base = np.bincount(plan.whole_ranks, self._costs[plan.whole], self._num_ranks).astype(np.float64)
        return measure(base, plan.pieces, self._machine)

    def _shares(self, plan: _Plan) -> tuple[Integers, Floats]:
        """(pieces,) the sample of each piece, and the share of its positions that the piece has."""
        _, firsts, _, begins, ends = plan.pieces
        numbers = np.repeat(plan.split, np.diff(firsts))
        return self._divisible.samples[numbers], (ends - begins) / self._spans.positions[numbers]

    def _has_enough(self, plan: _Plan) -> bool:
        fewest = self._options.min_samples
        if not fewest or self._costs.size < fewest * self._num_ranks:
            return True
        counts = np.bincount(np.concatenate([plan.whole_ranks, plan.pieces.ranks]), minlength=self._num_ranks)
        return int(counts.min()) >= fewest

    def _fits(self, plan: _Plan) -> bool:
        samples, shares = self._shares(plan)
        held = np.bincount(plan.whole_ranks, self._memory[plan.whole], self._num_ranks)
        held = held + np.bincount(plan.pieces.ranks, self._memory[samples] * shares, self._num_ranks)
        return bool((held <= self._caps * HELD).all())

    def result(self, plan: _Plan) -> SplitPartition:
        """The plan, part by part."""
        loads, exchange, within, between = self._measured(plan)
        of_pieces, shares = self._shares(plan)
        samples, none = np.concatenate([plan.whole, of_pieces]), np.zeros(plan.whole.size, np.int64)
        begins, ends = np.concatenate([none, plan.pieces.begins]), np.concatenate([none, plan.pieces.ends])
        order = np.lexsort((begins, samples))
        return SplitPartition(
            samples=samples[order],
            begins=begins[order],
            ends=ends[order],
            ranks=np.concatenate([plan.whole_ranks, plan.pieces.ranks]).astype(np.int32)[order],
            shares=np.concatenate([np.ones(plan.whole.size), shares])[order],
            loads=loads,
            exchange=exchange,
            within=within,
            between=between,
            time=plan.time + self._fixed,
            heaviest=max(self._even, float(self._costs.max() / self._speeds.max())),
        )


def _filled(held: Floats, speeds: Floats, work: float) -> float:
    """The level to which work fills ranks that are busy for so long already."""
    order = np.argsort(held, kind="stable")
    ascending, fast = held[order], np.cumsum(speeds[order])
    needed = ascending * fast - np.cumsum(ascending * speeds[order])  # to fill all before a rank up to it
    last = int(np.searchsorted(needed, work, side="right")) - 1
    return float(ascending[last] + (work - needed[last]) / fast[last])
