"""What people are shown of a round, made by the worker that planned it and sent back beside the response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from evenkeel.partitioning.rounds import Figures, RoundOptions, RoundPlan, RoundSamples
from evenkeel.protocol.plan_round import RoundNames, RunFacts


@dataclass(frozen=True, kw_only=True, eq=False)  # without slots: it is pickled in half the time
class RoundSummary:
    """A planned round without its samples.

    Attributes:
        names: Which round of which job.
        facts: What the lead has seen since the run began.
        ranks: Number of ranks.
        batches: Batches of the round.
        strategy: How it was planned.
        figures: Of the least even batch, with the samples and sizes of all.
        loads_before: (ranks,), summed cost of that batch as loaded; a list, which is pickled faster than an array.
        loads_after: (ranks,), the same as planned.
        saved_steps: By how much the largest load over the mean falls, summed over the batches: in steps of the mean
            load, what each rank waits less.
        seconds: That the search took.
    """

    names: RoundNames
    facts: RunFacts
    ranks: int
    batches: int
    strategy: str
    figures: Figures
    loads_before: list[float]
    loads_after: list[float]
    saved_steps: float
    seconds: float


class Observer(Protocol):
    """Who is told of each call, on the event loop: it must return at once."""

    def planned(self, summary: RoundSummary, seconds: float) -> None:
        """A round was planned; the call took so many seconds."""

    def failed(self, job: str, status: str, reason: str, seconds: float) -> None:
        """A call failed.

        Args:
            job: As the call's metadata name it; empty where they do not.
            status: Name of the gRPC status, such as `INVALID_ARGUMENT`.
            reason: A word of few, fit for a metric's label.
            seconds: That the call took.
        """


def summarize(
    names: RoundNames, samples: RoundSamples, options: RoundOptions, facts: RunFacts, plan: RoundPlan
) -> RoundSummary:
    """The summary of a round and its plan."""
    worst = plan.worst
    return RoundSummary(
        names=names,
        facts=facts,
        ranks=samples.num_ranks,
        batches=samples.num_batches,
        strategy=options.strategy,
        figures=plan.figures,
        loads_before=plan.loads_before[worst].tolist(),
        loads_after=plan.loads_after[worst].tolist(),
        saved_steps=sum(each.imbalance_before - each.imbalance_after for each in plan.batches),
        seconds=plan.seconds,
    )
