"""One incarnation of a session: its ranks, its open rounds and the decisions it remembers.

A pure state machine. The clock is passed in, in seconds of any monotonic clock; what should happen comes back as
effects.

A round goes through these states, and only forwards:

    unknown --submit--> collecting --last rank--> partitioning --plan or failure--> decided --> forgotten
                            |                          |                               ^
                            +------ deadline, stuck or dead worker, overload, drain ---+
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace

from services.balancer.decisions import Decision, Plan, PlanFailure, Reason, balanced, identity
from services.balancer.effects import (
    Answer,
    Asker,
    Decided,
    Effect,
    PlanInput,
    SessionId,
    StartPartition,
    Timeline,
    Wake,
)
from services.balancer.limits import Limits
from services.balancer.refusals import Code, Refusal
from services.balancer.rounds import DecidedRound, OpenRound, describe_ranks
from services.balancer.statistics import SessionStatistics
from services.balancer.submissions import Submission, Terms


class Session:
    """The rounds of one incarnation of (job, group, loader).

    Attributes:
        id: which incarnation of which session.
        terms: what all its ranks said alike.
        nodes: host of each rank that has joined, by rank.
        open_rounds: rounds that are not decided yet.
        decided: rounds whose decision is remembered, by number.
        floor: the highest round whose decision was forgotten; -1 at first.
        highest: the highest round that was decided; -1 at first.
        remembered_bytes: memory of the plans of the remembered decisions.
        last_message_at: when a rank last said anything.
        abandoned_at: when its last stream ended, not all of them in order; infinity while there are some.
        draining: whether new rounds are decided IDENTITY at once.
        finished: ranks that have ended their requests in order and will not come back.
        statistics: counters for people.
    """

    __slots__ = (
        "_limits",
        "abandoned_at",
        "decided",
        "draining",
        "finished",
        "floor",
        "highest",
        "id",
        "last_message_at",
        "nodes",
        "open_rounds",
        "remembered_bytes",
        "statistics",
        "terms",
    )

    def __init__(self, now: float, session_id: SessionId, terms: Terms, limits: Limits) -> None:
        self.id = session_id
        self.terms = terms
        self.nodes: dict[int, str] = {}
        self.open_rounds: dict[int, OpenRound] = {}
        self.decided: dict[int, DecidedRound] = {}
        self.floor = -1
        self.highest = -1
        self.remembered_bytes = 0
        self.last_message_at = now
        self.abandoned_at = math.inf
        self.draining = False
        self.finished: set[int] = set()
        self.statistics = SessionStatistics()
        self._limits = limits

    def join(self, now: float, rank: int, node: str, terms: Terms) -> Refusal | None:
        """Admits a rank, again and again, as long as it says what the others said."""
        self.last_message_at = now
        difference = _difference(self.terms, terms)
        if difference is not None:
            field, mine, theirs = difference
            others = describe_ranks(sorted(self.nodes)) or "the first to join"
            return Refusal(
                code=Code.RANKS_DIFFER,
                field=field,
                value=f"{theirs} on rank {rank} but {mine} on rank(s) {others}",
                remedy="start all ranks of the session with the same model, batches and options",
                fatal=True,
            )
        self.nodes[rank] = node
        self.abandoned_at = math.inf
        self.finished.discard(rank)
        return None

    def submit(self, now: float, rank: int, round_number: int, submission: Submission, asker: Asker) -> list[Effect]:
        """Takes a rank's part in a round: an answer at once, or later to the same asker."""
        self.last_message_at = now
        decided = self.decided.get(round_number)
        if decided is not None:
            agrees = decided.agrees(rank, submission)
            return [Answer(asker, round_number, rank, decided.decision if agrees else _conflict(rank, round_number))]
        current = self.open_rounds.get(round_number)
        refusal = self._refuse(rank, round_number, submission, current)
        if refusal is not None:
            return [Answer(asker, round_number, rank, refusal)]
        if current is None:
            current = OpenRound(opened_at=now, deadline=math.inf)
            self.open_rounds[round_number] = current
        deadline = current.deadline
        if not current.add(rank, submission, asker):
            return [Answer(asker, round_number, rank, _conflict(rank, round_number))]
        if submission.traceparent:
            current.traces.setdefault(rank, (now, submission.traceparent))
        if self.draining:
            return self._decide(now, round_number, _drained())
        effects: list[Effect] = []
        if current.partition_started_at is None and current.is_complete(self.terms.world_size):
            current.partition_started_at = now
            effects.append(StartPartition(self.id, round_number, self._inputs(current), current.deadline))
            effects.append(Wake(current.deadline))
        elif current.deadline < deadline:
            effects.append(Wake(current.deadline))
        return effects

    def started(self, now: float, round_number: int) -> list[Effect]:
        """Notes that a worker has begun with the plan of a round: from now on its time counts."""
        current = self.open_rounds.get(round_number)
        if current is None:
            return []
        current.running_since = now
        return [Wake(current.due(self._limits.partition_timeout))]

    def is_wanted(self, round_number: int) -> bool:
        """Whether anybody waits for the decision of a round."""
        current = self.open_rounds.get(round_number)
        return current is not None and bool(current.waiters)

    def partitioned(self, now: float, round_number: int, result: Plan | PlanFailure | None) -> list[Effect]:
        """Takes the outcome of a partition that was asked for; one that comes too late changes nothing.

        None says that nobody waited for it any more: it is asked for again if a rank comes back before the deadline.
        """
        current = self.open_rounds.get(round_number)
        if current is None or current.partition_started_at is None:
            return []
        if result is None:
            current.partition_started_at = None
            return []
        decision = balanced(result) if isinstance(result, Plan) else identity(result.reason, result.detail)
        return self._decide(now, round_number, decision)

    def tick(self, now: float) -> list[Effect]:
        """Decides every round whose time is up."""
        effects: list[Effect] = []
        for round_number, current in list(self.open_rounds.items()):
            due = current.due(self._limits.partition_timeout)
            if due <= now:
                effects += self._decide(now, round_number, self._give_up(now, current))
        return effects

    def leave(self, asker: Asker) -> None:
        """Forgets who asked. What its rank submitted stays: the rank asks again when it is back."""
        for current in self.open_rounds.values():
            current.forget(asker)

    def finish(self, rank: int) -> None:
        """Notes that a rank has ended its requests in order."""
        self.finished.add(rank)

    @property
    def is_finished(self) -> bool:
        """Whether all ranks have ended their requests in order."""
        return len(self.finished) == self.terms.world_size

    def drain(self, now: float) -> list[Effect]:
        """Answers everybody who waits, and from now on everybody at once."""
        self.draining = True
        effects: list[Effect] = []
        for round_number in list(self.open_rounds):
            effects += self._decide(now, round_number, _drained())
        return effects

    def end(self, refusal: Refusal) -> list[Effect]:
        """Tells everybody who waits that the session is over."""
        effects: list[Effect] = [
            Answer(asker, round_number, rank, refusal)
            for round_number, current in self.open_rounds.items()
            for asker, rank in current.waiters.items()
        ]
        self.open_rounds.clear()
        return effects

    def next_wake(self) -> float:
        """When `tick` next has something to do; infinity when nothing waits."""
        return min((r.due(self._limits.partition_timeout) for r in self.open_rounds.values()), default=math.inf)

    def is_silent(self, now: float) -> bool:
        """Whether no rank has said anything for the session's expiry."""
        return now - self.last_message_at >= self._limits.session_expiry

    def free_at(self) -> float:
        """When another run may take its name, if nothing more is heard of it."""
        return min(
            self.last_message_at + self._limits.session_expiry, self.abandoned_at + self._limits.abandoned_expiry
        )

    def copy(self) -> Session:
        """An independent copy, also of the statistics."""
        other = Session(self.last_message_at, self.id, self.terms, self._limits)
        other.nodes = dict(self.nodes)
        other.open_rounds = {number: current.copy() for number, current in self.open_rounds.items()}
        other.decided = {number: decided.copy() for number, decided in self.decided.items()}
        other.floor, other.highest, other.draining = self.floor, self.highest, self.draining
        other.abandoned_at = self.abandoned_at
        other.finished = set(self.finished)
        other.remembered_bytes = self.remembered_bytes
        other.statistics = replace(self.statistics, identity=dict(self.statistics.identity))
        return other

    def snapshot(self) -> Hashable:
        """All that later behaviour depends on, but the time of the last message, as one comparable value."""
        return (
            self.id,
            self.terms,
            frozenset(self.nodes.items()),
            frozenset((number, current.snapshot()) for number, current in self.open_rounds.items()),
            frozenset((number, decided.snapshot()) for number, decided in self.decided.items()),
            frozenset(self.finished),
            self.floor,
            self.highest,
            self.draining,
        )

    # ------------------------------------------------------------------ inside

    def _refuse(
        self, rank: int, round_number: int, submission: Submission, current: OpenRound | None
    ) -> Refusal | None:
        if round_number <= self.floor:
            return Refusal(
                code=Code.ROUND_OUT_OF_RANGE,
                field="round",
                value=f"{round_number}, decided or passed before the {len(self.decided)} that are remembered",
                remedy=f"go on with a round above {self.floor}",
            )
        if self.highest >= 0 and round_number - self.highest > self._limits.max_round_jump:
            return Refusal(
                code=Code.ROUND_OUT_OF_RANGE,
                field="round",
                value=f"{round_number}, more than {self._limits.max_round_jump} beyond round {self.highest}",
                remedy="number rounds consecutively",
            )
        if current is not None and rank in current.submissions:
            return None
        ahead, nbytes = 0, submission.nbytes
        for other in self.open_rounds.values():
            ahead += rank in other.submissions
            nbytes += other.nbytes
        if ahead >= self._limits.max_rounds_ahead:
            return Refusal(
                code=Code.ROUND_OUT_OF_RANGE,
                field="round",
                value=f"{round_number} while {ahead} rounds of rank {rank} are undecided (max_rounds_ahead)",
                remedy="wait for an answer before submitting further rounds",
            )
        if nbytes > self._limits.max_open_bytes:
            return Refusal(
                code=Code.LIMIT_EXCEEDED,
                field="max_open_bytes",
                value=f"{self._limits.max_open_bytes}, all in use by {len(self.open_rounds)} undecided rounds",
                remedy="wait for answers before submitting further rounds, or raise the server's max_open_bytes",
            )
        return None

    def _inputs(self, current: OpenRound) -> PlanInput:
        ranks = range(self.terms.world_size)
        return PlanInput(
            submissions=tuple(current.submissions[rank] for rank in ranks),
            options=self.terms.options,
            nodes=tuple(self.nodes.get(rank, "") for rank in ranks),
            window=self.terms.window,
        )

    def _give_up(self, now: float, current: OpenRound) -> Decision:
        waited = now - current.opened_at
        missing = current.missing(self.terms.world_size)
        if missing:
            detail = f"rank(s) {describe_ranks(missing)} did not come within {waited:.3g} s"
            return identity(Reason.DEADLINE, detail, missing)
        if current.partition_started_at is None:
            return identity(Reason.DEADLINE, "all ranks came, but none waited for the plan any more")
        if current.running_since is None:
            detail = f"all ranks came, but no worker was free for {now - current.partition_started_at:.3g} s"
            return identity(Reason.QUEUED, detail)
        ran = now - current.running_since
        if ran >= self._limits.partition_timeout:
            detail = f"the search had not ended after {ran:.3g} s, and its process was killed"
            return identity(Reason.WORKER_STUCK, detail)
        detail = f"all ranks came, but of the round's {waited:.3g} s the last {ran:.3g} s were too few for the search"
        return identity(Reason.DEADLINE, detail)

    def _decide(self, now: float, round_number: int, decision: Decision) -> list[Effect]:
        current = self.open_rounds.pop(round_number)
        fingerprints = {rank: submission.fingerprint for rank, submission in current.submissions.items()}
        self.decided[round_number] = DecidedRound(decision, fingerprints)
        self.highest = max(self.highest, round_number)
        if decision.plan is not None:
            self.remembered_bytes += decision.plan.nbytes
        while len(self.decided) > 1 and (
            len(self.decided) > self._limits.remembered_rounds or self.remembered_bytes > self._limits.remembered_bytes
        ):
            self._forget_oldest()
        waited = now - current.opened_at
        self.statistics.count(round_number, decision, waited)
        answers = [Answer(asker, round_number, rank, decision) for asker, rank in current.waiters.items()]
        timeline = None
        if current.traces:
            timeline = Timeline(
                opened_at=current.opened_at,
                gathered_at=current.partition_started_at,
                decided_at=now,
                arrivals=current.traces,
            )
        return [*answers, Decided(self.id, round_number, decision, waited, timeline)]

    def _forget_oldest(self) -> None:
        oldest = min(self.decided)
        # A round that was open for long may be decided after later ones were forgotten: the floor never sinks.
        self.floor = max(self.floor, oldest)
        plan = self.decided.pop(oldest).decision.plan
        if plan is not None:
            self.remembered_bytes -= plan.nbytes


def _difference(ours: Terms, theirs: Terms) -> tuple[str, str, str] | None:
    """The first thing that two ranks see differently: field, our value, their value."""
    if ours == theirs:
        return None
    for name in ("world_size", "window"):
        if getattr(ours, name) != getattr(theirs, name):
            return name, str(getattr(ours, name)), str(getattr(theirs, name))
    for name in ("strategy", "counts", "tolerance", "speeds", "memory_caps"):
        mine, other = getattr(ours.options, name), getattr(theirs.options, name)
        if mine != other:
            if isinstance(mine, tuple) and len(mine) == len(other):
                at = next(i for i in range(len(mine)) if mine[i] != other[i])
                return f"options.{name}[{at}]", str(mine[at]), str(other[at])
            return f"options.{name}", str(mine), str(other)
    for at in range(max(len(ours.schema), len(theirs.schema))):
        mine_line = ours.schema[at] if at < len(ours.schema) else "absent"
        other_line = theirs.schema[at] if at < len(theirs.schema) else "absent"
        if mine_line != other_line:
            return f"schema.fields[{at}]", mine_line, other_line
    return "schema.hash", ours.schema_hash.hex(), theirs.schema_hash.hex()


def _drained() -> Decision:
    return identity(Reason.DRAINING, "the balancer is shutting down")


def _conflict(rank: int, round_number: int) -> Refusal:
    return Refusal(
        code=Code.CONFLICTING_SUBMIT,
        field="round",
        value=f"{round_number}, for which rank {rank} submitted other samples before",
        remedy="resubmit a round unchanged, or go on with the next",
    )
