"""From the samples of a round to its plan: the one function by which balancer and ranks plan.

Every round is a window of one or more batches. Whatever else a plan is to take into account comes in here: with
`RankSamples` and `RoundSamples` as what ranks say, with `RoundOptions` as what holds for all rounds of a session.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.api import (
    DEFAULT_MOVE_PRICE,
    DEFAULT_TOLERANCE,
    Options,
    Partition,
    evenness,
    imbalance_of_bound,
)
from evenkeel.partitioning.errors import PartitionError
from evenkeel.partitioning.parts import RoundParts, read_parts, read_splits
from evenkeel.partitioning.samples import Lengths, RankSamples, RoundSamples
from evenkeel.partitioning.slices import Slice, Slices, hash_plan, slice_plan
from evenkeel.partitioning.speeds import ALL_EQUAL, LearnedSpeeds, planned_speeds
from evenkeel.partitioning.split_options import SplitOptions
from evenkeel.partitioning.split_rounds import SplitBatch, SplitWindow, split_window
from evenkeel.partitioning.splits import Cuts, SplitSample, part_lengths
from evenkeel.partitioning.windows import WindowPartition, partition_window

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
        split: When samples are split over ranks; None: never.
        learned: What is known of the ranks' speeds besides, which differs from round to round.
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
    split: SplitOptions | None = None
    learned: LearnedSpeeds = ALL_EQUAL

    def cheapest(self) -> RoundOptions:
        """The same with the cheapest search that there is, each batch by itself, of whole samples."""
        return replace(self, strategy=CHEAP_STRATEGY, meet=False, split=None)

    def spreading(self) -> RoundOptions:
        """The same without balancing, and without regard to memory."""
        return replace(self, counts="free", memory_caps=(), stay=True, split=None)


@dataclass(frozen=True, slots=True, kw_only=True)
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

    @property
    def imbalance_bound(self) -> float:
        """What `imbalance_after` would be at the lower bound."""
        return imbalance_of_bound(self.lower_bound, self.max_load_after, self.imbalance_after)


FIGURES = tuple(field.name for field in fields(Figures))
"""Their names, which are those of the wire too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """What one rank knows of a round's plan.

    Attributes:
        steps: (n,) int32, the batch of the window that trains each of its own samples; None: as loaded.
        slices: Its part of each batch, over the own samples that the batch trains, in their order; over their parts
            where some are split.
        figures: How even each batch is; empty where nothing was planned.
        loads: Its load in each batch; empty where nothing was planned.
        seconds: That the plan took.
        cuts: Per batch, the parts of the own samples; None where none of them is split. Empty where no rank's is, in
            no batch.
        splits: Per batch, the split samples of all ranks, the same on all of them; empty as `cuts`.
    """

    steps: NDArray[np.int32] | None
    slices: tuple[Slice, ...]
    figures: tuple[Figures, ...] = ()
    loads: tuple[float, ...] = ()
    seconds: float = 0.0
    cuts: tuple[Cuts | None, ...] = ()
    splits: tuple[tuple[SplitSample, ...], ...] = ()

    @classmethod
    def staying(cls, rank: int, samples: RankSamples, num_batches: int) -> RankPlan:
        """That of a round in which every sample stays where it is, in the batch in which it was loaded."""
        lengths = [samples.lengths[samples.in_batch(batch)] for batch in range(num_batches)]
        return cls(steps=None, slices=tuple(_staying(rank, own) for own in lengths))

    @property
    def moved_samples(self) -> int:
        """Samples that change rank, over all ranks and batches."""
        return sum(figures.moved_samples for figures in self.figures)

    def cuts_in(self, batch: int) -> Cuts | None:
        """The parts of the own samples that a batch trains; None where none of them is split."""
        return self.cuts[batch] if self.cuts else None

    def own_in(self, batch: int) -> int:
        """Own samples that a batch trains, somewhere."""
        cuts = self.cuts_in(batch)
        return len(self.slices[batch].destinations) if cuts is None else cuts.num_samples

    def sent_in(self, samples: RankSamples, batch: int) -> Lengths:
        """(m, jagged fields) lengths of the rank's own samples, or their parts, that are trained in a batch."""
        lengths = samples.lengths[samples.in_batch(batch) if self.steps is None else self.steps == batch]
        cuts = self.cuts_in(batch)
        if cuts is None:
            return lengths
        assert samples.roles is not None
        return part_lengths(lengths, cuts, samples.roles)

    def ranks_in(self, batch: int) -> NDArray[np.int32]:
        """(own_in,) the rank that trains each own sample of a batch; of one that is split, its first part."""
        cuts, ranks = self.cuts_in(batch), self.slices[batch].destinations
        return ranks if cuts is None else ranks[cuts.is_first]


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
        parts: Which samples are split, and how; the slices are over their parts then. None: none is.
    """

    slices: Slices
    loads_before: NDArray[np.float64]
    loads_after: NDArray[np.float64]
    batches: tuple[Figures, ...]
    digest: bytes = b""
    detail: str = ""
    seconds: float = 0.0
    parts: RoundParts | None = None

    @property
    def nbytes(self) -> int:
        """Memory of its arrays."""
        parts = 0 if self.parts is None else self.parts.nbytes
        return self.slices.nbytes + self.loads_before.nbytes + self.loads_after.nbytes + parts

    @property
    def worst(self) -> int:
        """The least even batch."""
        if len(self.batches) == 1:
            return 0
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

    def of(self, rank: int, seconds: float | None = None) -> RankPlan:
        """What a rank knows of it; `seconds` that it took where nobody has noted them in it."""
        plan = RankPlan(
            steps=self.slices.steps_of(rank),
            slices=self.slices.batches_of(rank),
            figures=self.batches,
            loads=tuple(self.loads_after[:, rank].tolist()),
            seconds=self.seconds if seconds is None else seconds,
        )
        if self.parts is None:
            return plan
        further = self.parts.further_of(rank, self.slices)
        parts = int(self.slices.home_begin[rank + 1] - self.slices.home_begin[rank])
        steps, cuts = read_parts(further, parts - len(further), plan.steps, len(self.batches))
        return replace(plan, steps=steps, cuts=cuts, splits=read_splits(self.parts.pieces, len(self.batches)))


def plan_round(samples: RoundSamples, options: RoundOptions) -> RoundPlan:
    """Partitions the samples of a round and cuts the plan into the ranks' slices.

    The same arguments give the same plan on every machine; it has no digest yet.

    Raises:
        PartitionError: If no assignment within the memory caps was found.
        ValueError: If an argument is wrong; the message names it and its remedy.
    """
    counts, sizes = samples.counts_at_home, samples.moving_sizes
    homes = np.repeat(np.arange(samples.num_ranks, dtype=np.int32), counts)
    split, caps = None if options.stay else options.split, options.memory_caps
    if samples.given is not None:
        options = replace(options.spreading(), min_samples=0)
    speeds = np.array(options.speeds) if options.speeds else None
    if options.learned:  # sums in the order of the samples, so that they are the same on every machine
        loads = np.bincount(homes, samples.costs, samples.num_ranks).tolist()
        speeds = planned_speeds(options.speeds, options.learned, loads, samples.num_batches)
    how: Options = {
        "strategy": options.strategy,
        "sizes": sizes,
        "counts": options.counts,
        "tolerance": options.tolerance,
        "move_price": options.move_price,
        "speeds": speeds,
        "memory": samples.memory if options.memory_caps else None,
        "memory_caps": np.array(options.memory_caps) if options.memory_caps else None,
        "nodes": samples.nodes,
        "min_samples": options.min_samples,
        "stay": options.stay,
    }
    window: WindowPartition | PartitionError
    try:
        window = partition_window(
            samples.costs, homes, samples.steps, samples.num_ranks, samples.num_batches, meet=options.meet,
            given=samples.given, **how,
        )  # fmt: skip
    except PartitionError as error:
        if split is None or samples.divisible is None:
            raise
        window = error
    if split is not None and samples.divisible is not None:
        if samples.given is not None:
            how |= {"stay": False, "memory": samples.memory if caps else None, "memory_caps": caps or None}
        found = split_window(window, samples, homes, split, how)
        if found is not None:
            return _split_plan(found, samples, sizes)
    if isinstance(window, PartitionError):
        raise window
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
    slices, parts = plan.slices, plan.parts
    counts, lengths = samples.counts_at_home, samples.lengths
    if parts is None:
        return hash_plan(slices.destinations, counts, lengths, slices.steps, samples.num_batches)
    cut = hash_plan(
        slices.destinations, np.diff(slices.home_begin), parts.begins[:, None], slices.steps, samples.num_batches
    )
    digest = hashlib.sha256(cut, usedforsecurity=False)
    digest.update(np.ascontiguousarray(lengths, "<i8").data)
    digest.update(parts.pieces.astype("<i8", copy=False).data)
    return digest.digest()[:16]


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


def _split_plan(found: SplitWindow, samples: RoundSamples, sizes: NDArray[np.int64]) -> RoundPlan:
    slices = slice_plan(found.destinations, found.counts, found.lengths, found.steps, samples.num_batches)
    first = np.diff(found.samples, prepend=-1) > 0
    steps = None if found.steps is None else found.steps[first]
    sums = [sizes.sum()] if steps is None else np.bincount(steps, sizes, samples.num_batches).tolist()
    return RoundPlan(
        slices=slices,
        loads_before=np.array([batch.home_loads for batch in found.batches], np.float64),
        loads_after=np.array([batch.loads for batch in found.batches], np.float64),
        batches=tuple(_split_figures(batch, int(size)) for batch, size in zip(found.batches, sums, strict=True)),
        parts=found.parts,
    )


def _split_figures(batch: SplitBatch, size: int) -> Figures:
    split, whole = batch.split, batch.whole
    if split is None:
        assert whole is not None
        return _figures(replace(whole, home_loads=batch.home_loads), size)
    max_before, imbalance_before = evenness(batch.home_loads, split.speeds)
    max_whole = 0.0 if whole is None else evenness(whole.loads, split.speeds)[0]
    largest, imbalance = evenness(split.loads, split.speeds)
    return Figures(
        mean_load=float(sum(split.loads.tolist())) / split.loads.size,
        max_load_before=max_before,
        max_load_after=split.time,
        imbalance_before=imbalance_before,
        imbalance_after=imbalance * (split.time / largest if largest > 0 else 1.0),
        lower_bound=split.heaviest if whole is None else whole.lower_bound,
        samples=split.num_samples,
        moved_samples=split.moved_parts,
        size=size,
        moved_size=round(split.moved_size),
        moved_size_between_nodes=round(split.moved_size_between_nodes),
        split_samples=split.num_split,
        pieces=split.num_pieces,
        exchanged=split.within + split.between,
        exchanged_between_nodes=split.between,
        max_load_whole=max_whole,
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
