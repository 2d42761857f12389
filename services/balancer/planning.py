"""From the submissions of a complete round to its plan: pure but for the stopwatch."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning import ImpossiblePartitionError, Partition, PartitionError, partition
from evenkeel.partitioning.slices import plan_digest, slice_plan
from evenkeel.partitioning.windows import partition_window, slice_window
from services.balancer.decisions import Plan, PlanFailure, Reason, Summary, WindowParts
from services.balancer.effects import PlanInput
from services.balancer.submissions import PlanOptions, Submission

_FEW_FIELDS = 8  # up to which sums over a row are fastest column by column
CHEAP_STRATEGY = "lpt"
"""What a round gets whose own search would not end in time; the samples of a window stay in their batches then."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Round:
    """The samples of all ranks, ordered by home rank, then by their index at home.

    Attributes:
        options: how to partition.
        window: batches of the round.
        counts_at_home: (ranks,) int32, samples of each rank.
        costs: (n,) int64 or float64.
        lengths: (n, jagged fields) uint32.
        sizes: (n,) int64 or None, the sum of its lengths.
        memory: (n,) float64 or None, what the caps count.
        nodes: (ranks,) int32, number of each rank's host; None when there is at most one.
        batch_sizes: (ranks, window) int64, samples of each of a rank's batches; None without a window.
    """

    options: PlanOptions
    window: int
    counts_at_home: NDArray[np.int32]
    costs: NDArray[np.int64] | NDArray[np.float64]
    lengths: NDArray[np.uint32]
    sizes: NDArray[np.int64] | None = None
    memory: NDArray[np.float64] | None = None
    nodes: NDArray[np.int32] | None = None
    batch_sizes: NDArray[np.int64] | None = None


Pieces = tuple[np.dtype[Any], tuple[int, ...], list[NDArray[Any]]]
"""An array as dtype, shape and the pieces that it is joined of along the first dimension."""


def pieces_of(inputs: PlanInput) -> dict[str, Pieces]:
    """The arrays of a `Round` by name, not joined yet: whoever joins them says where."""
    submissions = inputs.submissions
    num_ranks = len(submissions)
    counts = np.fromiter((s.num_samples for s in submissions), np.int32, num_ranks)
    n = int(counts.sum(dtype=np.int64))
    costs = [s.costs for s in submissions]
    # Integer costs stay integers unless some rank's are floating.
    costs_dtype = np.dtype(np.float64 if any(array.dtype.kind == "f" for array in costs) else np.int64)
    num_fields = submissions[0].lengths.shape[1]
    pieces: dict[str, Pieces] = {
        "counts_at_home": (counts.dtype, counts.shape, [counts]),
        "costs": (costs_dtype, (n,), list(costs)),
        "lengths": (np.dtype(np.uint32), (n, num_fields), [s.lengths for s in submissions]),
    }
    if any(s.sizes is not None for s in submissions):
        sizes = [s.sizes if s.sizes is not None else s.lengths.sum(axis=1, dtype=np.int64) for s in submissions]
        pieces["sizes"] = (np.dtype(np.int64), (n,), sizes)
    if inputs.options.memory_caps:
        memory = [s.memory if s.memory is not None else np.zeros(s.num_samples) for s in submissions]
        pieces["memory"] = (np.dtype(np.float64), (n,), memory)
    nodes = _numbered(inputs.nodes)
    if nodes is not None:
        pieces["nodes"] = (nodes.dtype, nodes.shape, [nodes])
    if inputs.window > 1:
        batches = _batch_sizes(submissions, inputs.window)
        pieces["batch_sizes"] = (batches.dtype, batches.shape, [batches])
    return pieces


def make_plan(inputs: PlanInput) -> Plan | PlanFailure:
    """Partitions the samples of a round in this process, as a worker does in its own."""
    arrays: dict[str, Any] = {
        name: np.concatenate(parts, dtype=dtype) if shape[0] else np.empty(shape, dtype)
        for name, (dtype, shape, parts) in pieces_of(inputs).items()
    }
    return plan_round(Round(options=inputs.options, window=inputs.window, **arrays))


def cheaper(inputs: Round) -> Round:
    """The same round with the cheapest search that there is."""
    return replace(inputs, options=replace(inputs.options, strategy=CHEAP_STRATEGY))


def plan_round(inputs: Round, *, meet: bool = True) -> Plan | PlanFailure:
    """Partitions the samples of a round and cuts the plan into the ranks' slices.

    Args:
        inputs: the round.
        meet: whether the samples of a window may change their batch.
    """
    started = time.perf_counter()
    options, costs, lengths, counts_at_home = inputs.options, inputs.costs, inputs.lengths, inputs.counts_at_home
    num_ranks = counts_at_home.size
    homes = np.repeat(np.arange(num_ranks, dtype=np.int32), counts_at_home)
    sizes = _row_sums(lengths) if inputs.sizes is None else inputs.sizes
    how: _Options = {
        "strategy": options.strategy,
        "sizes": sizes,
        "counts": options.counts,
        "tolerance": options.tolerance,
        "speeds": np.array(options.speeds) if options.speeds else None,
        "memory": inputs.memory,
        "memory_caps": np.array(options.memory_caps) if options.memory_caps else None,
        "nodes": inputs.nodes,
        "min_samples": options.min_samples,
    }
    try:
        if inputs.window == 1:
            result = partition(costs, homes, num_ranks, **how)
        else:
            loaded = _steps_of(inputs)
            window = partition_window(costs, homes, loaded, num_ranks, inputs.window, meet=meet, **how)
    except ImpossiblePartitionError as error:
        return PlanFailure(reason=Reason.NOT_FOUND, detail=f"impossible, {error.shortfall:.6g} short: {error}")
    except PartitionError as error:
        return PlanFailure(reason=Reason.NOT_FOUND, detail=f"not found: {error}")
    except ValueError as error:
        return PlanFailure(reason=Reason.PARTITION_FAILED, detail=str(error))
    if inputs.window == 1:
        slices = slice_plan(result.destinations, counts_at_home, lengths)
        digest = plan_digest(result.destinations, counts_at_home, lengths)
        return Plan(
            slices=slices,
            digest=digest,
            loads_before=np.asarray(result.home_loads, np.float64),
            loads_after=np.asarray(result.loads, np.float64),
            summary=_summary(result, sizes, started),
        )
    slices = slice_plan(window.destinations, counts_at_home, lengths)
    cuts, digest = slice_window(window, counts_at_home, lengths)
    before = np.array(
        [np.bincount(homes[loaded == k], costs[loaded == k], num_ranks) for k in range(inputs.window)], np.float64
    )
    summaries = tuple(
        # as loaded: the samples of the batch at their homes were others
        replace(
            _summary(part, sizes[window.steps == k], started),
            max_load_before=float(before[k].max()),
            imbalance_before=_imbalance(before[k], how["speeds"]),
        )
        for k, part in enumerate(window.partitions)
    )
    worst = max(range(inputs.window), key=lambda k: summaries[k].imbalance_after)
    return Plan(
        slices=slices,
        digest=digest,
        loads_before=before[worst],
        loads_after=np.asarray(window.partitions[worst].loads, np.float64),
        summary=replace(
            summaries[worst],
            samples=sum(s.samples for s in summaries),
            moved_samples=sum(s.moved_samples for s in summaries),
            size=sum(s.size for s in summaries),
            moved_size=sum(s.moved_size for s in summaries),
            moved_size_between_nodes=sum(s.moved_size_between_nodes for s in summaries),
        ),
        window=WindowParts(
            steps=window.steps,
            home_begin=np.concatenate([[0], np.cumsum(counts_at_home, dtype=np.int64)]),
            cuts=cuts,
            loads_before=before,
            loads_after=np.array([part.loads for part in window.partitions], np.float64),
            summaries=summaries,
        ),
    )


class _Options(TypedDict):
    strategy: str
    sizes: NDArray[np.int64]
    counts: str
    tolerance: float
    speeds: NDArray[np.float64] | None
    memory: NDArray[np.float64] | None
    memory_caps: NDArray[np.float64] | None
    nodes: NDArray[np.int32] | None
    min_samples: int


def _summary(result: Partition, sizes: NDArray[np.int64], started: float) -> Summary:
    return Summary(
        mean_load=float(np.asarray(result.loads, np.float64).mean()),
        max_load_before=float(result.home_loads.max()),
        max_load_after=float(result.loads.max()),
        imbalance_before=float(result.home_imbalance),
        imbalance_after=float(result.imbalance),
        lower_bound=float(result.lower_bound),
        samples=len(result.destinations),
        moved_samples=int(result.moved_samples),
        size=int(sizes.sum()),
        moved_size=round(result.moved_size),
        moved_size_between_nodes=round(result.moved_size_between_nodes),
        partition_seconds=time.perf_counter() - started,
    )


def _imbalance(loads: NDArray[np.float64], speeds: NDArray[np.float64] | None) -> float:
    times = loads if speeds is None else loads / speeds
    return float(times.max() / times.mean()) if times.any() else 1.0


def _batch_sizes(submissions: tuple[Submission, ...], window: int) -> NDArray[np.int64]:
    sizes = np.zeros((len(submissions), window), np.int64)
    for row, submission in zip(sizes, submissions, strict=True):
        row[: len(submission.sizes_by_batch)] = submission.sizes_by_batch
    return sizes


def _steps_of(inputs: Round) -> NDArray[np.int32]:
    """The batch of the window in which each sample was loaded."""
    assert inputs.batch_sizes is not None
    batches = np.tile(np.arange(inputs.window, dtype=np.int32), inputs.counts_at_home.size)
    return np.repeat(batches, inputs.batch_sizes.ravel())


def _row_sums(lengths: NDArray[np.uint32]) -> NDArray[np.int64]:
    num_fields = lengths.shape[1]
    if not 0 < num_fields <= _FEW_FIELDS:
        return np.asarray(np.einsum("ij->i", lengths, dtype=np.int64))
    sums = lengths[:, 0].astype(np.int64)
    for field in range(1, num_fields):
        sums += lengths[:, field]
    return sums


def _numbered(nodes: tuple[str, ...]) -> NDArray[np.int32] | None:
    """Hosts numbered in order of appearance; None when there is at most one."""
    numbers: dict[str, int] = {}
    numbered = [numbers.setdefault(node, len(numbers)) for node in nodes]
    return np.array(numbered, np.int32) if len(numbers) > 1 else None
