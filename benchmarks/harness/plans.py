"""Plans of the balancer's rounds, made in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from services.balancer.decisions import PlanFailure
from services.balancer.effects import PlanInput
from services.balancer.submissions import Submission
from services.balancer.workers.arena import columns_of
from services.balancer.workers.worker import plan_or_failure

from evenkeel.partitioning.rounds import RoundPlan
from evenkeel.partitioning.samples import RankSamples, RoundSamples


def said(samples: RankSamples | Sequence[RankSamples], *ranks: int, window: int = 1, **others: Any) -> Submission:
    """The submission of ranks that say this of their samples, a `RankSamples` each."""
    parts = [samples] if isinstance(samples, RankSamples) else samples
    none = (0,) * window
    joined = RoundSamples.joined(
        [
            RoundSamples(
                batch_sizes=np.array([(part.sizes_by_batch + none)[:window]], np.int64), costs=part.costs,
                lengths=part.lengths, sizes=part.sizes, memory=part.memory, divisible=part.divisible,
            )
            for part in parts
        ]
    )  # fmt: skip
    return Submission(ranks=ranks or tuple(range(len(parts))), samples=joined, **others)


def make_plan(inputs: PlanInput) -> RoundPlan | PlanFailure:
    """Partitions the samples of a round as a worker does, without a message to one."""
    samples = RoundSamples(**{name: column.joined() for name, column in columns_of(inputs).items()})
    return plan_or_failure(samples, inputs.options)
