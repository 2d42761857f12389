"""The one outcome of a round."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum

from evenkeel.partitioning.rounds import RoundPlan


class Outcome(IntEnum):
    """What the ranks do with their samples; the numbers are those of the wire."""

    BALANCED = 1
    IDENTITY = 2


class Reason(IntEnum):
    """Why every sample stays at home; the numbers are those of the wire."""

    NONE = 0
    DEADLINE = 1  # not all ranks came in time, or the plan was not ready by then
    NOT_FOUND = 2
    PARTITION_FAILED = 3
    DRAINING = 4
    OVERLOADED = 5  # too many rounds wait for their plans
    WORKER_STUCK = 6  # the search did not end in time, and its process was killed
    WORKER_DIED = 7  # the search ended its process
    QUEUED = 8  # the round waited for a worker until its time was up; its search never began
    TOO_COSTLY = 9  # no search for a round of this size ends in time
    QUARANTINED = 10  # earlier rounds of the session ended their processes: it gets no plans for a while
    NOT_FOLLOWED = 11  # from here on: what ranks tell of a decision that they did not follow
    INVALID_COSTS = 12
    COMPILING = 13
    NO_DECISION = 14
    BREAKER_OPEN = 15
    DECISIONS_DIFFER = 16
    TRANSFERS_DIFFER = 17
    NOT_TRAINED = 18  # nobody trained the round: it is none

    @property
    def label(self) -> str:
        """As metrics and statistics spell it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFailure:
    """Why there is no plan.

    Attributes:
        reason: Why.
        detail: The reason in words.
        trace: Of the error that nobody expected, for the log.
    """

    reason: Reason
    detail: str
    trace: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The outcome of a round, the same for whoever asks.

    Attributes:
        outcome: BALANCED with a plan, or IDENTITY with a reason.
        reason: Why it is IDENTITY.
        detail: The reason in words; of a plan, what another search was made than the one asked for.
        missing_ranks: Ranks that did not come before the deadline, ascending.
        plan: Where the samples go; None for IDENTITY.
        by_ranks: The ranks tell that they have balanced the round by themselves.
    """

    outcome: Outcome
    reason: Reason = Reason.NONE
    detail: str = ""
    missing_ranks: tuple[int, ...] = ()
    plan: RoundPlan | None = None
    by_ranks: bool = False

    @property
    def digest(self) -> bytes:
        """16 bytes that are equal on all ranks of one decision."""
        if self.plan is not None:
            return self.plan.digest
        words = f"identity|{int(self.reason)}|{','.join(map(str, self.missing_ranks))}"
        return hashlib.blake2b(words.encode(), digest_size=16).digest()


def balanced(plan: RoundPlan) -> Decision:
    """The decision to move samples as `plan` says."""
    return Decision(outcome=Outcome.BALANCED, plan=plan, detail=plan.detail)


def identity(reason: Reason, detail: str, missing_ranks: tuple[int, ...] = ()) -> Decision:
    """The decision that every sample stays at home."""
    return Decision(outcome=Outcome.IDENTITY, reason=reason, detail=detail, missing_ranks=missing_ranks)


def drained() -> Decision:
    """The decision of a balancer that is shutting down."""
    return identity(Reason.DRAINING, "the balancer is shutting down")


def unfollowed(reason: Reason, ranks: tuple[int, ...] = (), *, by_ranks: bool = False) -> Decision:
    """What ranks did instead of what was decided, as they tell it: every sample stayed at home, or they planned.

    Args:
        reason: Why.
        ranks: Whom it is about, or some of them.
        by_ranks: They have balanced the round by themselves.
    """
    why = _UNFOLLOWED.get(reason, "the ranks did not follow the plan")
    detail = why.format(ranks=f"rank(s) {', '.join(map(str, ranks))}" if ranks else "some ranks")
    return Decision(outcome=Outcome.IDENTITY, reason=reason, detail=detail, by_ranks=by_ranks)


_UNFOLLOWED = {
    Reason.INVALID_COSTS: "the costs of {ranks} cannot be used; their logs say why",
    Reason.COMPILING: "kernels were being compiled on {ranks}",
    Reason.NO_DECISION: "{ranks} got no answer in time",
    Reason.BREAKER_OPEN: "the ranks did not wait for the answer, after one that had not come",
    Reason.DECISIONS_DIFFER: "{ranks} held another decision than the first one",
    Reason.TRANSFERS_DIFFER: "what the ranks would send did not fit what they would receive",
    Reason.NOT_TRAINED: "nobody trained the round: the loop was over",
}
