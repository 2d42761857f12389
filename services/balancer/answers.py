"""From refusals, limits, statistics and figures to the wire's messages."""

from __future__ import annotations

from evenkeel.partitioning.rounds import FIGURES, Figures
from evenkeel.protocol import balancer_pb2 as pb
from services.balancer.decisions import Reason
from services.balancer.limits import Limits
from services.balancer.refusals import Refusal
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
        figures, seconds, before, after = statistics.last_balance
        message.last_balance.CopyFrom(balance_message(figures, seconds))
        message.last_loads_before = before.astype("<f8").tobytes()
        message.last_loads_after = after.astype("<f8").tobytes()
    return message


def reason_name(reason: Reason) -> str:
    """The reason as labels and statistics spell it."""
    return reason.name.lower()


def balance_message(figures: Figures, seconds: float) -> pb.Balance:
    """How even a round, or a batch of a window, is.

    Args:
        figures: how even the plan is.
        seconds: that its plan took.
    """
    return pb.Balance(partition_seconds=seconds, **{name: getattr(figures, name) for name in FIGURES})
