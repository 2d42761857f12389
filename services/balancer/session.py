"""One incarnation of a session: its ranks, its open rounds and the decisions it remembers.

A pure state machine: it is told the seconds of any monotonic clock, and what should happen comes back as effects.

A round goes through these states, and only forwards:

    unknown --submit--> collecting --last rank--> partitioning --plan or failure--> decided --> forgotten
                            |                          |                               ^
                            +-- deadline, stuck or dead worker, overload, drain, told -+
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace

from evenkeel.partitioning.rounds import RoundPlan
from services.balancer import refusals
from services.balancer.decisions import Decision, PlanFailure, Reason, balanced, drained, identity, unfollowed
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
from services.balancer.refusals import Code, Refusal, out_of_memory
from services.balancer.rounds import NEVER_STOPPED, DecidedRound, OpenRound, SessionStatistics, describe_ranks
from services.balancer.shares import Account
from services.balancer.submissions import Submission, Terms


class Session:
    """The rounds of one incarnation of (job, group, loader).

    Attributes:
        id: Which incarnation of which session.
        terms: What all its ranks said alike.
        nodes: Host of each rank that has joined, by rank.
        open_rounds: Rounds that are not decided yet.
        decided: Rounds whose decision is remembered, by number.
        floor: The highest round whose decision was forgotten; -1 at first.
        highest: The highest round that was decided; -1 at first.
        memory: What it holds of the balancer's memory.
        caller: Who opened it.
        last_message_at: When a rank last said anything.
        abandoned_at: When its last stream ended, not all of them in order; infinity while there are some.
        agreed: The ranks have agreed on all rounds below this one, as they tell, or will never train them.
        ends_at: Rounds from this one on are decided IDENTITY at once, as the balancer shuts down; infinity at first.
        finished: Ranks that have ended their requests in order and will not come back.
        statistics: Counters for people.
    """

    __slots__ = (
        "_ahead", "_limits", "abandoned_at", "agreed", "caller", "decided", "ends_at", "finished", "floor", "highest",
        "id", "last_message_at", "memory", "nodes", "open_rounds", "statistics", "terms",
    )  # fmt: skip

    def __init__(
        self,
        now: float,
        session_id: SessionId,
        terms: Terms,
        limits: Limits,
        *,
        memory: Account | None = None,
        caller: str = "",
    ) -> None:
        self.id = session_id
        self.caller = caller
        self.memory = Account() if memory is None else memory
        self.terms = terms
        self.nodes: dict[int, str] = {}
        self.open_rounds: dict[int, OpenRound] = {}
        self.decided: dict[int, DecidedRound] = {}
        self.floor = -1
        self.highest = -1
        self.agreed = 0
        self._ahead: dict[int, int] = {}  # undecided rounds that each rank has submitted to
        self.last_message_at = now
        self.abandoned_at = math.inf
        self.ends_at = math.inf
        self.finished: set[int] = set()
        self.statistics = SessionStatistics()
        self._limits = limits

    def join(self, now: float, rank: int, node: str, terms: Terms, others: tuple[int, ...] = ()) -> Refusal | None:
        """Admits a rank and others on its stream, again and again, as long as it says what those before said."""
        self.last_message_at = now
        differs = self.terms.difference(terms)
        if differs is not None:
            field, mine, theirs = differs
            before = describe_ranks(sorted(self.nodes)) or "the first to join"
            return Refusal(
                code=Code.RANKS_DIFFER,
                field=field,
                value=f"{theirs} on rank {rank} but {mine} on rank(s) {before}",
                remedy="start all ranks of the session with the same model, batches and options",
                fatal=True,
            )
        ranks = (rank, *others)
        if not self.memory.take(_RANK_BYTES * sum(one not in self.nodes for one in ranks)):
            return out_of_memory("another rank")
        for one in ranks:
            self.nodes[one] = node
        self.finished.difference_update(ranks)
        self.abandoned_at = math.inf
        return None

    def submit(self, now: float, round_number: int, submission: Submission, asker: Asker) -> list[Effect]:
        """Takes the part of some ranks in a round: answers at once, or later to the same asker."""
        self.last_message_at = now
        decided = self.decided.get(round_number)
        if decided is not None:
            differ = decided.differing(submission, self.memory)
            agreeing = tuple(rank for rank in submission.ranks if rank not in differ)
            answers = _conflicts(asker, round_number, differ)
            return [*answers, Answer(asker, round_number, agreeing, decided.decision)] if agreeing else answers
        current = self.open_rounds.get(round_number)
        refusal = self._refuse(round_number, current)
        if refusal is not None:
            return [Answer(asker, round_number, submission.ranks, refusal)]
        known = () if current is None else current.submissions.keys() & submission.ranks
        effects, ranks, fresh = list[Effect](), submission.ranks, None if known else submission
        if known:
            assert current is not None
            said = submission.fingerprints
            differ = [rank for rank in known if current.submissions[rank].fingerprints[rank] != said[rank]]
            effects += _conflicts(asker, round_number, differ)
            ranks = tuple(rank for rank in ranks if rank not in differ)
            if len(known) < len(submission.ranks):
                fresh = submission.of(said.keys() - known)
        if fresh is not None:
            refused = self._no_room(round_number, current, fresh)
            effects += [Answer(asker, round_number, of_ranks, refusal) for of_ranks, refusal in refused]
            without = {rank for of_ranks, _ in refused for rank in of_ranks}
            if without:
                ranks = tuple(rank for rank in ranks if rank not in without)
                fresh = None if without.issuperset(fresh.ranks) else fresh.of(set(fresh.ranks) - without)
        if not ranks:
            return effects
        if current is None:
            current = self.open_rounds[round_number] = OpenRound(opened_at=now, deadline=math.inf)
        if fresh is not None:
            current.add(now, fresh)
            for rank in fresh.ranks:
                self._ahead[rank] = self._ahead.get(rank, 0) + 1
        deadline = current.deadline
        current.wait(asker, ranks, submission.timeout)
        if round_number >= self.ends_at:
            return [*effects, *self._decide(now, round_number, drained())]
        if round_number < self.agreed:
            return [*effects, *self._decide(now, round_number, unfollowed(Reason.NOT_TRAINED))]
        if current.partition_started_at is None and current.is_complete(self.terms.world_size):
            current.partition_started_at = now
            effects.append(StartPartition(self.id, round_number, self._inputs(current), current.deadline))
            effects.append(Wake(current.deadline))
        elif current.deadline < deadline:
            effects.append(Wake(current.deadline))
        return effects

    def told(self, now: float, agreed: int, unfollowed_rounds: Mapping[int, Decision]) -> list[Effect]:
        """Closes the rounds below `agreed`, for which no rank waits any more: as they are told to be, or as none."""
        self.agreed = max(self.agreed, agreed)
        effects: list[Effect] = []
        for number in sorted(number for number in self.open_rounds if number < self.agreed):
            decision = unfollowed_rounds.get(number, unfollowed(Reason.NOT_TRAINED))
            if decision.reason is not Reason.NOT_TRAINED:
                missing = self.open_rounds[number].missing(self.terms.world_size)
                decision = replace(decision, missing_ranks=missing)
            effects += self._decide(now, number, decision)
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

    def partitioned(self, now: float, round_number: int, result: RoundPlan | PlanFailure | None) -> list[Effect]:
        """Takes the outcome of a partition that was asked for; one that comes too late changes nothing.

        None says that nobody waited for it any more: it is asked for again if a rank comes back before the deadline.
        """
        current = self.open_rounds.get(round_number)
        if current is None or current.partition_started_at is None:
            return []
        if result is None:
            current.partition_started_at = None
            return []
        decision = balanced(result) if isinstance(result, RoundPlan) else identity(result.reason, result.detail)
        return self._decide(now, round_number, decision)

    def tick(self, now: float, stopped: tuple[float, float] = NEVER_STOPPED) -> list[Effect]:
        """Decides every round whose time is up; `stopped`: see `OpenRound.give_up`."""
        effects: list[Effect] = []
        for round_number, current in list(self.open_rounds.items()):
            due = current.due(self._limits.partition_timeout)
            if due <= now:
                effects += self._decide(
                    now,
                    round_number,
                    current.give_up(now, self.terms.world_size, self._limits.partition_timeout, stopped),
                )
        return effects

    def leave(self, asker: Asker) -> None:
        """Forgets who asked. What its rank submitted stays: the rank asks again when it is back."""
        for current in self.open_rounds.values():
            current.forget(asker)

    @property
    def is_finished(self) -> bool:
        """Whether all ranks have ended their requests in order."""
        return len(self.finished) == self.terms.world_size

    @property
    def newest(self) -> int:
        """The highest round that any rank has come to; -1 at first."""
        return max(self.highest, *self.open_rounds, -1)

    def drain(self, now: float, from_round: int = 0) -> list[Effect]:
        """Answers everybody who waits for these rounds, and from now on at once whoever comes to them."""
        self.ends_at = from_round
        effects: list[Effect] = []
        for round_number in [one for one in self.open_rounds if one >= from_round]:
            effects += self._decide(now, round_number, drained())
        return effects

    def end(self, refusal: Refusal) -> list[Effect]:
        """Tells everybody who waits that the session is over."""
        effects: list[Effect] = [
            Answer(asker, round_number, ranks, refusal)
            for round_number, current in self.open_rounds.items()
            for asker, ranks in current.owed()
        ]
        self.open_rounds.clear()
        self.close()
        return effects

    def close(self) -> None:
        """Gives back what it holds of the balancer's memory: nobody will ask it again."""
        self.decided.clear()
        self.memory.close()

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
        other.floor, other.highest, other.ends_at = self.floor, self.highest, self.ends_at
        other.abandoned_at, other.agreed = self.abandoned_at, self.agreed
        other._ahead = dict(self._ahead)
        other.finished = set(self.finished)
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
            self.ends_at,
            self.agreed,
        )

    # ------------------------------------------------------------------ inside

    def _refuse(self, round_number: int, current: OpenRound | None) -> Refusal | None:
        if round_number <= self.floor:
            return refusals.too_old(round_number, len(self.decided), self.floor)
        if self.highest >= 0 and round_number - self.highest > self._limits.max_round_jump:
            return refusals.too_high(round_number, self.highest, self._limits.max_round_jump)
        if current is not None and current.num_waiting >= 2 * self.terms.world_size + _SPARE_WAITERS:
            return refusals.too_often(round_number, current.num_waiting)
        return None

    def _no_room(
        self, round_number: int, current: OpenRound | None, fresh: Submission
    ) -> list[tuple[tuple[int, ...], Refusal]]:
        """Whom of those that come to a round for the first time there is no room for, and why; takes the memory."""
        ahead, most = self._ahead, self._limits.max_rounds_ahead
        far = {rank for rank in fresh.ranks if ahead.get(rank, 0) >= most}
        if far:
            left = set(fresh.ranks) - far
            refused = [((rank,), refusals.too_far(rank, round_number, ahead[rank])) for rank in sorted(far)]
            return [*refused, *(self._no_room(round_number, current, fresh.of(left)) if left else ())]
        if current is None and len(self.open_rounds) >= self._limits.max_open_rounds:
            return [(fresh.ranks, refusals.too_many_open(round_number, len(self.open_rounds)))]
        # While its plan is computed a round takes as much again.
        nbytes = fresh.nbytes
        while not self.memory.take(2 * nbytes):
            if len(self.decided) < _FEW_DECISIONS:
                return [(fresh.ranks, out_of_memory(f"a submission of {nbytes} bytes"))]
            self._forget_oldest()
        return []

    def _inputs(self, current: OpenRound) -> PlanInput:
        learned = current.submissions[0].learned
        return PlanInput(
            parts=current.parts(),
            options=replace(self.terms.options, learned=learned) if learned else self.terms.options,
            nodes=tuple(self.nodes.get(rank, "") for rank in range(self.terms.world_size)),
            window=self.terms.window,
            roles=self.terms.roles,
            together=tuple([one.ranks for one in current.said if len(one.ranks) > 1]),
        )

    def _decide(self, now: float, round_number: int, decision: Decision) -> list[Effect]:
        current = self.open_rounds.pop(round_number)
        for rank in current.submissions:
            left = self._ahead[rank] - 1
            if left:
                self._ahead[rank] = left
            else:
                del self._ahead[rank]
        self.memory.give(2 * current.nbytes)
        self._remember(round_number, DecidedRound(decision, current.fingerprints()))
        waited = now - current.came_at
        first = current.submissions.get(0)
        if first is not None and round_number >= self.highest:  # whatever becomes of the round
            self.statistics.last_learned = first.learned
        self.statistics.last_round = round_number
        answers = [Answer(asker, round_number, ranks, decision) for asker, ranks in current.owed()]
        timeline = None
        if current.traces:
            timeline = Timeline(
                opened_at=current.came_at,
                gathered_at=current.partition_started_at,
                decided_at=now,
                arrivals=current.traces,
            )
        loaded = None
        if decision.plan is None and not self.terms.options.min_samples:  # for which some samples may move even so
            loaded = current.as_loaded(self.terms.world_size, self.terms.options)
        return [*answers, Decided(self.id, round_number, decision, waited, timeline, self.caller, loaded)]

    def _remember(self, round_number: int, decided: DecidedRound) -> None:
        self.highest = max(self.highest, round_number)
        plan, nbytes = decided.decision.plan, decided.nbytes
        plan_bytes = 0 if plan is None else plan.nbytes
        while not self.memory.take(nbytes + plan_bytes):
            if not self.decided:
                self.memory.force(nbytes + plan_bytes)  # it was computed: what is there is counted
                break
            self._forget_oldest()
        if plan is not None:
            self.memory.entrust(plan, plan_bytes)
        self.decided[round_number] = decided
        while len(self.decided) > self._limits.remembered_rounds:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        oldest = min(self.decided)
        # A round that was open for long may be decided after later ones were forgotten: the floor never sinks.
        self.floor = max(self.floor, oldest)
        self.memory.give(self.decided.pop(oldest).nbytes)


def _conflicts(asker: Asker, round_number: int, ranks: Iterable[int]) -> list[Effect]:
    return [Answer(asker, round_number, (rank,), refusals.conflict(rank, round_number)) for rank in sorted(ranks)]


_RANK_BYTES = 200
_FEW_DECISIONS = 2
_SPARE_WAITERS = 64
