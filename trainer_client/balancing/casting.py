"""From what a rank holds to what it says: its submission to the service, and its vote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from evenkeel.partitioning.samples import RankSamples
from trainer_client.balancing.batches import FlatBatch, Schema
from trainer_client.balancing.options import BalanceOptions
from trainer_client.balancing.tickets import Ticket, read_nothing
from trainer_client.balancing.votes import BatchVote, Held, Vote, transfer_checksum

if TYPE_CHECKING:  # grpcio is needed only where a service is
    from trainer_client.balancing.service import Connection, ServiceDecision


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """This rank has left its loop.

    Attributes:
        pass_number: The pass.
        taken: Batches that the loop had got.
        out_of_turn: It took them in another order than it submitted them.
    """

    pass_number: int
    taken: int
    out_of_turn: bool


def send(connection: Connection, ticket: Ticket, options: BalanceOptions) -> None:
    """Submits a round to the service."""
    connection.submit(
        ticket.round,
        ticket.samples,
        exhausted=ticket.exhausted,
        timeout_ms=_timeout_ms(options),
        traceparent="" if ticket.trace is None else ticket.trace.traceparent,
    )


def send_nothing(connection: Connection, round_number: int, template: FlatBatch, options: BalanceOptions) -> None:
    """Submits a round without samples, so that the others do not wait for this rank at the service."""
    nothing = read_nothing(template.empty(), np.dtype(np.int64), capped=options.memory_caps is not None)
    connection.submit(round_number, nothing, exhausted=True, timeout_ms=_timeout_ms(options))


def _timeout_ms(options: BalanceOptions) -> int:
    # The service gives up first, so that its answer still arrives in time.
    return max(1, int(750 * options.timeout.total_seconds()))


def vote_on(ticket: Ticket, decision: ServiceDecision | None, *, window: int, ready: bool, schema: Schema) -> Vote:
    """The vote on a submitted round.

    Args:
        ticket: The round.
        decision: What this rank holds of the service's decision.
        window: Batches of a round.
        ready: This rank's stream to the service is joined.
        schema: Of its batches, or what a rank without samples takes them to be.
    """
    held, checksum = Held.NOTHING, 0
    received = [0] * window
    if decision is not None:
        plan = decision.plan
        if plan is not None:
            held = Held.BALANCED
            for batch, piece in enumerate(plan.slices):
                checksum += transfer_checksum(piece, plan.sent_in(ticket.samples, batch), batch)
                received[batch] = int(piece.source_counts.sum())
            checksum &= (1 << 64) - 1
        else:
            held = Held.IDENTITY if decision.final else Held.UNDECIDED
    costs = ticket.samples.costs
    return Vote(
        round=ticket.round,
        pass_number=ticket.pass_number,
        held=held,
        instance=decision.instance if decision else 0,
        digest=decision.digest if decision else 0,
        moved=decision.moved_samples if decision else 0,
        checksum=checksum,
        samples=len(costs),
        exhausted=ticket.exhausted,
        drop_last=ticket.drop_last,
        asked=ticket.asked,
        ready=ready,
        costs_valid=not ticket.problem,
        costs_float=costs.dtype == np.float64,
        schema=int.from_bytes(schema.hash[:8], "little"),
        load=float(costs.sum()),
        heaviest=float(costs.max(initial=0)),
        resumed=0 if ticket.resumed is None else ticket.resumed.token,
        num_batches=len(ticket.samples.batch_sizes),
        batches=batch_votes(ticket.samples, received),
    )


def vote_to_leave(leaving: Leaving, round_number: int, *, window: int, ready: bool) -> Vote:
    """The vote of a rank that has left its loop on the first round that it did not submit."""
    return Vote(
        round=round_number,
        pass_number=leaving.pass_number,
        left=True,
        out_of_turn=leaving.out_of_turn,
        taken=leaving.taken,
        ready=ready,
        batches=(BatchVote(),) * window if window > 1 else (),
    )


def batch_votes(samples: RankSamples, received: Sequence[int]) -> tuple[BatchVote, ...]:
    """The part of a vote that is about each batch of a window; empty without windows.

    Args:
        samples: This rank's.
        received: Per batch of the window, how many samples this rank would train.
    """
    if len(received) == 1:
        return ()
    votes = []
    for batch, count in enumerate(received):
        costs = samples.costs[samples.in_batch(batch)]
        votes.append(
            BatchVote(samples=len(costs), received=count, load=float(costs.sum()), heaviest=float(costs.max(initial=0)))
        )
    return tuple(votes)
