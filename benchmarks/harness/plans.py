"""Plans of the balancer's rounds, made in this process."""

from __future__ import annotations

from evenkeel.partitioning.rounds import RoundPlan
from evenkeel.partitioning.samples import RoundSamples
from services.balancer.decisions import PlanFailure
from services.balancer.effects import PlanInput
from services.balancer.workers.arena import columns_of
from services.balancer.workers.worker import plan_or_failure


def make_plan(inputs: PlanInput) -> RoundPlan | PlanFailure:
    """Partitions the samples of a round as a worker does, without a message to one."""
    samples = RoundSamples(**{name: column.joined() for name, column in columns_of(inputs).items()})
    return plan_or_failure(samples, inputs.options)
