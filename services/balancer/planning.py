"""From the submissions of a complete round to its plan. Runs in worker threads; pure but for the stopwatch."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning import ImpossiblePartitionError, Partition, PartitionError, partition
from evenkeel.partitioning.slices import plan_digest, slice_plan
from evenkeel.partitioning.windows import partition_window, slice_window
from services.balancer.decisions import Plan, PlanFailure, Reason, Summary, WindowParts
from services.balancer.effects import PlanInput
from services.balancer.submissions import Submission

_FEW_FIELDS = 8  # up to which sums over a row are fastest column by column


def make_plan(inputs: PlanInput) -> Plan | PlanFailure:
    """Partitions the samples of a round and cuts the plan into the ranks' slices.

    The samples of a round are ordered by home rank, then by their index at home.
    """
    started = time.perf_counter()
    submissions, options = inputs.submissions, inputs.options
    num_ranks = len(submissions)
    counts_at_home = np.fromiter((s.num_samples for s in submissions), np.int32, num_ranks)
    homes = np.repeat(np.arange(num_ranks, dtype=np.int32), counts_at_home)
    costs = _joined_costs(submissions)
    lengths = np.concatenate([s.lengths for s in submissions])
    sizes = _joined_sizes(submissions, lengths)
    caps = np.array(options.memory_caps) if options.memory_caps else None
    how: _Options = {
        "strategy": options.strategy,
        "sizes": sizes,
        "counts": options.counts,
        "tolerance": options.tolerance,
        "speeds": np.array(options.speeds) if options.speeds else None,
        "memory": _joined_memory(submissions) if caps is not None else None,
        "memory_caps": caps,
        "nodes": _numbered(inputs.nodes),
    }
    try:
        if inputs.window == 1:
            result = partition(costs, homes, num_ranks, **how)
        else:
            loaded = _joined_steps(submissions)
            window = partition_window(costs, homes, loaded, num_ranks, inputs.window, **how)
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


def _joined_steps(submissions: tuple[Submission, ...]) -> NDArray[np.int32]:
    """The batch of the window in which each sample was loaded."""
    return np.concatenate([np.repeat(np.arange(len(s.sizes_by_batch), dtype=np.int32), s.sizes_by_batch)
                           for s in submissions])  # fmt: skip


def _joined_costs(submissions: tuple[Submission, ...]) -> NDArray[np.int64] | NDArray[np.float64]:
    """Integer costs stay integers unless some rank's are floating."""
    return np.concatenate([s.costs for s in submissions])


def _joined_sizes(submissions: tuple[Submission, ...], lengths: NDArray[np.uint32]) -> NDArray[np.int64]:
    if all(s.sizes is None for s in submissions):
        return _row_sums(lengths)
    return np.concatenate(
        [s.sizes if s.sizes is not None else s.lengths.sum(axis=1, dtype=np.int64) for s in submissions]
    )


def _row_sums(lengths: NDArray[np.uint32]) -> NDArray[np.int64]:
    num_fields = lengths.shape[1]
    if not 0 < num_fields <= _FEW_FIELDS:
        return np.asarray(np.einsum("ij->i", lengths, dtype=np.int64))
    sums = lengths[:, 0].astype(np.int64)
    for field in range(1, num_fields):
        sums += lengths[:, field]
    return sums


def _joined_memory(submissions: tuple[Submission, ...]) -> NDArray[np.float64]:
    return np.concatenate([s.memory if s.memory is not None else np.zeros(s.num_samples) for s in submissions])


def _numbered(nodes: tuple[str, ...]) -> NDArray[np.int32] | None:
    """Hosts numbered in order of appearance; None when there is at most one."""
    numbers: dict[str, int] = {}
    numbered = [numbers.setdefault(node, len(numbers)) for node in nodes]
    return np.array(numbered, np.int32) if len(numbers) > 1 else None
