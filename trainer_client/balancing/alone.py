"""Rounds in a world of one rank, which agrees with itself."""

from __future__ import annotations

import logging
from dataclasses import replace

from trainer_client.balancing.agreement import Mode, Reason, decide
from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.casting import batch_votes
from trainer_client.balancing.embedded import stay_home
from trainer_client.balancing.options import BalanceOptions
from trainer_client.balancing.reporting import report_round
from trainer_client.balancing.tickets import Outcome, Ticket
from trainer_client.balancing.votes import Vote

logger = logging.getLogger(__name__)


def decide_alone(ticket: Ticket, options: BalanceOptions, template: FlatBatch) -> Outcome:
    """The outcome in a world of one rank."""
    costs, data = ticket.data.costs, ticket.data
    vote = Vote(
        round=ticket.round, samples=len(costs), exhausted=ticket.exhausted, drop_last=ticket.drop_last,
        load=float(costs.sum()), heaviest=float(costs.max(initial=0)), num_batches=len(data.batch_sizes),
        batches=batch_votes(data, [0] * options.window),
    )  # fmt: skip
    verdict = decide(
        [vote], waited=False, has_service=False, balance=False, fallback="identity", min_samples=options.min_samples
    )
    if verdict.mode is Mode.IDENTITY:
        verdict = replace(verdict, reason=_caps_kept(ticket, options))
    piece = stay_home(0, data, options.window)
    reports = report_round(
        ticket, [vote], verdict, piece=piece, rank=0, options=options, plan=None, balances=(), wait_seconds=0.0
    )
    # a batch without samples may have other fields than those before it
    nothing = ticket.flats[0].empty() if ticket.flats and not len(costs) else template
    return Outcome(verdict=verdict, piece=piece, reports=reports, template=nothing)


def _caps_kept(ticket: Ticket, options: BalanceOptions) -> Reason:
    data = ticket.data
    if data.memory is None or options.memory_caps is None:
        return Reason.NONE
    most = max((float(data.memory[data.in_batch(batch)].sum()) for batch in range(len(data.batch_sizes))), default=0.0)
    if most <= options.memory_caps[0]:
        return Reason.NONE
    logger.warning(
        "round %d stays as loaded: its batch takes %g of memory, the cap of the only rank is %g",
        ticket.round, most, options.memory_caps[0],
    )  # fmt: skip
    return Reason.PARTITION_FAILED
