"""Rounds in a world of one rank, which agrees with itself."""

from __future__ import annotations

from trainer_client.balancing.agreement import Mode, Reason, Verdict
from trainer_client.balancing.casting import batch_votes
from trainer_client.balancing.embedded import stay_home
from trainer_client.balancing.options import BalanceOptions
from trainer_client.balancing.reporting import report_round
from trainer_client.balancing.tickets import Outcome, Ticket
from trainer_client.balancing.votes import Vote
from trainer_client.batches import FlatBatch


def decide_alone(ticket: Ticket, options: BalanceOptions, template: FlatBatch) -> Outcome:
    """The outcome in a world of one rank."""
    costs, data = ticket.data.costs, ticket.data
    vote = Vote(
        round=ticket.round, samples=len(costs), exhausted=ticket.exhausted, load=float(costs.sum()),
        heaviest=float(costs.max(initial=0)), num_batches=len(data.batch_sizes),
        batches=batch_votes(data, [0] * options.window),
    )  # fmt: skip
    ended = ticket.exhausted and not len(costs)
    verdict = Verdict(mode=Mode.END if ended else Mode.IDENTITY, reason=Reason.NONE)
    piece = stay_home(0, data, options.window)
    reports = report_round(
        ticket, [vote], verdict, piece=piece, rank=0, options=options, plan=None, balances=(), wait_seconds=0.0
    )
    return Outcome(verdict=verdict, piece=piece, reports=reports, template=template)
