"""What a worker does with a call: from the request's bytes to the response's."""

from __future__ import annotations

import structlog

from evenkeel.partitioning import PartitionError
from evenkeel.partitioning.refinements import plan_round
from evenkeel.protocol.plan_round import InvalidMessage, LimitExceeded, RoundLimits, read_request, write_response
from services.balancer.summary import RoundSummary, summarize

log = structlog.get_logger(__name__)


class CallError(Exception):
    """A call fails.

    Attributes:
        status: Name of the gRPC status.
        reason: A word of few, for metrics.
        message: What is wrong and what to do, for the caller.
    """

    def __init__(self, status: str, reason: str, message: str) -> None:
        super().__init__(status, reason, message)
        self.status, self.reason, self.message = status, reason, message


def plan_call(job: str, data: bytes, limits: RoundLimits) -> tuple[RoundSummary, bytes] | CallError:
    """Plans a round.

    Args:
        job: Whose round it must be.
        data: The bytes of a `PlanRoundRequest`.
        limits: How large it may be.

    Returns:
        What people are shown and the bytes of a `PlanRoundResponse`, or why there is none.
    """
    try:
        names, samples, options, facts = read_request(data, limits)
        if names.job != job:
            return CallError(
                "PERMISSION_DENIED",
                "job",
                f"job is {names.job!r}, but the call's metadata name {job!r}; name the same job in both",
            )
        plan = plan_round(samples, options)
        return summarize(names, samples, options, facts, plan), write_response(plan)
    except LimitExceeded as error:
        return CallError("RESOURCE_EXHAUSTED", "limit", str(error))
    except PartitionError as error:
        return CallError("FAILED_PRECONDITION", "infeasible", str(error))
    except (InvalidMessage, ValueError) as error:
        return CallError("INVALID_ARGUMENT", "request", str(error))
    except Exception:
        log.exception("planning failed", job=job)
        return CallError("INTERNAL", "internal", "planning failed; the balancer's log says where")
