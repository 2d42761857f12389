"""From the samples of a round to its plan: the one function by which balancer and lead plan.

Every round is a window of one or more batches. `plan_round` decides which rank trains which sample, from what all ranks
said of their samples; `slice_round` cuts that into what each rank needs, which takes the lengths of the samples too.
"""

from __future__ import annotations

import time
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
from evenkeel.partitioning.samples import Lengths, RankSamples, RoundSamples
from evenkeel.partitioning.slices import Slice, Slices, slice_plainly, slice_plan
from evenkeel.partitioning.splits import (
    Cuts,
    RoundParts,
    SplitOptions,
    SplitSample,
    part_lengths,
    read_parts,
    read_splits,
)
from evenkeel.partitioning.splits.window import SplitBatch, SplitWindow, split_window
from evenkeel.partitioning.windows import WindowPartition, partition_window


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

    strategy: str = "minimal_move"
    counts: str = "equal"
    tolerance: float = DEFAULT_TOLERANCE
    move_price: float = DEFAULT_MOVE_PRICE
    speeds: tuple[float, ...] = ()
    memory_caps: tuple[float, ...] = ()
    min_samples: int = 0
    stay: bool = False
    split: SplitOptions | None = None

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundPlan:
    """Which rank trains which sample of a round, in which batch. Where samples are split, arrays are over their parts.

    Attributes:
        destinations: (parts,) int32, the rank that trains each.
        steps: (parts,) int32, the batch of the window that does; None: all are of one batch.
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


def plan_round(samples: RoundSamples, options: RoundOptions) -> RoundPlan:
    """Decides which rank trains which sample of a round.

    The same arguments give the same plan on every machine; only `seconds` differs.

    Raises:
        PartitionError: If no assignment within the memory caps was found.
        ValueError: If an argument is wrong; the message names it and its remedy.
    """
    began = time.perf_counter()
    homes = np.repeat(np.arange(samples.num_ranks, dtype=np.int32), samples.counts_at_home)
    sizes, split = samples.moving_sizes, None if options.stay else options.split
    capped = bool(options.memory_caps)
    how: Options = {
        "strategy": options.strategy,
        "sizes": sizes,
        "counts": options.counts,
        "tolerance": options.tolerance,
        "move_price": options.move_price,
        "speeds": np.array(options.speeds) if options.speeds else None,
        "memory": samples.memory if capped else None,
        "memory_caps": np.array(options.memory_caps) if capped else None,
        "nodes": samples.nodes,
        "min_samples": options.min_samples,
        "stay": options.stay,
    }
    window: WindowPartition | PartitionError
    try:
        window = partition_window(samples.costs, homes, samples.steps, samples.num_ranks, samples.num_batches, **how)
    except PartitionError as error:
        if split is None or samples.divisible is None:
            raise
        window = error
    if split is not None and samples.divisible is not None:
        found = split_window(window, samples, homes, split, how)
        if found is not None:
            return _split_plan(found, sizes, samples.num_batches, time.perf_counter() - began)
    if isinstance(window, PartitionError):
        raise window
    parts = window.partitions
    sums = [sizes.sum()] if window.steps is None else np.bincount(window.steps, sizes, len(parts)).tolist()
    return RoundPlan(
        destinations=window.destinations,
        steps=window.steps,
        parts=None,
        loads_before=np.array([part.home_loads for part in parts], np.float64),
        loads_after=np.array([part.loads for part in parts], np.float64),
        batches=tuple(_figures(part, int(size)) for part, size in zip(parts, sums, strict=True)),
        seconds=time.perf_counter() - began,
    )


def slice_round(plan: RoundPlan, samples: RoundSamples, *, compiled: bool = True) -> Slices:
    """Cuts a plan into what each rank needs; the samples are those that it was made of, with their lengths."""
    counts, lengths = samples.counts_at_home, samples.lengths
    if plan.parts is not None:
        assert samples.roles is not None
        homes = np.repeat(np.arange(samples.num_ranks), counts)
        of = plan.parts.in_round(counts)
        counts = np.bincount(homes[of], minlength=samples.num_ranks)
        lengths = part_lengths(lengths, Cuts(samples=of, begins=plan.parts.begins), samples.roles)
    cut = slice_plan if compiled else slice_plainly
    return cut(plan.destinations, counts, lengths, plan.steps, samples.num_batches)


def plan_of_rank(plan: RoundPlan, slices: Slices, rank: int) -> RankPlan:
    """What one rank is sent of a plan and its slices."""
    one = RankPlan(
        steps=slices.steps_of(rank),
        slices=slices.batches_of(rank),
        figures=plan.batches,
        loads=tuple(plan.loads_after[:, rank].tolist()),
        seconds=plan.seconds,
    )
    if plan.parts is None:
        return one
    further = plan.parts.further_of(rank, slices)
    parts = int(slices.home_begin[rank + 1] - slices.home_begin[rank])
    steps, cuts = read_parts(further, parts - len(further), one.steps, len(plan.batches))
    return replace(one, steps=steps, cuts=cuts, splits=read_splits(plan.parts.pieces, len(plan.batches)))


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


def _split_plan(found: SplitWindow, sizes: NDArray[np.int64], num_batches: int, seconds: float) -> RoundPlan:
    first = np.diff(found.samples, prepend=-1) > 0
    steps = None if found.steps is None else found.steps[first]
    sums = [sizes.sum()] if steps is None else np.bincount(steps, sizes, num_batches).tolist()
    return RoundPlan(
        destinations=found.destinations,
        steps=found.steps,
        parts=found.parts,
        loads_before=np.array([batch.home_loads for batch in found.batches], np.float64),
        loads_after=np.array([batch.loads for batch in found.batches], np.float64),
        batches=tuple(_split_figures(batch, int(size)) for batch, size in zip(found.batches, sums, strict=True)),
        seconds=seconds,
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
