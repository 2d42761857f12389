"""TorchRec's planner with an exact proposer: options chosen by prices and knapsack instead of by trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from evenkeel.placement.knapsack import Knapsack, solve_knapsack

FloatArray = npt.NDArray[np.float64]
Choice = npt.NDArray[np.int64]

_MIB = float(1 << 20)
_ROOMS = tuple((room, shard) for room in (0.98, 0.95, 0.91, 0.86, 0.8, 0.7) for shard in (1.0, 0.6, 0.3))
"""Parts of all HBM, and of that of a rank which one shard may take, to try one after another."""
_MOST_CELLS = 15_000_000
"""Size of the table of TorchRec's dynamic programming, in Python, from which on it takes too long."""
_MOST_CHANGES, _CHANGED_TABLES, _CHANGES_OF_ONE = 60, 4, 2


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Sharding options of all tables.

    Attributes:
        options: For each table, TorchRec's sharding options.
        perf: (tables, options) time over all ranks; infinite where there is no such option.
        slowest: (tables, options) time of the slowest shard.
        hbm: (tables, options) HBM over all ranks, in MiB.
        ddr: (tables, options) host memory over all ranks, in MiB.
        shard_hbm: (tables, options) HBM of the largest shard, in MiB.
    """

    options: Sequence[Sequence[Any]]
    perf: FloatArray
    slowest: FloatArray
    hbm: FloatArray
    ddr: FloatArray
    shard_hbm: FloatArray


@dataclass(frozen=True, slots=True)
class Proposal:
    """A choice of options.

    Attributes:
        choice: Option of each table.
        mean: Time of the average rank.
        slowest: Time of the slowest shard.
    """

    choice: Choice
    mean: float
    slowest: float


class ExactProposer:
    """A `Proposer` for `EmbeddingShardingPlanner(proposers=[ExactProposer()])`; it can be used again.

    A plan is rated by its slowest rank. No rank is faster than the mean, nor than the slowest shard, so with `f(t)`
    the least mean time of options whose shards take at most `t`, no plan is rated below the `t` where `f(t) = t`.
    That `t` is found by bisection, `f` by an exact knapsack over all HBM and all host memory, and proposals start
    from its choice. What fits in sum may not fit on ranks, or not evenly, so others follow with less HBM in all and
    with smaller shards, and then changes of the best plan where its slowest rank is. TorchRec's own proposers come
    last, so that a search that is not cut short misses none of their plans (up to the sizes where they are hopeless).
    What cannot beat the best plan, wherever its shards go, is not handed to TorchRec, which takes its time to place it.

    Attributes:
        lower_bound: No plan is rated below this; known once the first feedback told the topology.
    """

    def __init__(self, *, proposals: int = 120, gap: float = 1e-3, others: int = 1000) -> None:
        """Choose how hard to try.

        Args:
            proposals: Proposals of its own at most, the first one to learn the topology included.
            gap: Stop at a plan whose rating is this close to the lower bound.
            others: Proposals at most of TorchRec's dynamic programming, after its own, and five times as many as of
                each of TorchRec's default proposers; 0 leaves them out.
        """
        self.proposals, self.gap, self.others = proposals, gap, others
        self.lower_bound = 0.0
        self._space: SearchSpace | None = None
        self._given: tuple[list[Any], Any] = ([], None)
        self._forget()

    def _forget(self) -> None:
        self._topology: Any = None
        self._queue: list[Choice] = []
        self._rooms = list(_ROOMS)
        self._tried: set[tuple[int, ...]] = set()
        self._count = self._changes = 0
        self._asked: Choice | None = None
        self._best = np.inf
        self._done = False
        self._others: list[tuple[int, Any]] | None = None
        self._others_count = 0
        self.lower_bound = 0.0

    def load(self, search_space: list[Any], enumerator: Any = None) -> None:
        """Take the options of all tables, and forget an earlier search."""
        self._space = _arrange(search_space)
        self._given = (search_space, enumerator)
        self._forget()
        if self._space.options:
            # The topology comes with the first feedback: start with what needs the least HBM.
            self._offer(np.where(np.isfinite(self._space.perf), self._space.hbm, np.inf).argmin(axis=1))

    def propose(self) -> list[Any] | None:
        """The next choice, best first; `None` at the end."""
        if self._space is None or self._done or not self._space.options:
            return None
        while self._queue and self._count < self.proposals:
            self._asked = self._queue.pop(0)
            proposal = [options[index] for options, index in zip(self._space.options, self._asked, strict=True)]
            if not self._hopeless(proposal):
                self._count += 1
                return proposal
        self._asked = None
        return self._others_next()

    def feedback(
        self,
        partitionable: bool,
        plan: list[Any] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Any = None,
    ) -> None:
        """Learn the topology, and what became of the last proposal."""
        assert self._space is not None, "load comes before feedback"
        better = partitionable and perf_rating is not None and perf_rating < self._best
        if better and perf_rating is not None:
            self._best = perf_rating
        if storage_constraint is not None and self._topology is None:
            self._topology = storage_constraint
            self._search(1.0, 1.0)
            return
        if self._best <= self.lower_bound * (1 + self.gap):
            self._done = True
            return
        if self._asked is None:
            if self._others:
                self._others[0][1].feedback(partitionable, plan, perf_rating, storage_constraint or self._topology)
            return
        if better and plan is not None and self._changes < _MOST_CHANGES:
            self._change(self._asked, plan)
        while not self._queue and self._rooms and self._count < self.proposals:
            self._search(*self._rooms.pop(0))

    def _offer(self, choice: Choice, *, first: bool = False) -> None:
        key = tuple(choice.tolist())
        if key not in self._tried:
            self._tried.add(key)
            self._queue.insert(0 if first else len(self._queue), choice)

    def _others_next(self) -> list[Any] | None:
        """The next proposal of TorchRec's own proposers, one proposer after the other."""
        if self._topology is None or self.others <= 0:
            return None
        if self._others is None:
            self._others = _torchrec_proposers(*self._given, self._topology, self.others)
        while self._others:
            most, other = self._others[0]
            proposal: list[Any] | None = other.propose() if self._others_count < most else None
            if proposal is not None:
                self._others_count += 1
                if not self._hopeless(proposal):
                    return proposal
                other.feedback(False, proposal, None, self._topology)
                continue
            self._others.pop(0)
            self._others_count = 0
        return None

    def _hopeless(self, proposal: Sequence[Any]) -> bool:
        """Whether no placement of these options fits, or is rated below the best plan: TorchRec need not place them."""
        if self._topology is None:
            return False
        shards = [shard for option in proposal for shard in option.shards]
        times = [shard.perf.total for shard in shards]
        devices = self._topology.devices
        if max(sum(times) / len(devices), *times) >= self._best:
            return True
        return bool(sum(shard.storage.hbm for shard in shards) > sum(device.storage.hbm for device in devices))

    def _change(self, choice: Choice, plan: list[Any]) -> None:
        """Queue other options for the tables that weigh most on the slowest rank of `plan`."""
        assert self._space is not None
        load: dict[int, float] = {}
        own: dict[int, dict[str, float]] = {}
        for option in plan:
            for shard in option.shards:
                load[shard.rank] = load.get(shard.rank, 0.0) + shard.perf.total
                tables = own.setdefault(shard.rank, {})
                tables[option.fqn] = tables.get(option.fqn, 0.0) + shard.perf.total
        slow = max(load, key=lambda rank: (load[rank], -rank))
        rows = {options[0].fqn: row for row, options in enumerate(self._space.options)}
        heaviest = sorted(own[slow].items(), key=lambda item: (-item[1], item[0]))[:_CHANGED_TABLES]
        changed = []
        for name, seconds in heaviest:
            row = rows[name]
            lighter = np.flatnonzero(self._space.slowest[row] < seconds * (1 - 1e-9))
            for column in lighter[np.argsort(self._space.perf[row, lighter], kind="stable")][:_CHANGES_OF_ONE]:
                other = choice.copy()
                other[row] = column
                changed.append(other)
        self._changes += len(changed)
        for other in reversed(changed):
            self._offer(other, first=True)

    def _search(self, room: float, shard_room: float) -> None:
        """Find the threshold where mean and slowest shard meet, and queue the choices around it."""
        assert self._space is not None
        devices = self._topology.devices
        hbm = sum(device.storage.hbm for device in devices) / _MIB
        ddr = sum(device.storage.ddr for device in devices) / _MIB
        largest = max(device.storage.hbm for device in devices) / _MIB
        budget = np.array([hbm * room, ddr if ddr > 0 else 0.0])
        smallest = self._space.shard_hbm.min(axis=1, keepdims=True)
        fits = np.isfinite(self._space.perf) & (self._space.shard_hbm <= largest)
        fits &= self._space.shard_hbm <= np.maximum(shard_room * largest, smallest)
        levels = np.unique(self._space.slowest[fits])
        found: dict[int, Proposal] = {}

        def at(level: int) -> Proposal | None:
            allowed = fits & (self._space.slowest <= levels[level])  # type: ignore[union-attr]
            proposal = _least_mean(self._space, allowed, budget, len(devices), self.gap / 4)  # type: ignore[arg-type]
            if proposal is not None:
                found[level] = proposal
            return proposal

        low, high = 0, len(levels) - 1
        if not len(levels) or at(high) is None:
            return
        while low < high:
            middle = (low + high) // 2
            proposal = at(middle)
            if proposal is None or proposal.mean > levels[middle]:
                low = middle + 1
            else:
                high = middle
        if room == 1.0 and shard_room == 1.0:
            # Below the last level that is met, plans have a mean above it or do not exist.
            at_low = found.get(low)
            before = float(levels[low - 1]) if low else 0.0
            if at_low is not None:
                self.lower_bound = max(min(at_low.mean * (1 - self.gap / 4), float(levels[low])), before)
        for proposal in sorted(found.values(), key=lambda p: (max(p.mean, p.slowest), p.mean)):
            self._offer(proposal.choice)


def _torchrec_proposers(search_space: list[Any], enumerator: Any, topology: Any, most: int) -> list[tuple[int, Any]]:
    """TorchRec's own proposers, loaded and told the topology, and the most proposals of each."""
    from torchrec.distributed.planner.proposers import (
        DynamicProgrammingProposer,
        GreedyProposer,
        GridSearchProposer,
        UniformProposer,
    )

    few = max(1, most // 5)
    others: list[tuple[int, Any]] = [
        (few, proposer)
        for proposer in (UniformProposer(), GridSearchProposer(), GreedyProposer(), GreedyProposer(use_depth=False))
    ]
    for _, other in others:
        other.load(search_space=search_space, enumerator=enumerator)
    dynamic = DynamicProgrammingProposer()
    if len(search_space) * dynamic._hbm_bins_per_device * len(topology.devices) <= _MOST_CELLS:
        dynamic.load(search_space=search_space, enumerator=enumerator)
        # Its first proposal only serves to learn the topology.
        dynamic.feedback(False, storage_constraint=topology)
        others.insert(0, (most, dynamic))
    return others


def _arrange(search_space: list[Any]) -> SearchSpace:
    by_table: dict[str, list[Any]] = {}
    for option in search_space:
        by_table.setdefault(option.fqn, []).append(option)
    options = list(by_table.values())
    shape = (len(options), max((len(row) for row in options), default=0))
    perf, slowest, shard_hbm = np.full(shape, np.inf), np.full(shape, np.inf), np.full(shape, np.inf)
    hbm, ddr = np.zeros(shape), np.zeros(shape)
    for row, members in enumerate(options):
        for column, option in enumerate(members):
            times = [shard.perf.total for shard in option.shards]
            sizes = [shard.storage.hbm for shard in option.shards]
            perf[row, column], slowest[row, column] = sum(times), max(times)
            hbm[row, column], shard_hbm[row, column] = sum(sizes) / _MIB, max(sizes) / _MIB
            ddr[row, column] = sum(shard.storage.ddr for shard in option.shards) / _MIB
    return SearchSpace(options, perf, slowest, hbm, ddr, shard_hbm)


def _least_mean(
    space: SearchSpace, allowed: npt.NDArray[np.bool_], budget: FloatArray, ranks: int, gap: float
) -> Proposal | None:
    if not allowed.any(axis=1).all():
        return None
    cost = np.where(allowed, space.perf, np.inf) / ranks
    result = solve_knapsack(Knapsack(cost, np.stack([space.hbm, space.ddr]), budget), gap=gap)
    if result.choice is None:
        return None
    rows = np.arange(len(result.choice))
    return Proposal(result.choice, result.cost, float(space.slowest[rows, result.choice].max()))
