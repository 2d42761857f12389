"""Any interleaving of submissions, repeats, losses, time and plans leaves one decision per round."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from benchmarks.harness.plans import make_plan
from services.balancer.decisions import Decision, Outcome, PlanFailure, Reason
from services.balancer.effects import Answer, Decided, Effect, PlanInput, SessionId, StartPartition, Wake
from services.balancer.limits import Limits
from services.balancer.refusals import Code, Refusal
from services.balancer.session import Session
from tests.services.balancer.samples import KEY, submission, terms

WORLD = 3
LIMITS = Limits(remembered_rounds=4, max_rounds_ahead=3, partition_timeout=2.0)
RANKS = st.integers(0, WORLD - 1)
ROUNDS = st.integers(0, 8)


class SessionModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.session = Session(0.0, SessionId(KEY, "run", 0), terms(WORLD), LIMITS)
        for rank in range(WORLD):
            self.session.join(0.0, rank, "", terms(WORLD))
        self.asked: dict[tuple[int, int], float] = {}  # (round, asker) -> the latest time of its answer
        self.first_said: dict[tuple[int, int], object] = {}
        self.decisions: dict[int, Decision] = {}
        self.running: dict[int, PlanInput] = {}
        self.next_asker = 0

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Decided(round=number, decision=decision):
                    assert number not in self.decisions, "decided twice"
                    self.decisions[number] = decision
        for effect in effects:
            match effect:
                case Answer(asker=asker, round=number, result=result):
                    assert self.asked.pop((number, asker), None) is not None, "answered unasked"  # type: ignore[call-overload]
                    if isinstance(result, Decision):
                        assert result is self.decisions[number]
                case StartPartition(round=number, inputs=inputs):
                    assert number not in self.running, "partitioned twice"
                    self.running[number] = inputs
                case Wake(at=at):
                    if at <= self.now:
                        self.perform(self.session.tick(self.now))

    @rule(rank=RANKS, number=ROUNDS, costs=st.lists(st.integers(0, 3), max_size=2), timeout=st.sampled_from([1.0, 3.0]))
    def submit(self, rank: int, number: int, costs: list[int], timeout: float) -> None:
        asker = self.next_asker
        self.next_asker += 1
        said = submission(*costs, rank=rank, timeout=timeout)
        self.asked[(number, asker)] = self.now + timeout
        effects = self.session.submit(self.now, number, said, asker)
        refusals = [e.result for e in effects if isinstance(e, Answer) and isinstance(e.result, Refusal)]
        conflict = any(refusal.code is Code.CONFLICTING_SUBMIT for refusal in refusals)
        earlier = self.first_said.get((number, rank))
        if conflict:
            assert earlier is not None
            assert earlier != said
        elif not refusals:
            assert earlier in (None, said)
            self.first_said.setdefault((number, rank), said)
        self.perform(effects)

    @rule(rank=RANKS, number=ROUNDS)
    def repeat(self, rank: int, number: int) -> None:
        said = self.first_said.get((number, rank))
        if said is None:
            return
        asker = self.next_asker
        self.next_asker += 1
        self.asked[(number, asker)] = self.now + said.timeout  # type: ignore[attr-defined]
        effects = self.session.submit(self.now, number, said, asker)  # type: ignore[arg-type]
        for effect in effects:
            if isinstance(effect, Answer) and isinstance(effect.result, Refusal):
                assert effect.result.code is Code.ROUND_OUT_OF_RANGE
                assert number <= self.session.floor
        self.perform(effects)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.asked:
            number, asker = data.draw(st.sampled_from(sorted(self.asked)))
            self.session.leave(asker)
            del self.asked[(number, asker)]

    @rule(seconds=st.sampled_from([0.25, 1.0, 2.5]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.perform(self.session.tick(self.now))

    @rule(data=st.data(), fails=st.booleans())
    def finish_partition(self, data: st.DataObject, fails: bool) -> None:
        if not self.running:
            return
        number = data.draw(st.sampled_from(sorted(self.running)))
        inputs = self.running.pop(number)
        failure = PlanFailure(reason=Reason.PARTITION_FAILED, detail="injected")
        self.perform(self.session.partitioned(self.now, number, failure if fails else make_plan(inputs)))

    @rule()
    def drain(self) -> None:
        self.perform(self.session.drain(self.now))

    @invariant()
    def memory_is_bounded(self) -> None:
        assert len(self.session.decided) <= LIMITS.remembered_rounds
        for rank in range(WORLD):
            ahead = sum(rank in current.submissions for current in self.session.open_rounds.values())
            assert ahead <= LIMITS.max_rounds_ahead
        for decided in self.session.decided.values():
            if decided.decision.outcome is Outcome.BALANCED:
                assert len(decided.fingerprints) == WORLD

    @invariant()
    def nobody_waits_past_the_deadline(self) -> None:
        assert self.session.next_wake() > self.now
        assert all(latest > self.now for latest in self.asked.values())

    def teardown(self) -> None:
        self.perform(self.session.drain(self.now))
        assert not self.asked, "somebody was never answered"


SessionModel.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestSession = SessionModel.TestCase
