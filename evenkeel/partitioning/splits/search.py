"""Partition in which samples that outweigh a rank's share are split into consecutive spans on several ranks.

Causal attention over such a sample needs the keys and values of earlier spans on the ranks of later ones. What sending
them takes has a price, in units of cost, and a sample is split only where that gains more than it takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.api import DEFAULT_STRATEGY, DEFAULT_TOLERANCE, Partition, partition
from evenkeel.partitioning.cutting import divide, measure, pieces_at, place_pieces, recut, table_of
from evenkeel.partitioning.errors import PartitionError
from evenkeel.partitioning.splits.samples import Divisible, SplitOptions

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
        loads: (num_ranks,) float64, summed cost of each rank.
        exchange: (num_ranks,) float64, what its keys and values take: the more of what it sends and what it receives,
            and what it passes on.
        within: Positions whose keys and values go to another rank of the same node, counted for each rank.
        between: Positions whose keys and values go to another node, counted for each node.
        moved_parts: Parts that leave their home.
        moved_size: Their summed size.
        moved_size_between_nodes: The part of it that crosses nodes.
        speeds: (num_ranks,) float64.
        time: Largest sum of load over speed and exchange, and what splitting takes in any step.
        heaviest: A bound of whole samples: an even division, or the heaviest of them on the fastest rank.
    """

    samples: Integers
    begins: Integers
    ends: Integers
    ranks: NDArray[np.int32]
    loads: Floats
    exchange: Floats
    within: int
    between: int
    moved_parts: int
    moved_size: float
    moved_size_between_nodes: float
    speeds: Floats
    time: float
    heaviest: float

    @property
    def num_samples(self) -> int:
        """Samples, whole or not."""
        return int(np.count_nonzero(self.begins == 0))

    @property
    def num_pieces(self) -> int:
        """Parts of samples that are split."""
        return int(np.count_nonzero(self.ends))

    @property
    def num_split(self) -> int:
        """Samples that are split."""
        return int(np.count_nonzero((self.ends > 0) & (self.begins == 0)))


def wants_splits(found: Partition | PartitionError, options: SplitOptions) -> bool:
    """Whether whole samples are too far from an even division, or fit no rank."""
    if isinstance(found, PartitionError):
        return True
    speed = float(found.loads.size) if found.speeds is None else float(sum(found.speeds.tolist()))
    return found.lower_bound * speed > (1 + options.above) * float(sum(found.loads.tolist()))


def split_partition(
    found: Partition | PartitionError,
    costs: NDArray[Any],
    homes: NDArray[np.int32],
    num_ranks: int,
    divisible: Divisible,
    split: SplitOptions,
    options: Mapping[str, Any],
) -> SplitPartition | None:
    """Splits samples of a batch where that takes less time than the best assignment of whole ones.

    Args:
        found: That assignment, or why there is none.
        costs: (n,) as for `partition`.
        homes: (n,) rank that holds each sample.
        num_ranks: Number of ranks.
        divisible: The samples that may be split.
        split: When they are.
        options: As for `partition`; `counts` and `min_samples` are of the whole samples, and a part takes memory and
            size in proportion to its positions.

    Returns:
        None where samples had better stay whole, or no better plan was found.
    """
    if num_ranks < 2 or not len(divisible) or not wants_splits(found, split):
        return None
    search = _Search(costs, homes, num_ranks, divisible, split, options)
    whole = search.time_of(found.loads) if isinstance(found, Partition) else math.inf
    best = search.best(whole)
    return None if best is None else search.answer(best)


class _Placed(NamedTuple):
    """Whole samples and the ranks they are on; samples in pieces, where each one's begin, and ranks of the pieces."""

    whole: Integers
    whole_ranks: Integers
    split: Integers
    firsts: Integers
    ranks: Integers


class _Plan(NamedTuple):
    """The same with cuts, the largest time of a rank, and how the pieces were chosen."""

    whole: Integers
    whole_ranks: Integers
    split: Integers
    firsts: Integers
    ranks: Integers
    begins: Integers
    ends: Integers
    time: float
    level: float
    full: float


class _Search:
    """Plans for more and more samples in pieces, each by one partition of whole samples and pieces."""

    def __init__(
        self,
        costs: NDArray[Any],
        homes: NDArray[np.int32],
        num_ranks: int,
        divisible: Divisible,
        split: SplitOptions,
        options: Mapping[str, Any],
    ) -> None:
        self._costs, self._homes, self._num_ranks = costs.astype(np.float64), homes, num_ranks
        self._divisible, self._spans, self._options = divisible, divisible.spans, options
        self._prices, self._fixed = (float(split.within), float(split.between)), float(split.fixed)
        speeds, nodes, sizes = options.get("speeds"), options.get("nodes"), options.get("sizes")
        self._speeds = np.ones(num_ranks) if speeds is None else np.array(speeds, np.float64)
        named = np.zeros(num_ranks, np.int64) if nodes is None else np.asarray(nodes)
        _, self._nodes, self._node_sizes = np.unique(named, return_inverse=True, return_counts=True)
        self._sizes = self._costs if sizes is None else np.asarray(sizes, np.float64)
        # sums in a fixed order, since those of arrays may depend on the machine
        total = sum(np.bincount(homes, self._costs, num_ranks).tolist())
        self._even = float(total) / float(sum(self._speeds.tolist()))
        self._memory = self._caps = None
        if options.get("memory") is not None and options.get("memory_caps") is not None:
            self._memory = np.asarray(options["memory"], np.float64)
            self._caps = np.asarray(options["memory_caps"], np.float64)
        self._own = self._costs[divisible.samples]  # costs of those that may be split
        self._table, self._mean_speed = table_of(divisible.spans), float(sum(self._speeds.tolist())) / num_ranks
        self._price = self._prices[0 if int(self._node_sizes.max()) > 1 else 1] * self._mean_speed
        self._least: dict[tuple[int, float], int] = {}
        self._known: dict[tuple[int, float, int], Floats] = {}

    def time_of(self, loads: NDArray[Any]) -> float:
        """The largest load over speed."""
        return float((loads / self._speeds).max())

    def best(self, time: float) -> _Plan | None:
        """The plan with samples in pieces that takes the least time.

        Args:
            time: That of whole samples.

        Returns:
            None if none takes less.
        """
        count = len(self._divisible)
        too_large = np.zeros(count, np.bool_)
        if self._memory is not None and self._caps is not None:
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
        strategy = str(self._options.get("strategy", DEFAULT_STRATEGY))
        careful = self._attempt(best.split, np.diff(best.firsts), best.level, best.full, strategy)
        return careful if careful is not None and careful.time <= min(SLACK * best.time, enough) else best

    def _refined(self, best: _Plan) -> _Plan:
        """The best plan, or a better one with more or fewer pieces of single samples, the heaviest first."""
        tries, improved = TRIES, True
        while improved and tries > 0:
            improved = False
            for place in np.argsort(-self._own[best.split], kind="stable").tolist():
                for change in (1, -1):
                    counts = np.diff(best.firsts)
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
        largest_node = int(self._node_sizes.max())
        for level in LEVELS:
            wanted = self._counts(split, level)
            inside = tuple(min(count, largest_node) for count in wanted)
            # across nodes where one is full, and as few pieces as a node has ranks, in one where they can be
            for full, counts in ((FULL, wanted), (0.0, inside)) if self._node_sizes.size > 1 else ((0.0, wanted),):
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
        if self._memory is not None and self._caps is not None:
            largest = float(self._caps.max())
            if 0 < largest < math.inf:
                held = self._memory[self._divisible.samples[split]]
                wanted = np.maximum(wanted, np.ceil(np.minimum(held / (min(level, 1.0) * largest), self._num_ranks)))
        return tuple(np.clip(wanted, 2, most).astype(np.int64).tolist())

    def _fewest(self, sample: int, level: float) -> int:
        if (sample, level) not in self._least:
            room = np.empty((2, self._num_ranks))
            work = level * self._even * self._mean_speed
            self._least[sample, level] = pieces_at(self._table, sample, work, self._price, self._num_ranks, *room)
        return self._least[sample, level]

    def _pieces(self, sample: int, level: float, count: int) -> Floats:
        """(2, count) what the pieces of a sample take and cost, first to last."""
        key = sample, level, count
        if key not in self._known:
            found = np.empty((2, count))
            divide(self._table, sample, level * self._even * self._mean_speed, self._price, *found)
            found[0] /= self._mean_speed
            self._known[key] = found
        return self._known[key]

    def _attempt(self, split: Integers, counts: Integers, level: float, full: float, strategy: str) -> _Plan | None:
        """Places pieces first, and whole samples in the room that they leave."""
        is_whole = np.ones(self._costs.size, np.bool_)
        is_whole[self._divisible.samples[split]] = False
        whole = np.flatnonzero(is_whole)
        each = zip(split.tolist(), counts.tolist(), strict=True)
        times, costs = np.concatenate([self._pieces(sample, level, count) for sample, count in each], axis=1)
        firsts = np.concatenate([[0], np.cumsum(counts)])
        placed = place_pieces(
            np.argsort(-self._own[split], kind="stable"), self._homes[self._divisible.samples[split]].astype(np.int64),
            firsts, times, self._speeds, self._even * self._speeds, self._nodes, self._node_sizes, full,
        )  # fmt: skip
        memory = None
        if self._memory is not None:
            memory = np.repeat(self._memory[self._divisible.samples[split]] / counts, counts)
        try:
            whole_ranks = self._around(whole, placed, times * self._speeds[placed], memory, strategy)
        except PartitionError:
            return None
        return self._cut(_Placed(whole, whole_ranks, split, firsts, placed), costs, level, full)

    def _around(
        self, whole: Integers, placed: Integers, costs: Floats, memory: Floats | None, strategy: str
    ) -> Integers:
        """Ranks of the whole samples, where pieces that cost so much are placed already: as if these were slower."""
        held = np.bincount(placed, costs, self._num_ranks)
        level = _filled(held / self._speeds, self._speeds, float(sum(self._costs[whole].tolist())))
        room = np.maximum(level * self._speeds - held, LEAST * self._even)
        how: dict[str, Any] = {**self._options, "sizes": self._sizes[whole], "strategy": strategy}
        how["speeds"] = np.clip(room / max(float(room.max()), np.finfo(np.float64).tiny), 1e-6, 1.0)
        how["tolerance"] = max(self._options.get("tolerance", DEFAULT_TOLERANCE), TOLERANCE)
        if self._memory is not None and self._caps is not None:
            how["memory"] = self._memory[whole]
            how["memory_caps"] = np.maximum(self._caps - np.bincount(placed, memory, self._num_ranks), 0.0)
        return partition(self._costs[whole], self._homes[whole], self._num_ranks, **how).destinations.astype(np.int64)

    def _cut(self, placed: _Placed, costs: Floats, level: float, full: float) -> _Plan | None:
        """Cuts the samples by work; where the caps do not hold that, by the room in them; None if they hold neither."""
        table = table_of(self._spans.take(placed.split))
        base = np.bincount(placed.whole_ranks, self._costs[placed.whole], self._num_ranks).astype(np.float64)
        begins, ends = np.zeros(placed.ranks.size, np.int64), np.zeros(placed.ranks.size, np.int64)
        ends[placed.firsts[1:] - 1] = table[:, 0]
        time = recut(
            base, self._speeds, table, placed.firsts, placed.ranks, begins, ends, self._nodes, *self._prices, costs,
            PASSES,
        )  # fmt: skip
        plan = _Plan(*placed, begins, ends, time, level, full)
        if self._fits(plan) or self._memory is None or self._caps is None:
            return plan if self._fits(plan) else None
        room = self._caps - np.bincount(placed.whole_ranks, self._memory[placed.whole], self._num_ranks)
        for number, (first, last) in enumerate(pairwise(placed.firsts.tolist())):
            ranks, row, order = placed.ranks[first:last], table[number], np.arange(last - first - 1)
            share = np.cumsum(np.maximum(room[ranks], np.finfo(np.float64).tiny))
            places = np.rint((share[:-1] / share[-1] * row[0] - row[8]) / row[9])
            places = np.maximum.accumulate(np.maximum(places, 0) - order) + order  # no two the same
            places = np.minimum(places, row[10] - order.size + order)
            begins[first + 1 : last] = ends[first : last - 1] = row[8] + places * row[9]
            each = self._memory[self._divisible.samples[placed.split[number]]] / row[0]
            room[ranks] -= (ends[first:last] - begins[first:last]) * each
        loads, exchange, _, _ = self._measured(plan)
        plan = plan._replace(time=float((loads / self._speeds + exchange).max()))
        return plan if self._fits(plan) else None

    def _measured(self, plan: _Plan) -> tuple[Floats, Floats, int, int]:
        base = np.bincount(plan.whole_ranks, self._costs[plan.whole], self._num_ranks).astype(np.float64)
        table = table_of(self._spans.take(plan.split))
        return measure(base, table, plan.firsts, plan.ranks, plan.begins, plan.ends, self._nodes, *self._prices)

    def _shares(self, plan: _Plan) -> tuple[Integers, Floats]:
        """(pieces,) the sample of each piece, and the share of its positions that the piece has."""
        numbers = np.repeat(plan.split, np.diff(plan.firsts))
        return self._divisible.samples[numbers], (plan.ends - plan.begins) / self._spans.positions[numbers]

    def _fits(self, plan: _Plan) -> bool:
        fewest = int(self._options.get("min_samples", 0))
        if fewest and self._costs.size >= fewest * self._num_ranks:
            held_by = np.bincount(np.concatenate([plan.whole_ranks, plan.ranks]), minlength=self._num_ranks)
            if int(held_by.min()) < fewest:
                return False
        if self._memory is None or self._caps is None:
            return True
        samples, shares = self._shares(plan)
        held = np.bincount(plan.whole_ranks, self._memory[plan.whole], self._num_ranks)
        held = held + np.bincount(plan.ranks, self._memory[samples] * shares, self._num_ranks)
        return bool((held <= self._caps * HELD).all())

    def answer(self, plan: _Plan) -> SplitPartition:
        """The plan as it is told."""
        loads, exchange, within, between = self._measured(plan)
        of_pieces, shares = self._shares(plan)
        samples = np.concatenate([plan.whole, of_pieces])
        none = np.zeros(plan.whole.size, np.int64)
        begins, ends = np.concatenate([none, plan.begins]), np.concatenate([none, plan.ends])
        ranks = np.concatenate([plan.whole_ranks, plan.ranks]).astype(np.int32)
        sizes = self._sizes[samples] * np.concatenate([np.ones(plan.whole.size), shares])
        homes = self._homes[samples]
        far = self._nodes[ranks] != self._nodes[homes]
        order = np.lexsort((begins, samples))
        return SplitPartition(
            samples=samples[order],
            begins=begins[order],
            ends=ends[order],
            ranks=ranks[order],
            loads=loads,
            exchange=exchange,
            within=within,
            between=between,
            moved_parts=int(np.count_nonzero(ranks != homes)),
            moved_size=float(sizes[ranks != homes].sum()),
            moved_size_between_nodes=float(sizes[far].sum()),
            speeds=self._speeds,
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
