"""One round: before its decision who has come, who waits and until when; afterwards what was decided."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from services.balancer.decisions import Decision
from services.balancer.effects import Asker
from services.balancer.shares import Account
from services.balancer.submissions import Submission


@dataclass(slots=True)
class OpenRound:
    """A round between its first submission and its decision.

    Attributes:
        opened_at: time of the first submission.
        deadline: when it is decided without the ranks that are missing.
        submissions: by rank.
        waiters: who is to be told, with the ranks it asked for; a rank that reconnected can have several.
        num_waiting: answers that are owed to them.
        partition_started_at: when its plan was asked for; None while ranks are missing.
        running_since: when a worker began with its plan; None while it waits for one.
        nbytes: memory of the submissions.
        traces: by rank that traces the round: when it came, and the context of its trace.
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
        decision: its outcome.
        fingerprints: of what each rank submitted, by rank; a late rank's is added when it comes.
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


_FINGERPRINT_BYTES = 100


def describe_ranks(ranks: Iterable[int], limit: int = 8) -> str:
    """Ranks as text, shortened: `0, 3, 5 and 12 more`."""
    listed = list(ranks)
    shown = ", ".join(map(str, listed[:limit]))
    return shown if len(listed) <= limit else f"{shown} and {len(listed) - limit} more"
