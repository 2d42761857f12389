"""Rounds of a session: before the decision who has come, and who waits until when; what was decided; all, counted."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.rounds import Figures
from evenkeel.partitioning.speeds import ALL_EQUAL, LearnedSpeeds
from services.balancer.decisions import Decision, Reason
from services.balancer.effects import Asker
from services.balancer.shares import Account
from services.balancer.submissions import Submission


@dataclass(slots=True)
class OpenRound:
    """A round between its first submission and its decision.

    Attributes:
        opened_at: Time of the first submission.
        deadline: When it is decided without the ranks that are missing.
        submissions: By rank.
        waiters: Who is to be told, with the ranks it asked for; a rank that reconnected can have several.
        num_waiting: Answers that are owed to them.
        partition_started_at: When its plan was asked for; None while ranks are missing.
        running_since: When a worker began with its plan; None while it waits for one.
        nbytes: Memory of the submissions.
        traces: By rank that traces the round: when it came, and the context of its trace.
    """

    opened_at: float
    deadline: float
    submissions: dict[int, Submission] = field(default_factory=dict)
    waiters: dict[Asker, dict[int, None]] = field(default_factory=dict)
    num_waiting: int = 0
    partition_started_at: float | None = None
    nbytes: int = 0
    traces: dict[int, tuple[float, str]] = field(default_factory=dict)
    running_since: float | None = None

    def add(self, rank: int, submission: Submission, asker: Asker) -> bool:
        """Takes a rank's part. Returns False when the rank has said something different before."""
        earlier = self.submissions.get(rank)
        if earlier is not None and earlier != submission:
            return False
        if earlier is None:
            self.submissions[rank] = submission
            self.nbytes += submission.nbytes
        self.deadline = min(self.deadline, self.opened_at + submission.timeout)
        ranks = self.waiters.get(asker)
        if ranks is None:
            ranks = self.waiters[asker] = {}
        if rank not in ranks:
            ranks[rank] = None
            self.num_waiting += 1
        return True

    def is_complete(self, world_size: int) -> bool:
        """Whether every rank has come."""
        return len(self.submissions) == world_size

    def missing(self, world_size: int) -> tuple[int, ...]:
        """The ranks that have not come, ascending."""
        return tuple(rank for rank in range(world_size) if rank not in self.submissions)

    def due(self, partition_timeout: float) -> float:
        """When the round is decided without a plan."""
        if self.running_since is None:
            return self.deadline
        return min(self.deadline, self.running_since + partition_timeout)

    def forget(self, asker: Asker) -> None:
        """Stops telling `asker`; what it submitted stays."""
        self.num_waiting -= len(self.waiters.pop(asker, ()))

    def owed(self) -> list[tuple[Asker, int]]:
        """Everybody who is to be told, with the rank that it asked for."""
        return [(asker, rank) for asker, ranks in self.waiters.items() for rank in ranks]

    def snapshot(self) -> Hashable:
        """The state as one comparable value."""
        said = frozenset((rank, submission.fingerprint) for rank, submission in self.submissions.items())
        times = (self.opened_at, self.deadline, self.partition_started_at, self.running_since)
        return (*times, said, frozenset(self.owed()))

    def copy(self) -> OpenRound:
        """An independent copy; submissions are immutable and shared."""
        return OpenRound(
            self.opened_at,
            self.deadline,
            dict(self.submissions),
            {asker: dict(ranks) for asker, ranks in self.waiters.items()},
            self.num_waiting,
            self.partition_started_at,
            self.nbytes,
            dict(self.traces),
            self.running_since,
        )


@dataclass(slots=True)
class DecidedRound:
    """A round after its decision.

    Attributes:
        decision: Its outcome.
        fingerprints: Of what each rank submitted, by rank; a late rank's is added when it comes.
    """

    decision: Decision
    fingerprints: dict[int, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Memory that it takes without its plan, about."""
        return 1000 + 40 * len(self.decision.missing_ranks) + _FINGERPRINT_BYTES * len(self.fingerprints)

    def agrees(self, rank: int, submission: Submission, memory: Account) -> bool:
        """Whether the rank says what it said before, or speaks for the first time."""
        earlier = self.fingerprints.get(rank)
        if earlier is None and memory.take(_FINGERPRINT_BYTES):  # without room for it, its repeat is taken on trust
            self.fingerprints[rank] = submission.fingerprint
        return earlier in (None, submission.fingerprint)

    def snapshot(self) -> Hashable:
        """The state as one comparable value; equal plans count as equal."""
        decision = self.decision
        outcome = (decision.outcome, decision.reason, decision.missing_ranks, decision.digest)
        return (*outcome, frozenset(self.fingerprints.items()))

    def copy(self) -> DecidedRound:
        """An independent copy."""
        return DecidedRound(self.decision, dict(self.fingerprints))


@dataclass(slots=True)
class SessionStatistics:
    """What has become of a session's rounds, for people and dashboards; no decision depends on it.

    Attributes:
        last_round: The last decided round.
        balanced: Rounds with a plan.
        identity: Rounds without, by reason.
        waited: Seconds from first submission to decision, summed over all rounds.
        last_balance: How even the last balanced round is, with the seconds that its plan took, and the loads of its
            ranks before and after in its least even batch.
        last_learned: By which speeds of its ranks that round was planned.
    """

    last_round: int = 0
    balanced: int = 0
    identity: dict[Reason, int] = field(default_factory=dict)
    waited: float = 0.0
    last_balance: tuple[Figures, float, NDArray[np.float64], NDArray[np.float64]] | None = None
    last_learned: LearnedSpeeds = ALL_EQUAL

    def count(self, round_number: int, decision: Decision, waited: float, learned: LearnedSpeeds = ALL_EQUAL) -> None:
        """Takes a decided round into account."""
        self.last_round = round_number
        self.waited += waited
        if decision.plan is not None:
            self.balanced += 1
            self.last_learned = learned
            plan = decision.plan
            worst = plan.worst
            self.last_balance = plan.figures, plan.seconds, plan.loads_before[worst], plan.loads_after[worst]
        else:
            self.identity[decision.reason] = self.identity.get(decision.reason, 0) + 1

    @property
    def rounds(self) -> int:
        """Decided rounds."""
        return self.balanced + sum(self.identity.values())

    @property
    def mean_wait(self) -> float:
        """Seconds from a round's first submission to its decision, on average."""
        return self.waited / self.rounds if self.rounds else 0.0


_FINGERPRINT_BYTES = 100


def describe_ranks(ranks: Iterable[int], limit: int = 8) -> str:
    """Ranks as text, shortened: `0, 3, 5 and 12 more`."""
    listed = list(ranks)
    shown = ", ".join(map(str, listed[:limit]))
    return shown if len(listed) <= limit else f"{shown} and {len(listed) - limit} more"
