"""From the samples of a round to its plan: the one function by which balancer and ranks plan.

Every round is a window of one or more batches. Whatever else a plan is to take into account comes in here: with
`RankSamples` and `RoundSamples` as what ranks say, with `RoundOptions` as what holds for all rounds of a session.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.api import DEFAULT_MOVE_PRICE, DEFAULT_TOLERANCE, Partition, evenness
from evenkeel.partitioning.samples import Lengths, RankSamples, RoundSamples
from evenkeel.partitioning.slices import Slice, Slices, hash_plan, slice_plan
from evenkeel.partitioning.windows import partition_window

CHEAP_STRATEGY = "lpt"
"""What a round gets whose own search would not end in time."""


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
        meet: Samples may change their batch.
        stay: Nothing is balanced; samples move only where `min_samples` needs them.
    """

    strategy: str = "minimal_move"
    counts: str = "equal"
    tolerance: float = DEFAULT_TOLERANCE
    move_price: float = DEFAULT_MOVE_PRICE
    speeds: tuple[float, ...] = ()
    memory_caps: tuple[float, ...] = ()
    min_samples: int = 0
    meet: bool = True
    stay: bool = False

    def cheapest(self) -> RoundOptions:
        """The same with the cheapest search that there is, each batch by itself."""
        return replace(self, strategy=CHEAP_STRATEGY, meet=False)

    def spreading(self) -> RoundOptions:
        """The same without balancing, and without regard to memory."""
        return replace(self, counts="free", memory_caps=(), stay=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """How even a batch is, or the worst batch of a round. Mean load in units of cost, sizes in bytes.

    Attributes:
        mean_load: Mean over the ranks.
        max_load_before: Largest load over speed, as loaded.
        max_load_after: Largest load over speed, as planned.
        imbalance_before: Max/mean of load over speed, as loaded.
        imbalance_after: The same as planned.
        lower_bound: No assignment of whole samples has a smaller maximum of load over speed.
        samples: Of all ranks.
        moved_samples: Samples that change rank.
        size: Of all samples.
        moved_size: Of those that change rank.
        moved_size_between_nodes: Of those that change node.
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


FIGURES = tuple(field.name for field in fields(Figures))
"""Their names, which are those of the wire too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """What one rank knows of a round's plan.

    Attributes:
        steps: (n,) int32, the batch of the window that trains each of its own samples; None: as loaded.
        slices: Its part of each batch, over the own samples that the batch trains, in their order.
        figures: How even each batch is; empty where nothing was planned.
        loads: Its load in each batch; empty where nothing was planned.
        seconds: That the plan took.
    """

    steps: NDArray[np.int32] | None
    slices: tuple[Slice, ...]
    figures: tuple[Figures, ...] = ()
    loads: tuple[float, ...] = ()
    seconds: float = 0.0

    @classmethod
    def staying(cls, rank: int, samples: RankSamples, num_batches: int) -> RankPlan:
        """That of a round in which every sample stays where it is, in the batch in which it was loaded."""
        lengths = [samples.lengths[samples.in_batch(batch)] for batch in range(num_batches)]
        return cls(steps=None, slices=tuple(_staying(rank, own) for own in lengths))

    @property
    def moved_samples(self) -> int:
        """Samples that change rank, over all ranks and batches."""
        return sum(figures.moved_samples for figures in self.figures)

    def sent_in(self, samples: RankSamples, batch: int) -> Lengths:
        """(m, jagged fields) lengths of the rank's own samples that are trained in a batch, somewhere."""
        return samples.lengths[samples.in_batch(batch) if self.steps is None else self.steps == batch]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class RoundPlan:
    """Where the samples of a round go.

    Attributes:
        slices: Each rank's part of it.
        loads_before: (batches, ranks) float64, summed cost as loaded.
        loads_after: (batches, ranks) float64, summed cost as planned.
        batches: How even each batch is.
        digest: 16 bytes that name it, where ranks are told their slices only.
        detail: For people, when another search was made than the one asked for.
        seconds: That it took.
    """

    slices: Slices
    loads_before: NDArray[np.float64]
    loads_after: NDArray[np.float64]
    batches: tuple[Figures, ...]
    digest: bytes = b""
    detail: str = ""
    seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        """Memory of its arrays."""
        return self.slices.nbytes + self.loads_before.nbytes + self.loads_after.nbytes

    @property
    def worst(self) -> int:
        """The least even batch."""
        return max(range(len(self.batches)), key=lambda batch: self.batches[batch].imbalance_after)

    @property
    def figures(self) -> Figures:
        """Those of the least even batch, with the samples and sizes of all."""
        if len(self.batches) == 1:
            return self.batches[0]
        counted = ("samples", "moved_samples", "size", "moved_size", "moved_size_between_nodes")
        sums = {name: sum(getattr(each, name) for each in self.batches) for name in counted}
        return replace(self.batches[self.worst], **sums)

    def of(self, rank: int, seconds: float | None = None) -> RankPlan:
        """What a rank knows of it; `seconds` that it took where nobody has noted them in it."""
        return RankPlan(
            steps=self.slices.steps_of(rank),
            slices=self.slices.batches_of(rank),
            figures=self.batches,
            loads=tuple(self.loads_after[:, rank].tolist()),
            seconds=self.seconds if seconds is None else seconds,
        )


def plan_round(samples: RoundSamples, options: RoundOptions) -> RoundPlan:
    """Partitions the samples of a round and cuts the plan into the ranks' slices.

    The same arguments give the same plan on every machine; it has no digest yet.

    Raises:
        PartitionError: If no assignment within the memory caps was found.
        ValueError: If an argument is wrong; the message names it and its remedy.
    """
    counts, sizes = samples.counts_at_home, samples.moving_sizes
    homes = np.repeat(np.arange(samples.num_ranks, dtype=np.int32), counts)
    if samples.given is not None:
        options = replace(options.spreading(), min_samples=0)
    window = partition_window(
        samples.costs,
        homes,
        samples.steps,
        samples.num_ranks,
        samples.num_batches,
        meet=options.meet,
        given=samples.given,
        strategy=options.strategy,
        sizes=sizes,
        counts=options.counts,
        tolerance=options.tolerance,
        move_price=options.move_price,
        speeds=np.array(options.speeds) if options.speeds else None,
        memory=samples.memory if options.memory_caps else None,
        memory_caps=np.array(options.memory_caps) if options.memory_caps else None,
        nodes=samples.nodes,
        min_samples=options.min_samples,
        stay=options.stay,
    )
    slices = slice_plan(window.destinations, counts, samples.lengths, window.steps, samples.num_batches)
    parts = window.partitions
    sums = [sizes.sum()] if window.steps is None else np.bincount(window.steps, sizes, len(parts)).tolist()
    return RoundPlan(
        slices=slices,
        loads_before=np.array([part.home_loads for part in parts], np.float64),
        loads_after=np.array([part.loads for part in parts], np.float64),
        batches=tuple(_figures(part, int(size)) for part, size in zip(parts, sums, strict=True)),
    )


def digest_of(plan: RoundPlan, samples: RoundSamples) -> bytes:
    """16 bytes that name a plan and what it was made of, on every machine alike."""
    slices = plan.slices
    return hash_plan(slices.destinations, samples.counts_at_home, samples.lengths, slices.steps, samples.num_batches)


def _figures(part: Partition, size: int) -> Figures:
    max_before, imbalance_before = evenness(part.home_loads, part.speeds)
    max_after, imbalance_after = evenness(part.loads, part.speeds)
    return Figures(
        mean_load=float(sum(part.loads.tolist())) / part.loads.size,
        max_load_before=max_before,
        max_load_after=max_after,
        imbalance_before=imbalance_before,
        imbalance_after=imbalance_after,
        lower_bound=part.lower_bound,
        samples=part.destinations.size,
        moved_samples=part.moved_samples,
        size=size,
        moved_size=round(part.moved_size),
        moved_size_between_nodes=round(part.moved_size_between_nodes),
    )


def _staying(rank: int, lengths: Lengths) -> Slice:
    held = len(lengths) > 0
    return Slice(
        rank=rank,
        destinations=np.full(len(lengths), rank, dtype=np.int32),
        sources=np.array([rank] if held else [], dtype=np.int32),
        source_counts=np.array([len(lengths)] if held else [], dtype=np.int32),
        source_totals=lengths.sum(axis=0, dtype=np.int64, keepdims=True)[: int(held)],
    )
