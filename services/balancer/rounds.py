"""Rounds of a session: before the decision who has come, and who waits until when; what was decided; all, counted."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.api import evenness
from evenkeel.partitioning.rounds import Figures, RoundOptions
from evenkeel.partitioning.samples import RoundSamples
from evenkeel.partitioning.speeds import ALL_EQUAL, LearnedSpeeds, planned_speeds
from services.balancer.decisions import Decision, Reason, identity
from services.balancer.effects import Asker, Loaded
from services.balancer.shares import Account
from services.balancer.submissions import Submission

NEVER_STOPPED = (-math.inf, 0.0)


@dataclass(slots=True)
class OpenRound:
    """A round between its first submission and its decision.

    Attributes:
        opened_at: Time of the first submission.
        came_at: When the first rank had it ready: of ranks that share a stream, its node's leader tells.
        deadline: When it is decided without the ranks that are missing.
        submissions: By rank; one of several ranks stands with each of them.
        waiters: Who is to be told, with the ranks it asked for; a rank that reconnected can have several.
        num_waiting: Answers that are owed to them.
        partition_started_at: When its plan was asked for; None while ranks are missing.
        running_since: When a worker began with its plan; None while it waits for one.
        nbytes: Memory of the submissions.
        traces: By rank that traces the round: when it came, and the context of its trace.
        said: The submissions, each once.
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
    said: list[Submission] = field(default_factory=list)
    came_at: float = math.inf

    def add(self, now: float, submission: Submission) -> None:
        """Takes the part of ranks of which none has come before."""
        self.said.append(submission)
        self.submissions.update(dict.fromkeys(submission.ranks, submission))
        self.nbytes += submission.nbytes
        self.came_at = min(self.came_at, submission.earliest(now))
        if submission.traceparents:
            came = submission.arrivals(now)
            for rank, traceparent in submission.traceparents.items():
                self.traces[rank] = (came[rank], traceparent)

    def wait(self, asker: Asker, ranks: tuple[int, ...], timeout: float) -> None:
        """Notes whom to tell about ranks that have come, now or before."""
        self.deadline = min(self.deadline, self.opened_at + timeout)
        waiting = self.waiters.setdefault(asker, {})
        self.num_waiting -= len(waiting)
        waiting.update(dict.fromkeys(ranks))
        self.num_waiting += len(waiting)

    def fingerprints(self) -> dict[int, int]:
        """Of what each rank said that has come."""
        found: dict[int, int] = {}
        for submission in self.said:
            found.update(submission.fingerprints)
        return found

    def parts(self) -> tuple[RoundSamples, ...]:
        """What all of them said of their samples, in the order of the ranks."""
        found = [part for submission in self.said for part in submission.parts()]
        found.sort(key=itemgetter(0))
        return tuple(part for _, part in found)

    def as_loaded(self, world_size: int, options: RoundOptions) -> Loaded | None:
        """How even it is with every sample at home; None while ranks are missing."""
        if not self.is_complete(world_size):
            return None
        parts = self.parts()
        loads = np.concatenate([_loads(part) for part in parts])
        speeds = planned_speeds(
            options.speeds, self.submissions[0].learned, loads.sum(axis=1).tolist(), loads.shape[1]
        )  # fmt: skip
        even = [evenness(batch, speeds) for batch in loads.T]
        largest, mean = sum(most for most, _ in even), sum(most / imbalance for most, imbalance in even)
        return Loaded(sum(len(part.costs) for part in parts), largest, mean)

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

    def give_up(
        self, now: float, world_size: int, partition_timeout: float, stopped: tuple[float, float] = NEVER_STOPPED
    ) -> Decision:
        """What is decided when its time is up.

        Args:
            now: The time.
            world_size: Ranks of the session.
            partition_timeout: Seconds that a search may take.
            stopped: When the balancer last went on after a time in which it did not run, and how long that was.
        """
        waited = now - self.opened_at
        missing = self.missing(world_size)
        if missing and stopped[0] > self.opened_at - waited:  # what came before may be read late, or have been given up
            detail = f"the balancer itself did not run for {stopped[1]:.3g} s: it was stopped, or its machine too busy"
            return identity(Reason.DEADLINE, detail)
        if missing:
            detail = f"rank(s) {describe_ranks(missing)} did not come within {waited:.3g} s"
            return identity(Reason.DEADLINE, detail, missing)
        if self.partition_started_at is None:
            return identity(Reason.DEADLINE, "all ranks came, but none waited for the plan any more")
        if self.running_since is None:
            detail = f"all ranks came, but no worker was free for {now - self.partition_started_at:.3g} s"
            return identity(Reason.QUEUED, detail)
        ran = now - self.running_since
        if ran >= partition_timeout:
            detail = f"the search had not ended after {ran:.3g} s, and its process was killed"
            return identity(Reason.WORKER_STUCK, detail)
        detail = f"all ranks came, but of the round's {waited:.3g} s the last {ran:.3g} s were too few for the search"
        return identity(Reason.DEADLINE, detail)

    def forget(self, asker: Asker) -> None:
        """Stops telling `asker`; what it submitted stays."""
        self.num_waiting -= len(self.waiters.pop(asker, ()))

    def owed(self) -> list[tuple[Asker, tuple[int, ...]]]:
        """Everybody who is to be told, with the ranks that it asked for."""
        return [(asker, tuple(ranks)) for asker, ranks in self.waiters.items()]

    def snapshot(self) -> Hashable:
        """The state as one comparable value."""
        said = frozenset(self.fingerprints().items())
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
            list(self.said),
            self.came_at,
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

    def differing(self, submission: Submission, memory: Account) -> list[int]:
        """The ranks that say something else than before; what others say is noted, if they are late."""
        differ = []
        for rank, fingerprint in submission.fingerprints.items():
            earlier = self.fingerprints.get(rank)
            if earlier is None and memory.take(_FINGERPRINT_BYTES):  # without room, its repeat is taken on trust
                self.fingerprints[rank] = fingerprint
            if earlier not in (None, fingerprint):
                differ.append(rank)
        return differ

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
        last_round: The last decided round, counted or not yet.
        balanced: Rounds with a plan, which the ranks have followed.
        identity: Rounds without, by reason.
        waited: Seconds from the first rank's submission to the decision, summed over all rounds.
        last_balance: How even the last balanced round is, with the seconds that its plan took, and the loads of its
            ranks before and after in its least even batch.
        last_learned: What the ranks know of their speeds, of the newest decided round.
    """

    last_round: int = 0
    balanced: int = 0
    identity: dict[Reason, int] = field(default_factory=dict)
    waited: float = 0.0
    last_balance: tuple[Figures, float, NDArray[np.float64], NDArray[np.float64]] | None = None
    last_learned: LearnedSpeeds = ALL_EQUAL

    def count(self, decision: Decision, waited: float) -> None:
        """Takes a decided round into account, of which it is known what the ranks have made of it."""
        self.waited += waited
        if decision.plan is not None:
            self.balanced += 1
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


def _loads(part: RoundSamples) -> NDArray[np.float64]:
    """(ranks, batches) float64, the summed costs of each batch of some ranks."""
    sizes = part.batch_sizes.ravel()
    filled, loads = sizes > 0, np.zeros(len(sizes))
    if filled.any():
        begins = (np.cumsum(sizes) - sizes)[filled]
        loads[filled] = np.add.reduceat(part.costs, begins, dtype=np.float64)
    return loads.reshape(part.batch_sizes.shape)


def describe_ranks(ranks: Iterable[int], limit: int = 8) -> str:
    """Ranks as text, shortened: `0, 3, 5 and 12 more`."""
    listed = list(ranks)
    shown = ", ".join(map(str, listed[:limit]))
    return shown if len(listed) <= limit else f"{shown} and {len(listed) - limit} more"
