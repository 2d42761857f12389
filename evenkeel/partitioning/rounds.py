"""What a round is: the samples of all ranks, how they are to be partitioned, and the plan; `refinements` makes it.

Every round has one or more batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.api import DEFAULT_MOVE_PRICE, DEFAULT_STRATEGY, DEFAULT_TOLERANCE, evenness, partition
from evenkeel.partitioning.problem import PartitionError
from evenkeel.partitioning.slices import Lengths, Slice
from evenkeel.partitioning.splits import (
    WIDTH,
    RoundParts,
    SplitOptions,
    arrivals,
    samples_of_parts,
    spans_of,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Samples:
    costs: NDArray[np.int64] | NDArray[np.float64]
    lengths: Lengths
    sizes: NDArray[np.int64] | None = None
    memory: NDArray[np.float64] | None = None
    users: NDArray[np.uint32] | None = None
    divisible: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.costs)

    @property
    def moving_sizes(self) -> NDArray[np.int64]:
        """(n,) what moving each sample takes."""
        return self.lengths.sum(axis=1, dtype=np.int64) if self.sizes is None else self.sizes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankSamples(_Samples):
    """What a rank knows of its own samples of a round, on the host: one batch after the other.

    Attributes:
        costs: (n,) int64 or float64, predicted work.
        lengths: (n, jagged fields) int64 or uint32, values of each jagged field.
        sizes: (n,) int64, bytes that moving each sample takes; None: the sum of its lengths.
        memory: (n,) float64, what the memory caps count; None: nothing.
        users: (n,) uint32, whose each sample is: those of one user share keys. None: nobody says.
        batch_sizes: Samples of each of the rank's batches, in order; empty: all are of one.
        divisible: (m, WIDTH) float64, the samples that may be split; see `table_of`. None: there are none.
    """

    batch_sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundSamples(_Samples):
    """The samples of all ranks: by home rank, then by batch, then as they are in the batch. Further as `RankSamples`.

    Attributes:
        batch_sizes: (ranks, batches) int64, samples of each of a rank's batches.
        nodes: (ranks,) int32, number of each rank's host; None when there is at most one.
        divisible: (m, WIDTH) float64 or None; its samples are numbered among those of all ranks, and ascend.
        roles: (jagged fields,) int64, what each field is to a sample in parts; see `part_ranges`. None: none is split.
    """

    batch_sizes: NDArray[np.int64]
    nodes: NDArray[np.int32] | None = None
    roles: NDArray[np.int64] | None = None

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.batch_sizes)

    @property
    def num_batches(self) -> int:
        """Batches of the round."""
        return int(self.batch_sizes.shape[1])

    @property
    def counts_at_home(self) -> NDArray[np.int64]:
        """(ranks,) samples of each rank."""
        return self.batch_sizes[:, 0] if self.num_batches == 1 else np.asarray(self.batch_sizes.sum(axis=1))

    @property
    def homes(self) -> NDArray[np.int32]:
        """(n,) the rank that loaded each sample."""
        return np.repeat(np.arange(self.num_ranks, dtype=np.int32), self.counts_at_home)

    def parts(
        self, begins: NDArray[np.int64], destinations: NDArray[np.int32], steps: NDArray[np.int32] | None
    ) -> RoundParts:
        """Of the first item of each part, of the rank and of the batch that train it.

        Raises:
            ValueError: If a sample is split that may not be.
        """
        of = samples_of_parts(begins)
        batches = np.zeros(of.size, np.int64) if steps is None else steps.astype(np.int64)
        split = np.flatnonzero(np.bincount(of)[of] > 1)
        split = split[np.argsort(batches[split], kind="stable")]
        table = np.empty((0, WIDTH)) if self.divisible is None else self.divisible
        if not np.isin(of[split], table[:, 0]).all():
            raise ValueError("samples are split that may not be")
        own, items = table[np.searchsorted(table[:, 0], of[split])], begins[split]
        spans = spans_of(own)
        firsts = np.where(items > 0, own[:, 1] + items * spans.granule, 0)
        ends = np.where(np.append(items[1:], 0) > 0, np.append(firsts[1:], 0), spans.positions)
        arriving = arrivals(batches * self.num_ranks + destinations)[split]
        columns = (
            batches[split], of[split], spans.context, spans.candidates, destinations[split], arriving, firsts, ends
        )  # fmt: skip
        with np.errstate(invalid="ignore"):  # what is read may begin beyond any position, where no piece is
            pieces = np.stack(columns, axis=1).astype(np.int64)
        first_of_home = np.cumsum(self.counts_at_home) - self.counts_at_home
        return RoundParts(samples=of - first_of_home[self.homes[of]], begins=begins, pieces=pieces)

    def of(self, own: NDArray[np.int64]) -> RoundSamples:
        """Some of them, ascending, as a round of one batch; without lengths."""
        divisible = self.divisible
        if divisible is not None:
            divisible = divisible[np.isin(divisible[:, 0].astype(np.int64), own)]
            divisible[:, 0] = np.searchsorted(own, divisible[:, 0])
        return replace(
            self,
            batch_sizes=np.bincount(self.homes[own], minlength=self.num_ranks)[:, None],
            costs=self.costs[own],
            lengths=np.empty((own.size, 0), np.int64),
            sizes=self.moving_sizes[own],
            memory=None if self.memory is None else self.memory[own],
            users=None if self.users is None else self.users[own],
            divisible=divisible,
        )

    @property
    def home_loads(self) -> NDArray[np.float64]:
        """(batches, ranks) summed cost as loaded."""
        places = np.repeat(np.arange(self.batch_sizes.size), self.batch_sizes.ravel())
        loads = np.bincount(places, self.costs, self.batch_sizes.size).astype(np.float64)
        return loads.reshape(self.batch_sizes.shape).T.copy()

    @property
    def steps(self) -> NDArray[np.int32] | None:
        """(n,) the batch in which each sample was loaded; None: all are of one."""
        if self.num_batches == 1:
            return None
        batches = np.tile(np.arange(self.num_batches, dtype=np.int32), self.num_ranks)
        return np.repeat(batches, self.batch_sizes.ravel())


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOptions:
    """How samples are partitioned; see `partition`.

    Attributes:
        strategy: Name of the strategy.
        counts: "equal" or "free".
        tolerance: Of the load above the lower bound, relative.
        move_price: Of moving all samples, as a share of a step.
        speeds: Relative speed of each rank; empty: all equal.
        memory_caps: What each rank can hold; empty: no caps.
        min_samples: Of each rank at least, while the batch has as many for all.
        stay: Nothing is balanced; samples move only where `min_samples` needs them.
        split: When samples are split over ranks; None: never.
    """

    strategy: str = DEFAULT_STRATEGY
    counts: str = "equal"
    tolerance: float = DEFAULT_TOLERANCE
    move_price: float = DEFAULT_MOVE_PRICE
    speeds: tuple[float, ...] = ()
    memory_caps: tuple[float, ...] = ()
    min_samples: int = 0
    stay: bool = False
    split: SplitOptions | None = None

    def spreading(self) -> RoundOptions:
        """The same without balancing, and without regard to memory; it needs no compiled kernels."""
        return replace(self, strategy="plain", counts="free", memory_caps=(), stay=True, split=None)


@dataclass(frozen=True, kw_only=True)  # without slots: it is pickled in half the time
class Figures:
    """How even a batch is, or the worst batch of a round. Mean load in units of cost, sizes in bytes.

    Attributes:
        mean_load: Mean over the ranks.
        max_load_before: Largest load over speed, as loaded.
        max_load_after: Largest load over speed, as planned, with what splitting samples takes.
        imbalance_before: Max/mean of load over speed, as loaded.
        imbalance_after: The same as planned.
        lower_bound: No assignment of whole samples has a smaller maximum of load over speed.
        samples: Of all ranks.
        moved_samples: Samples that change rank; a part of a split sample counts as one.
        size: Of all samples.
        moved_size: Of those that change rank.
        moved_size_between_nodes: Of those that change node.
        split_samples: Samples that are split over ranks.
        pieces: Parts that they are split into.
        exchanged: Positions whose keys and values go to another rank, counted for each rank that they go to.
        exchanged_between_nodes: Those that go to another node.
        max_load_whole: Where samples are split, what `max_load_after` would be without, by the best plan found of whole
            samples; 0 where none is split, or no such plan keeps within the memory caps.
    """

    mean_load: float
    max_load_before: float
    max_load_after: float
    imbalance_before: float
    imbalance_after: float
    lower_bound: float
    samples: int
    moved_samples: int
    size: int
    moved_size: int
    moved_size_between_nodes: int
    split_samples: int = 0
    pieces: int = 0
    exchanged: int = 0
    exchanged_between_nodes: int = 0
    max_load_whole: float = 0.0

    @classmethod
    def of(
        cls,
        before: NDArray[Any],
        after: NDArray[Any],
        speeds: NDArray[np.float64] | None,
        time: float = 0.0,
        **rest: Any,
    ) -> Figures:
        """From the (ranks,) loads before and after; `time` is what the slowest rank takes where that is more."""
        max_before, imbalance_before = evenness(before, speeds)
        max_after, imbalance_after = evenness(after, speeds)
        return cls(
            mean_load=float(sum(after.tolist())) / after.size,
            max_load_before=max_before,
            max_load_after=time or max_after,
            imbalance_before=imbalance_before,
            imbalance_after=imbalance_after * (time / max_after if time and max_after > 0 else 1.0),
            **rest,
        )

    @property
    def imbalance_bound(self) -> float:
        """What `imbalance_after` would be at the lower bound."""
        return self.lower_bound * self.imbalance_after / self.max_load_after if self.max_load_after else 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundPlan:
    """Which rank trains which sample of a round, in which batch. Where samples are split, arrays are over their parts.

    Attributes:
        destinations: (parts,) int32, the rank that trains each.
        steps: (parts,) int32, the batch of the round that does; None: all are of one batch.
        parts: Which samples are split, and how; None: none is, and parts are samples.
        loads_before: (batches, ranks) float64, summed cost as loaded.
        loads_after: (batches, ranks) float64, summed cost as planned.
        batches: How even each batch is.
        seconds: That it took.
    """

    destinations: NDArray[np.int32]
    steps: NDArray[np.int32] | None
    parts: RoundParts | None
    loads_before: NDArray[np.float64]
    loads_after: NDArray[np.float64]
    batches: tuple[Figures, ...]
    seconds: float = 0.0

    @property
    def worst(self) -> int:
        """The least even batch."""
        return max(range(len(self.batches)), key=lambda batch: self.batches[batch].imbalance_after)

    @property
    def figures(self) -> Figures:
        """Those of the least even batch, with the samples and sizes of all."""
        if len(self.batches) == 1:
            return self.batches[0]
        counted = (
            "samples", "moved_samples", "size", "moved_size", "moved_size_between_nodes", "split_samples", "pieces",
            "exchanged", "exchanged_between_nodes",
        )  # fmt: skip
        sums = {name: sum(getattr(each, name) for each in self.batches) for name in counted}
        return replace(self.batches[self.worst], **sums)


Found: TypeAlias = RoundPlan | PartitionError


def is_uneven(found: Found, options: RoundOptions, above: float) -> bool:
    """Whether a batch's whole samples need more than `above` times an even division, or fit no memory caps."""
    if isinstance(found, PartitionError):
        return True
    (loads,) = found.loads_after.tolist()
    speed = float(sum(options.speeds)) if options.speeds else float(len(loads))
    return found.figures.lower_bound * speed > above * float(sum(loads))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """What one rank knows of a round's plan.

    Attributes:
        steps: (n,) int32, the batch of the round that trains each of its own samples; None: as loaded.
        slices: Its part of each batch, over the own samples that the batch trains, in their order; over their parts
            where some are split.
        cuts: Per batch, the first items of the own samples' parts; None where none of them is split. Empty where no
            rank's is, in no batch.
    """

    steps: NDArray[np.int32] | None
    slices: tuple[Slice, ...]
    cuts: tuple[NDArray[np.int64] | None, ...] = ()

    def cuts_in(self, batch: int) -> NDArray[np.int64] | None:
        """(parts,) the first items of the own samples' parts that a batch trains; None where none of them is split."""
        return self.cuts[batch] if self.cuts else None

    def own_in(self, batch: int) -> int:
        """Own samples that a batch trains, somewhere."""
        cuts = self.cuts_in(batch)
        return len(self.slices[batch].destinations) if cuts is None else int(np.count_nonzero(cuts == 0))


class Batches(NamedTuple):
    """A round's batches, each planned by itself.

    Attributes:
        steps: (n,) int32, the batch of the round that trains each sample; None: all are of one batch.
        samples: Each batch as a round of its own.
        plans: The plan of each, or why there is none.
    """

    steps: NDArray[np.int32] | None
    samples: Sequence[RoundSamples]
    plans: Sequence[Found]

    def joined(self, samples: RoundSamples) -> RoundPlan:
        """The plan of the whole round.

        Raises:
            PartitionError: If a batch has none.
        """
        plans = []
        for plan in self.plans:
            if isinstance(plan, PartitionError):
                raise plan
            plans.append(plan)
        if self.steps is None:
            return plans[0]
        every = [
            np.zeros(plan.destinations.size, np.int64) if plan.parts is None else plan.parts.begins for plan in plans
        ]
        owns = [np.flatnonzero(self.steps == batch) for batch in range(len(plans))]
        of = np.concatenate([own[samples_of_parts(begins)] for own, begins in zip(owns, every, strict=True)])
        begins = np.concatenate(every)
        order = np.lexsort((begins, of))
        begins, steps = begins[order], self.steps[of[order]]
        destinations = np.concatenate([plan.destinations for plan in plans])[order]
        return RoundPlan(
            destinations=destinations,
            steps=steps,
            parts=samples.parts(begins, destinations, steps) if begins.any() else None,
            loads_before=samples.home_loads,
            loads_after=np.concatenate([plan.loads_after for plan in plans]),
            batches=tuple(plan.batches[0] for plan in plans),
        )


def partition_batches(
    samples: RoundSamples,
    options: RoundOptions,
    steps: NDArray[np.int32] | None = None,
) -> Batches:
    """Partitions each batch of a round by itself; `steps` are (n,) the batch of each sample, if not as loaded."""
    loads = [None] * samples.num_batches if steps is None else samples.home_loads
    steps = samples.steps if steps is None else steps
    ones = [samples]
    if steps is not None:
        ones = [samples.of(np.flatnonzero(steps == batch)) for batch in range(samples.num_batches)]
    pairs = zip(ones, loads, strict=True)
    return Batches(steps, ones, [_partition_batch(one, options, before) for one, before in pairs])


def _partition_batch(samples: RoundSamples, options: RoundOptions, before: NDArray[np.float64] | None) -> Found:
    """Partitions a batch; `before` are the loads of the ranks as loaded, if that were other samples."""
    caps = np.array(options.memory_caps) if options.memory_caps else None
    try:
        part = partition(
            samples.costs,
            samples.homes,
            samples.num_ranks,
            strategy=options.strategy,
            sizes=samples.moving_sizes,
            counts=options.counts,
            tolerance=options.tolerance,
            move_price=options.move_price,
            speeds=np.array(options.speeds) if options.speeds else None,
            memory=None if caps is None else samples.memory,
            memory_caps=caps,
            nodes=samples.nodes,
            min_samples=options.min_samples,
            stay=options.stay,
        )
    except PartitionError as error:
        return error
    before = np.asarray(part.home_loads if before is None else before, np.float64)
    figures = Figures.of(
        before,
        part.loads,
        part.speeds,
        lower_bound=part.lower_bound,
        samples=part.destinations.size,
        moved_samples=part.moved_samples,
        size=int(part.size),
        moved_size=round(part.moved_size),
        moved_size_between_nodes=round(part.moved_size_between_nodes),
    )
    return RoundPlan(
        destinations=part.destinations,
        steps=None,
        parts=None,
        loads_before=before[None],
        loads_after=part.loads[None].astype(np.float64),
        batches=(figures,),
    )
