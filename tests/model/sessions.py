"""The real session of the balancer, as states with numbers and steps between them that are computed once.

Nothing of its behaviour is modelled: every step is a call of `Session` on a copy. Equal numbers are states that cannot
be told apart; each is represented by the first session that was met in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from benchmarks.harness.plans import make_plan, said
from evenkeel.partitioning.rounds import RoundOptions, RoundPlan
from evenkeel.partitioning.samples import RankSamples
from services.balancer.decisions import Decision, PlanFailure, Reason
from services.balancer.effects import Answer, Decided, Effect, PlanInput, SessionId, StartPartition
from services.balancer.limits import Limits
from services.balancer.session import Session
from services.balancer.submissions import SessionKey, Submission, Terms

TIMEOUT = 10.0

Said = tuple[str, str, tuple[int, ...]]
"""A decision: its outcome, the plan's digest or the reason, and the ranks that it says were missing."""

Key = tuple[
    int, tuple[tuple[int, tuple[int, ...], tuple[int, ...], bool], ...], tuple[tuple[int, Said], ...], int, bool
]
"""Round of the ranks, open rounds (number, who submitted, who waits, partitioning), decided ones, floor, draining."""


@dataclass(frozen=True, slots=True)
class Step:
    """What an event does to the balancer.

    Attributes:
        label: For people.
        after: Number of the session afterwards.
        answers: (rank, round, decision) that it sends.
        fails: Counts as a failure.
    """

    label: str
    after: int
    answers: tuple[tuple[int, int, Said], ...]
    fails: bool = False


class Sessions:
    """All sessions that were met."""

    def __init__(self, *, ranks: int, rounds: int, remembered: int) -> None:
        self._ranks = ranks
        self._keeps_all = remembered >= rounds
        self._limits = Limits(remembered_rounds=remembered, partition_timeout=math.inf)
        self._terms = Terms(world_size=ranks, options=RoundOptions(), num_jagged=1)
        self.submissions = {(r, n): make_submission(r, n) for r in range(ranks) for n in range(rounds)}
        self.keys: list[Key] = []
        self._sessions: list[Session] = []
        self._numbers: dict[Key, int] = {}
        self._steps: dict[int, tuple[Step, ...]] = {}
        self._deliveries: dict[tuple[int, int, int], Step | None] = {}
        self._later: dict[tuple[int, int], int] = {}
        self._checked: set[int] = set()

    def fresh(self, at_round: int) -> int:
        """The session of a balancer that has just started, and that all ranks have joined."""
        session = Session(0.0, SessionId(SessionKey("job", "group", "train"), "run", 0), self._terms, self._limits)
        for rank in range(self._ranks):
            assert session.join(0.0, rank, "", self._terms) is None
        return self._number(session, at_round)

    def later(self, number: int, at_round: int) -> int:
        """The same session when the ranks are at another round."""
        known = self._later.get((number, at_round))
        if known is None:
            known = self._later[number, at_round] = self._number(self._sessions[number], at_round)
        return known

    def steps(self, number: int) -> tuple[Step, ...]:
        """Everything that may befall the balancer by itself, but its death."""
        known = self._steps.get(number)
        if known is None:
            known = self._steps[number] = tuple(self._find_steps(number))
        return known

    def deliver(self, number: int, rank: int, round_number: int) -> Step | None:
        """A submission arrives, perhaps again; None if that changes nothing."""
        where = (number, rank, round_number)
        if where not in self._deliveries:
            current = self._sessions[number].open_rounds.get(round_number)
            waits = current is not None and rank in current.submissions and rank in current.waiters
            session = self._sessions[number].copy()
            self._deliveries[where] = None if waits else self._step(
                f"submission of rank {rank} to round {round_number} arrives", number, session,
                session.submit(0.0, round_number, self.submissions[rank, round_number], rank),
            )  # fmt: skip
        return self._deliveries[where]

    def check(self, number: int) -> None:
        """Every waiting rank gets its answer when time passes, whatever else happens."""
        if number in self._checked:
            return
        late = self._sessions[number].copy()
        owed = {(n, asker) for n, current in late.open_rounds.items() for asker in current.waiters}
        answered = {(effect.round, effect.asker) for effect in late.tick(1e9) if isinstance(effect, Answer)}
        assert answered == owed, "somebody would wait for ever"
        self._checked.add(number)

    def inputs(self, round_number: int) -> PlanInput:
        """What a plan of a round is made from."""
        return PlanInput(
            parts=tuple(self.submissions[rank, round_number].samples for rank in range(self._ranks)),
            options=self._terms.options,
            nodes=("",) * self._ranks,
        )

    # ------------------------------------------------------------------ inside

    def _find_steps(self, number: int) -> list[Step]:
        found = []
        session = self._sessions[number]
        at_round = self.keys[number][0]
        for opened in sorted(n for n in session.open_rounds if not self._keeps_all or n >= at_round):
            after = session.copy()  # the deadline of this round has passed, and of those before it
            effects = after.tick(TIMEOUT * (opened + 1))
            found.append(self._step(f"deadline of round {opened}", number, after, effects))
        for opened, _, _, partitioning in self.keys[number][1]:
            if not partitioning:
                continue
            plan = plan_of(self.inputs(opened))
            for label, result, fails in (
                (f"plan of round {opened}", plan, False),
                (f"PARTITION_FAILED in round {opened}", PlanFailure(reason=Reason.PARTITION_FAILED, detail=""), True),
                (f"WORKER_STUCK in round {opened}", PlanFailure(reason=Reason.WORKER_STUCK, detail=""), True),
            ):
                after = session.copy()
                effects = after.partitioned(0.0, opened, result)
                found.append(self._step(label, number, after, effects, fails=fails))
        if session.ends_at > 0:
            after = session.copy()
            effects = after.drain(0.0)
            found.append(self._step("drain", number, after, effects, fails=True))
        return found

    def _step(self, label: str, number: int, after: Session, effects: list[Effect], *, fails: bool = False) -> Step:
        answers = []
        for effect in effects:
            match effect:
                case StartPartition(round=opened, inputs=inputs):
                    assert self._sessions[number].open_rounds.get(opened) is None or (
                        self._sessions[number].open_rounds[opened].partition_started_at is None
                    ), "partitioned twice"
                    for mine, other in zip(inputs.parts, self.inputs(opened).parts, strict=True):
                        np.testing.assert_array_equal(mine.costs, other.costs)
                        np.testing.assert_array_equal(mine.lengths, other.lengths)
                case Answer(ranks=(rank,), round=opened, result=Decision() as decision):
                    answers.append((rank, opened, name(decision)))
                case Decided(round=opened):
                    assert opened not in after.open_rounds
        return Step(label, self._number(after, self.keys[number][0]), tuple(sorted(answers)), fails)

    def _number(self, session: Session, at_round: int) -> int:
        since = at_round if self._keeps_all else 0  # rounds before make no difference: they do not influence others
        opened = tuple(
            (n, tuple(sorted(c.submissions)), tuple(sorted(c.waiters)), c.partition_started_at is not None)
            for n, c in sorted(session.open_rounds.items())
            if n >= since
        )  # fmt: skip
        decided = tuple((n, name(past.decision)) for n, past in sorted(session.decided.items()) if n >= since)
        key: Key = (at_round, opened, decided, session.floor if since == 0 else 0, session.ends_at <= 0)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.keys)
            self.keys.append(key)
            self._sessions.append(session)
        return number


def name(decision: Decision) -> Said:
    """Equal for equal decisions."""
    what = decision.digest.hex() if decision.plan else decision.reason.name
    return decision.outcome.name, what, decision.missing_ranks


_plans: dict[tuple[int, ...], RoundPlan] = {}


def plan_of(inputs: PlanInput) -> RoundPlan:
    """The real plan, checked once to keep every sample."""
    key = tuple(tuple(part.costs.tolist()) for part in inputs.parts)
    if key not in _plans:
        plan = make_plan(inputs)
        assert isinstance(plan, RoundPlan)
        counts = np.array([len(part.costs) for part in inputs.parts])
        received = np.zeros_like(counts)
        for rank in range(len(counts)):
            piece = plan.slices[rank]
            assert len(piece.destinations) == counts[rank]
            received += np.bincount(piece.destinations, minlength=len(counts))
        assert [int(plan.slices[rank].source_counts.sum()) for rank in range(len(counts))] == received.tolist()
        assert plan.figures.moved_samples > 0
        _plans[key] = plan
    return _plans[key]


def make_submission(rank: int, number: int) -> Submission:
    """Two or three samples, of which some must move."""
    costs = np.array([100 * (rank == number % 2), 7 + rank, 3 * number], np.int64)[: 3 - rank % 2]
    lengths = (np.arange(len(costs), dtype=np.uint32) + np.uint32(rank + 1)).reshape(-1, 1)
    return said(RankSamples(costs=costs, lengths=lengths), rank, timeout=TIMEOUT * (number + 1))
