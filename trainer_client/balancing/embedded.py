"""Rounds without a service: what a plan needs is gathered over the job's own group, and every rank makes the plan."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning import PartitionError
from evenkeel.partitioning.divisible import WIDTH
from evenkeel.partitioning.rounds import RankPlan, plan_round
from evenkeel.partitioning.samples import RankSamples, RoundSamples
from evenkeel.partitioning.speeds import ALL_EQUAL, LearnedSpeeds
from trainer_client.balancing.agreement import Mode, Reason, decide
from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.groups import Groups
from trainer_client.balancing.options import BalanceOptions
from trainer_client.balancing.positions import plain_window
from trainer_client.balancing.report import report_round
from trainer_client.balancing.resume import check_resumed
from trainer_client.balancing.tickets import Outcome, Ticket
from trainer_client.balancing.votes import Vote, batch_votes

logger = logging.getLogger(__name__)


def balance_embedded(
    samples: RankSamples,
    votes: list[Vote],
    groups: Groups,
    options: BalanceOptions,
    nodes: NDArray[np.int32] | None,
    *,
    learned: LearnedSpeeds = ALL_EQUAL,
    stay: bool = False,
) -> RankPlan | PartitionError:
    """Gathers all ranks' samples and partitions them. Collective; the plan is the same on all ranks, failure included.

    Args:
        samples: This rank's.
        votes: The votes of the round: they tell how many samples each rank holds and in which type its costs are.
        groups: The stream's groups; one collective on `control`, two where samples may be split.
        options: Rank 0's options.
        nodes: (world size,) host of each rank.
        learned: What is known of the ranks' speeds.
        stay: Nothing is balanced; only `min_samples` makes samples move, and without regard to memory.

    Returns:
        What this rank knows of the plan, or the error when no assignment within the memory caps was found.
    """
    as_float, with_memory = any(vote.costs_float for vote in votes), options.memory_caps is not None
    own = samples.rows(as_float=as_float, with_memory=with_memory)
    gathered = groups.gather_bytes(
        own.view(np.uint8).reshape(-1), [vote.samples * own.shape[1] * own.itemsize for vote in votes]
    )
    tables: list[bytes] = []
    if options.split is not None and not stay and any(vote.divisible for vote in votes):
        offered = np.zeros((0, WIDTH)) if samples.divisible is None else samples.divisible
        tables = groups.gather_bytes(
            offered.view(np.uint8).reshape(-1), [vote.divisible * WIDTH * offered.itemsize for vote in votes]
        )
    started = time.perf_counter()
    everyone = RoundSamples.of_rows(
        gathered,
        np.array([[one.samples for one in vote.batches] or [vote.samples] for vote in votes], np.int64),
        nodes,
        num_fields=samples.lengths.shape[1],
        as_float=as_float,
        with_memory=with_memory,
        with_given=samples.given is not None,
        divisible=tables,
        roles=samples.roles,
    )
    how = replace(options.of_rounds, learned=learned) if learned else options.of_rounds
    try:
        plan = plan_round(everyone, how.spreading() if stay else how)
    except PartitionError as error:
        return error
    return plan.of(groups.rank, time.perf_counter() - started)


def decide_alone(name: str, ticket: Ticket, options: BalanceOptions, template: FlatBatch) -> Outcome:
    """The outcome in a world of one rank, which agrees with itself."""
    check_resumed(name, [ticket.resumed])
    costs, samples = ticket.samples.costs, ticket.samples
    vote = Vote(
        round=ticket.round, samples=len(costs), exhausted=ticket.exhausted, drop_last=ticket.drop_last,
        load=float(costs.sum()), heaviest=float(costs.max(initial=0)), num_batches=len(samples.batch_sizes),
        batches=batch_votes(samples, [0] * options.window),
    )  # fmt: skip
    half = None if ticket.resumed is None else ticket.resumed.half
    verdict = decide(
        [vote], waited=False, has_service=False, balance=False, fallback="identity", min_samples=options.min_samples,
        left=None if half is None else half.left,
    )  # fmt: skip
    if half is not None:
        verdict = replace(verdict, moved=False, last=half.last)
    if verdict.mode is Mode.IDENTITY:
        verdict = replace(verdict, reason=_caps_kept(ticket, options))
    plan = RankPlan.staying(0, samples, options.window)
    reports = report_round(ticket, [vote], verdict, plan=plan, rank=0, options=options, wait_seconds=0.0)
    # a batch without samples may have other fields than those before it
    nothing = ticket.flats[0].empty() if ticket.flats and not len(costs) else template
    window = plain_window(samples, plan, size=options.window, last=verdict.last) if options.window > 1 else None
    return Outcome(verdict=verdict, plan=plan, reports=reports, template=nothing, window=window)


def _caps_kept(ticket: Ticket, options: BalanceOptions) -> Reason:
    memory, samples = ticket.samples.memory, ticket.samples
    if memory is None or options.memory_caps is None:
        return Reason.NONE
    most = max((float(memory[samples.in_batch(batch)].sum()) for batch in range(len(samples.batch_sizes))), default=0.0)
    if most <= options.memory_caps[0]:
        return Reason.NONE
    logger.warning(
        "round %d stays as loaded: its batch takes %g of memory, the cap of the only rank is %g",
        ticket.round, most, options.memory_caps[0],
    )  # fmt: skip
    return Reason.PARTITION_FAILED
