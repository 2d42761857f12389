"""From the submissions of a complete round to its plan, by the core that the ranks plan by too."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning import ImpossiblePartitionError, PartitionError
from evenkeel.partitioning.rounds import RoundOptions, RoundPlan, digest_of, plan_round
from evenkeel.partitioning.samples import Column, RoundSamples
from services.balancer.decisions import PlanFailure, Reason
from services.balancer.effects import PlanInput


def columns_of(inputs: PlanInput) -> dict[str, Column]:
    """The arrays of a round's samples by name, not joined yet: whoever joins them says where."""
    return RoundSamples.columns(
        [submission.samples for submission in inputs.submissions],
        inputs.window,
        _numbered(inputs.nodes),
        with_memory=bool(inputs.options.memory_caps),
    )


def make_plan(inputs: PlanInput) -> RoundPlan | PlanFailure:
    """Partitions the samples of a round in this process, as a worker does in its own."""
    samples = RoundSamples(**{name: column.joined() for name, column in columns_of(inputs).items()})
    return plan_or_failure(samples, inputs.options)


def plan_or_failure(samples: RoundSamples, options: RoundOptions) -> RoundPlan | PlanFailure:
    """The plan of a round with its digest and the time it took, or why there is none."""
    started = time.perf_counter()
    try:
        plan = plan_round(samples, options)
    except ImpossiblePartitionError as error:
        return PlanFailure(reason=Reason.NOT_FOUND, detail=f"impossible, {error.shortfall:.6g} short: {error}")
    except PartitionError as error:
        return PlanFailure(reason=Reason.NOT_FOUND, detail=f"not found: {error}")
    except ValueError as error:
        return PlanFailure(reason=Reason.PARTITION_FAILED, detail=str(error))
    digest = digest_of(plan, samples)
    return replace(plan, digest=digest, seconds=time.perf_counter() - started)


def _numbered(nodes: tuple[str, ...]) -> NDArray[np.int32] | None:
    """Hosts numbered in order of appearance; None when there is at most one."""
    numbers: dict[str, int] = {}
    numbered = [numbers.setdefault(node, len(numbers)) for node in nodes]
    return np.array(numbered, np.int32) if len(numbers) > 1 else None
