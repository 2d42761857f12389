"""From decisions, refusals and statistics to the wire's messages."""

from __future__ import annotations

from functools import lru_cache

from evenkeel.protocol import balancer_pb2 as pb
from services.balancer.decisions import Decision, Outcome, Plan, Reason, Summary
from services.balancer.limits import Limits
from services.balancer.refusals import Refusal, shorten
from services.balancer.session import Session


def error_message(refusal: Refusal) -> pb.Error:
    """A refusal as the wire says it."""
    return pb.Error(
        code=int(refusal.code),  # type: ignore[arg-type]
        field=refusal.field,
        value=refusal.value,
        remedy=refusal.remedy,
        message=refusal.message,
        fatal=refusal.fatal,
    )


def answer_message(instance: int, round_number: int, rank: int, result: Decision | Refusal) -> pb.Answer:
    """A round's outcome as one rank is told it."""
    if isinstance(result, Refusal):
        return pb.Answer(round=round_number, rank=rank, error=error_message(result))
    return pb.Answer(round=round_number, rank=rank, decision=_decision_message(instance, rank, result))


def limits_message(limits: Limits, max_message_bytes: int) -> pb.Limits:
    """What a client must keep to."""
    return pb.Limits(
        max_ranks=limits.max_ranks,
        max_samples_per_rank=limits.max_samples_per_rank,
        max_rounds_ahead=limits.max_rounds_ahead,
        max_message_bytes=max_message_bytes,
        max_sessions=limits.max_sessions,
    )


def statistics_message(session: Session, now: float, joined_ranks: int) -> pb.SessionStats:
    """What has become of a session's rounds."""
    statistics = session.statistics
    message = pb.SessionStats(
        job=session.id.key.job,
        group=session.id.key.group,
        loader=session.id.key.loader,
        run_id=session.id.run_id,
        restart_count=session.id.restart_count,
        world_size=session.terms.world_size,
        joined_ranks=joined_ranks,
        last_round=statistics.last_round,
        rounds_balanced=statistics.balanced,
        rounds_identity={reason_name(reason): count for reason, count in statistics.identity.items()},
        seconds_since_last_message=max(0.0, now - session.last_message_at),
        mean_round_wait_seconds=statistics.mean_wait,
    )
    if statistics.last_balance is not None:
        summary, before, after = statistics.last_balance
        message.last_balance.CopyFrom(balance_message(summary))
        message.last_loads_before = before.astype("<f8").tobytes()
        message.last_loads_after = after.astype("<f8").tobytes()
    return message


def reason_name(reason: Reason) -> str:
    """The reason as labels and statistics spell it."""
    return reason.name.lower()


def _decision_message(instance: int, rank: int, decision: Decision) -> pb.Decision:
    plan = decision.plan
    if plan is None:
        return pb.Decision(
            instance=instance,
            outcome=int(decision.outcome),  # type: ignore[arg-type]
            reason=int(decision.reason),  # type: ignore[arg-type]
            detail=shorten(decision.detail, 512),
            missing_ranks=decision.missing_ranks,
            digest=decision.digest,
        )
    own, window = plan.slices[rank], plan.window
    pieces = [own] if window is None else [cut[rank] for cut in window.cuts]
    message = pb.Decision(
        destinations=own.destinations.astype("<i4", copy=False).tobytes(),
        sources=b"".join(piece.sources.astype("<i4", copy=False).tobytes() for piece in pieces),
        source_counts=b"".join(piece.source_counts.astype("<i4", copy=False).tobytes() for piece in pieces),
        source_totals=b"".join(piece.source_totals.astype("<i8", copy=False).tobytes() for piece in pieces),
        balance=pb.Balance(own_load_before=plan.loads_before[rank], own_load_after=plan.loads_after[rank]),
    )
    message.MergeFromString(_shared_bytes(instance, plan))
    if window is not None:
        steps = window.steps[window.home_begin[rank] : window.home_begin[rank + 1]]
        message.destination_steps = steps.astype("<i4", copy=False).tobytes()
        message.source_groups.extend(len(piece.sources) for piece in pieces)
        for batch, summary in enumerate(window.summaries):
            balance = balance_message(summary)
            balance.own_load_before = window.loads_before[batch, rank]
            balance.own_load_after = window.loads_after[batch, rank]
            message.batch_balances.append(balance)
    return message


@lru_cache(maxsize=4)
def _shared_bytes(instance: int, plan: Plan) -> bytes:
    """What all ranks of a plan are told alike."""
    return pb.Decision(
        instance=instance,
        outcome=int(Outcome.BALANCED),  # type: ignore[arg-type]
        digest=plan.digest,
        detail=plan.detail,
        balance=balance_message(plan.summary),
    ).SerializeToString()


def balance_message(summary: Summary) -> pb.Balance:
    """How even a round, or a batch of a window, is."""
    return pb.Balance(
        mean_load=summary.mean_load,
        max_load_before=summary.max_load_before,
        max_load_after=summary.max_load_after,
        imbalance_before=summary.imbalance_before,
        imbalance_after=summary.imbalance_after,
        lower_bound=summary.lower_bound,
        samples=summary.samples,
        moved_samples=summary.moved_samples,
        size=summary.size,
        moved_size=summary.moved_size,
        moved_size_between_nodes=summary.moved_size_between_nodes,
        partition_seconds=summary.partition_seconds,
    )
