"""The refinement of a plan that splits samples which outweigh a rank's share into consecutive spans on several ranks.

Causal attention over such a sample needs the keys and values of earlier spans on the ranks of later ones. What sending
them takes has a price, in units of cost, and a sample is split only where that gains more than it takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from evenkeel.partitioning.api import partition
from evenkeel.partitioning.problem import (
    Floats,
    Integers,
    PartitionError,
    PartitionNotFoundError,
)
from evenkeel.partitioning.rounds import Figures, Found, RoundOptions, RoundPlan, RoundSamples, is_uneven
from evenkeel.partitioning.split_cuts import (
    Machine,
    Pieces,
    divide,
    filled,
    measure,
    pieces_at,
    place_pieces,
    recut,
)
from evenkeel.partitioning.splits import SPAN, spans_of

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


def split_heavy(samples: RoundSamples, options: RoundOptions, found: Found) -> Found:
    """The refinement: a plan with samples in parts where that takes less time than the best plan of whole ones."""
    assert samples.divisible is not None
    assert options.split is not None
    if not is_uneven(found, options, 1 + options.split.above):
        return found
    if samples.num_ranks > 1 and len(samples.divisible):
        search = _Search(samples, options)
        best = search.best(math.inf if isinstance(found, PartitionError) else found.figures.max_load_after)
        if best is not None:
            return search.result(best, found)
    return _not_in_parts_either(found, samples, options) if isinstance(found, PartitionError) else found


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


class _Plan(NamedTuple):
    """A batch in parts: whole samples, then the pieces of those that are split.

    Attributes:
        samples: (parts,) the sample of each part.
        ranks: (parts,) its rank.
        base: (num_ranks,) load of the whole samples.
        split: (split,) which samples are, of those that may be.
        pieces: Theirs.
        level: At which these were counted, of an even division.
        full: Share of a piece; where a rank had less room, the piece went to another node.
        time: The largest of a rank.
    """

    samples: Integers
    ranks: Integers
    base: Floats
    split: Integers
    pieces: Pieces
    level: float
    full: float
    time: float

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
        self._spans, self._divisible = spans_of(samples.divisible), samples.divisible[:, 0].astype(np.int64)
        self._table = np.ascontiguousarray(samples.divisible).view(SPAN)[:, 0]
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
        samples, firsts = self._divisible[split], np.concatenate([[0], np.cumsum(counts)])
        whole = np.delete(np.arange(self._costs.size), samples)
        each = zip(split.tolist(), counts.tolist(), strict=True)
        times, costs = np.concatenate([self._pieces(sample, level, count) for sample, count in each], axis=1)
        placed = place_pieces(
            np.argsort(-self._own[split], kind="stable"), self._homes[samples].astype(np.int64), firsts, times,
            self._machine, self._even * self._speeds, full,
        )  # fmt: skip
        try:
            whole_ranks = self._around(
                whole, placed, times * self._speeds[placed], np.repeat(self._memory[samples] / counts, counts), strategy
            )
        except PartitionError:
            return None
        begins, ends = np.zeros(placed.size, np.int64), np.zeros(placed.size, np.int64)
        ends[firsts[1:] - 1] = self._spans.positions[split]
        pieces = Pieces(self._table[split], firsts, placed, begins, ends)
        base = np.bincount(whole_ranks, self._costs[whole], self._num_ranks).astype(np.float64)
        time = recut(base, pieces, self._machine, costs, PASSES)
        plan = _Plan(
            np.concatenate([whole, np.repeat(samples, counts)]), np.concatenate([whole_ranks, placed]), base, split,
            pieces, level, full, time,
        )  # fmt: skip
        fewest = self._options.min_samples
        has_enough = int(np.bincount(plan.ranks, minlength=self._num_ranks).min()) >= fewest
        if not has_enough and self._costs.size >= fewest * self._num_ranks:
            return None
        if self._fits(plan):
            return plan
        self._cut_by_memory(plan)
        loads, exchange, _, _ = measure(base, pieces, self._machine)
        plan = plan._replace(time=float((loads / self._speeds + exchange).max()))
        return plan if self._fits(plan) else None

    def _around(self, whole: Integers, placed: Integers, costs: Floats, memory: Floats, strategy: str) -> Integers:
        """Ranks of the whole samples, where pieces that cost so much are placed already: as if these were slower."""
        busy, options = np.bincount(placed, costs, self._num_ranks), self._options
        level = filled(busy / self._speeds, self._speeds, float(sum(self._costs[whole].tolist())))
        room = np.maximum(level * self._speeds - busy, LEAST * self._even)
        caps = None
        if options.memory_caps:
            caps = np.maximum(self._caps - np.bincount(placed, memory, self._num_ranks), 0.0)
        part = partition(
            self._costs[whole],
            self._homes[whole],
            self._num_ranks,
            strategy=strategy,
            sizes=self._sizes[whole],
            counts=options.counts,
            tolerance=max(options.tolerance, TOLERANCE),
            move_price=options.move_price,
            speeds=np.clip(room / max(float(room.max()), np.finfo(np.float64).tiny), 1e-6, 1.0),
            memory=None if caps is None else self._memory[whole],
            memory_caps=caps,
            nodes=self._samples.nodes,
            min_samples=options.min_samples,
        )
        return part.destinations.astype(np.int64)

    def _cut_by_memory(self, plan: _Plan) -> None:
        _, firsts, ranks, begins, ends = plan.pieces
        num_whole = plan.samples.size - ranks.size
        used = self._memory[plan.samples[:num_whole]]
        room = self._caps - np.bincount(plan.ranks[:num_whole], used, self._num_ranks)
        for number, (first, last) in enumerate(pairwise(firsts.tolist())):
            own, span, order = ranks[first:last], self._spans.take(plan.split[number]), np.arange(last - first - 1)
            share = np.cumsum(np.maximum(room[own], np.finfo(np.float64).tiny))
            cuts = np.rint((share[:-1] / share[-1] * span.positions - span.first_cut) / span.granule)
            cuts = np.maximum.accumulate(np.maximum(cuts, 0) - order) + order  # no two the same
            cuts = np.minimum(cuts, span.num_cuts - order.size + order)
            begins[first + 1 : last] = ends[first : last - 1] = span.first_cut + cuts * span.granule
            each = self._memory[self._divisible[plan.split[number]]] / span.positions
            room[own] -= (ends[first:last] - begins[first:last]) * each

    def _shares(self, plan: _Plan) -> Floats:
        """(parts,) of the positions of its sample, what each part has."""
        _, _, ranks, begins, ends = plan.pieces
        whole = np.ones(plan.samples.size - ranks.size)
        return np.concatenate([whole, (ends - begins) / self._spans.positions[np.repeat(plan.split, plan.counts)]])

    def _fits(self, plan: _Plan) -> bool:
        if not self._options.memory_caps:
            return True
        used = np.bincount(plan.ranks, self._memory[plan.samples] * self._shares(plan), self._num_ranks)
        return bool((used <= self._caps * ROUNDING).all())

    def result(self, plan: _Plan, whole: Found) -> RoundPlan:
        """The batch, part by part, and its figures beside those of whole samples."""
        loads, _, near, far = measure(plan.base, plan.pieces, self._machine)
        homes, nodes, sizes = self._homes[plan.samples], self._machine.nodes, self._sizes
        moved = sizes[plan.samples] * self._shares(plan)
        known = None if isinstance(whole, PartitionError) else whole.figures
        before = self._samples.home_loads if isinstance(whole, PartitionError) else whole.loads_before
        figures = Figures.of(
            before[0],
            loads,
            self._speeds if self._options.speeds else None,
            plan.time + self._fixed,
            lower_bound=max(self._even, float(self._costs.max() / self._speeds.max()))
            if known is None
            else known.lower_bound,
            samples=self._costs.size,
            moved_samples=int(np.count_nonzero(plan.ranks != homes)),
            size=int(sizes.sum()),
            moved_size=round(float(moved[plan.ranks != homes].sum())),
            moved_size_between_nodes=round(float(moved[nodes[plan.ranks] != nodes[homes]].sum())),
            split_samples=plan.split.size,
            pieces=plan.pieces.ranks.size,
            exchanged=near + far,
            exchanged_between_nodes=far,
            max_load_whole=0.0 if known is None else known.max_load_after,
        )
        table, begins = np.repeat(self._table[plan.split], plan.counts), plan.pieces.begins
        items = np.zeros(plan.samples.size, np.int64)
        items[-begins.size :] = np.where(begins > 0, np.rint((begins - table["first_items"]) / table["granule"]), 0)
        order = np.lexsort((items, plan.samples))
        destinations = plan.ranks[order].astype(np.int32)
        return RoundPlan(
            destinations=destinations,
            steps=None,
            parts=self._samples.parts(items[order], destinations, None),
            loads_before=before,
            loads_after=loads[None],
            batches=(figures,),
        )
