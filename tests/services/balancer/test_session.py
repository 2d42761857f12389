from dataclasses import replace

import numpy as np
import pytest

from benchmarks.harness.plans import make_plan
from evenkeel.partitioning.delays import Cause, Delay
from evenkeel.partitioning.speeds import LearnedSpeeds
from services.balancer.decisions import Decision, Outcome, PlanFailure, Reason, unfollowed
from services.balancer.effects import Answer, Decided, Effect, Loaded, SessionId, StartPartition, Wake
from services.balancer.limits import Limits
from services.balancer.refusals import Code, Refusal
from services.balancer.session import Session
from services.balancer.shares import Account, Shares
from tests.services.balancer.samples import KEY, node, options, submission, terms

ID = SessionId(KEY, "run", 0)


def make_session(world_size: int = 3, **limits: object) -> Session:
    session = Session(0.0, ID, terms(world_size), Limits(**limits))  # type: ignore[arg-type]
    for rank in range(world_size):
        assert session.join(0.0, rank, "", terms(world_size)) is None
    return session


def answers(effects: list[Effect]) -> dict[object, Decision | Refusal]:
    return {effect.asker: effect.result for effect in effects if isinstance(effect, Answer)}


def only_partition(effects: list[Effect]) -> StartPartition:
    (start,) = [effect for effect in effects if isinstance(effect, StartPartition)]
    return start


def test_the_last_rank_starts_the_partition_and_its_plan_answers_all() -> None:
    session = make_session()
    assert answers(session.submit(1.0, 7, submission(5, rank=2), "c")) == {}
    assert answers(session.submit(1.1, 7, submission(1, 2), "a")) == {}
    start = only_partition(session.submit(1.2, 7, submission(rank=1), "b"))
    assert [part.costs.tolist() for part in start.inputs.parts] == [[1, 2], [], [5]]
    told = answers(session.partitioned(1.3, 7, make_plan(start.inputs)))
    assert told.keys() == {"a", "b", "c"}
    assert len({id(decision) for decision in told.values()}) == 1
    assert told["a"].outcome is Outcome.BALANCED


def test_the_deadline_counts_from_the_first_submission_and_is_the_shortest() -> None:
    session = make_session()
    assert Wake(11.0) in session.submit(1.0, 0, submission(1, timeout=10), "a")
    assert Wake(3.0) in session.submit(2.0, 0, submission(1, timeout=2, rank=1), "b")
    assert session.next_wake() == 3.0
    assert session.tick(2.99) == []
    told = answers(session.tick(3.0))
    decision = told["a"]
    assert isinstance(decision, Decision)
    assert decision.outcome is Outcome.IDENTITY
    assert decision.reason is Reason.DEADLINE
    assert decision.missing_ranks == (2,)
    assert told["b"] is decision


def test_no_rank_is_named_late_where_the_balancer_itself_did_not_run() -> None:
    """What came meanwhile is read late, or was given up by then; a round that came long after is as any other."""
    for opened, missing in ((9.0, ()), (10.5, ()), (11.5, (1, 2))):
        session = make_session()
        session.submit(opened, 0, submission(1, timeout=1), "a")
        decision = answers(session.tick(opened + 1, stopped=(10.0, 4.0)))["a"]
        assert isinstance(decision, Decision)
        assert (decision.reason, decision.missing_ranks) == (Reason.DEADLINE, missing)
        assert ("the balancer itself did not run for 4 s" in decision.detail) is (not missing)


def test_a_late_rank_and_a_rank_that_asks_again_are_told_the_same() -> None:
    session = make_session()
    session.submit(0.0, 0, submission(1, timeout=1), "a")
    first = answers(session.tick(1.0))["a"]
    assert answers(session.submit(5.0, 0, submission(4, rank=1), "late"))["late"] is first
    assert answers(session.submit(6.0, 0, submission(1), "again"))["again"] is first


def test_an_identical_repeat_is_harmless_and_another_is_refused_before_and_after_the_decision() -> None:
    session = make_session()
    session.submit(0.0, 0, submission(1, timeout=1), "a")
    assert answers(session.submit(0.1, 0, submission(1, timeout=0.7), "reconnected")) == {}
    refused = answers(session.submit(0.1, 0, submission(2), "liar"))["liar"]
    assert isinstance(refused, Refusal)
    assert refused.code is Code.CONFLICTING_SUBMIT
    assert not refused.fatal
    told = answers(session.tick(1.0))
    assert told.keys() == {"a", "reconnected"}
    refused = answers(session.submit(2.0, 0, submission(2), "liar"))["liar"]
    assert isinstance(refused, Refusal)
    late = answers(session.submit(2.0, 0, submission(2, rank=1), "late"))["late"]
    assert isinstance(late, Decision)
    refused = answers(session.submit(2.0, 0, submission(3, rank=1), "late"))["late"]
    assert isinstance(refused, Refusal)


def test_a_stream_that_ends_is_not_told_but_what_it_said_counts() -> None:
    session = make_session(world_size=2)
    session.submit(0.0, 0, submission(1), "gone")
    session.leave("gone")
    start = only_partition(session.submit(0.1, 0, submission(1, rank=1), "b"))
    assert answers(session.partitioned(0.2, 0, make_plan(start.inputs))).keys() == {"b"}


def test_decisions_are_remembered_up_to_the_limit_and_never_made_twice() -> None:
    session = make_session(world_size=1, remembered_rounds=4)
    for number in range(10):
        start = only_partition(session.submit(number, number, submission(1), number))
        session.partitioned(number, number, make_plan(start.inputs))
    assert sorted(session.decided) == [6, 7, 8, 9]
    refused = answers(session.submit(11.0, 5, submission(1), "old"))["old"]
    assert isinstance(refused, Refusal)
    assert refused.code is Code.ROUND_OUT_OF_RANGE
    assert refused.field == "round"


def test_plans_are_forgotten_earlier_when_they_take_too_much_memory() -> None:
    memory = Shares(10_000)
    session = Session(0.0, ID, terms(1), Limits(), memory=Account(memory, ("team", "job")))
    session.join(0.0, 0, "", terms(1))
    for number in range(20):
        start = only_partition(session.submit(number, number, submission(1), number))
        session.partitioned(number, number, make_plan(start.inputs))
        del start
    assert 1 <= len(session.decided) < 10
    assert max(session.decided) == 19
    assert 0 < memory.used <= 10_000
    session.close()
    assert memory.held("team") == memory.used == 0


def test_a_rank_may_run_ahead_only_so_far() -> None:
    session = make_session(max_rounds_ahead=2)
    for number in (0, 1):
        assert answers(session.submit(0.0, number, submission(1), "a")) == {}
    refused = answers(session.submit(0.0, 2, submission(1), "a"))["a"]
    assert isinstance(refused, Refusal)
    assert refused.code is Code.ROUND_OUT_OF_RANGE
    assert "max_rounds_ahead" in refused.value
    assert answers(session.submit(0.0, 2, submission(1, rank=1), "b")) == {}, "the others are not held up"
    assert answers(session.submit(0.0, 1, submission(1), "a2")) == {}, "a repeat is no further round"


def test_open_submissions_take_bounded_memory() -> None:
    memory = Shares(7000)
    session = Session(0.0, ID, terms(3), Limits(), memory=Account(memory, ("team", "job")))
    for rank in range(3):
        session.join(0.0, rank, "", terms(3))
    assert answers(session.submit(0.0, 0, submission(1, 2), "a")) == {}
    refused = answers(session.submit(0.0, 1, submission(1, 2), "a"))["a"]
    assert isinstance(refused, Refusal)
    assert refused.code is Code.LIMIT_EXCEEDED
    assert refused.field == "max_memory"
    session.drain(1.0)
    assert answers(session.submit(2.0, 1, submission(1, 2), "a"))["a"].reason is Reason.DRAINING, "there is room again"


def test_a_wild_round_number_is_refused_once_the_session_has_decided_one() -> None:
    session = make_session(world_size=1, max_round_jump=100)
    assert only_partition(session.submit(0.0, 5000, submission(1), "a")), "any number may be the first"
    session.partitioned(0.0, 5000, PlanFailure(reason=Reason.OVERLOADED, detail=""))
    assert only_partition(session.submit(0.0, 5100, submission(1), "a"))
    refused = answers(session.submit(0.0, 5101, submission(1), "a"))["a"]
    assert isinstance(refused, Refusal)
    assert refused.code is Code.ROUND_OUT_OF_RANGE


@pytest.mark.parametrize(
    ("timeout", "reason"), [(10.0, Reason.WORKER_STUCK), (1.0, Reason.DEADLINE)], ids=["stuck", "deadline"]
)
def test_a_partition_that_does_not_end_is_given_up(timeout: float, reason: Reason) -> None:
    session = make_session(world_size=1, partition_timeout=2.0)
    start = only_partition(session.submit(0.0, 0, submission(1, timeout=timeout), "a"))
    assert start.deadline == timeout
    (wake,) = session.started(0.5, 0)
    assert wake == Wake(min(2.5, timeout))
    decision = answers(session.tick(session.next_wake()))["a"]
    assert isinstance(decision, Decision)
    assert decision.reason is reason
    assert decision.missing_ranks == ()
    assert session.partitioned(5.0, 0, make_plan(start.inputs)) == [], "the plan comes too late"
    assert answers(session.submit(6.0, 0, submission(1), "b"))["b"] is decision


def test_a_round_that_waits_for_a_worker_is_not_taken_for_stuck() -> None:
    session = make_session(world_size=1, partition_timeout=2.0)
    session.submit(0.0, 0, submission(1, timeout=10.0), "a")
    assert session.tick(9.9) == [], "its search has not begun: the partition's time does not count"
    decision = answers(session.tick(10.0))["a"]
    assert isinstance(decision, Decision)
    assert decision.reason is Reason.QUEUED
    assert "no worker was free for 10 s" in decision.detail


def test_a_round_that_nobody_waits_for_is_planned_when_somebody_comes_back() -> None:
    session = make_session(world_size=1)
    session.submit(0.0, 0, submission(1), "a")
    assert session.is_wanted(0)
    session.leave("a")
    assert not session.is_wanted(0)
    assert session.partitioned(0.1, 0, None) == []
    start = only_partition(session.submit(0.2, 0, submission(1), "b"))
    assert answers(session.partitioned(0.3, 0, make_plan(start.inputs))).keys() == {"b"}


def test_a_failed_partition_is_identity_with_its_reason() -> None:
    session = make_session(world_size=1)
    session.submit(0.0, 0, submission(1), "a")
    failure = PlanFailure(reason=Reason.NOT_FOUND, detail="impossible, 3 short")
    decision = answers(session.partitioned(0.1, 0, failure))["a"]
    assert isinstance(decision, Decision)
    assert (decision.outcome, decision.reason, decision.detail) == (
        Outcome.IDENTITY,
        Reason.NOT_FOUND,
        "impossible, 3 short",
    )
    assert len(decision.digest) == 16


def test_draining_answers_who_waits_and_whoever_comes() -> None:
    session = make_session(world_size=2)
    session.submit(0.0, 0, submission(1), "a")
    only_partition([*session.submit(0.0, 1, submission(1), "a"), *session.submit(0.0, 1, submission(1, rank=1), "b")])
    effects = session.drain(1.0)
    drained = [effect for effect in effects if isinstance(effect, Answer)]
    assert [(answer.round, answer.asker) for answer in drained] == [(0, "a"), (1, "a"), (1, "b")]
    effects = session.submit(2.0, 2, submission(1, rank=1), "late")
    for effect in [*drained, *(e for e in effects if isinstance(e, Answer))]:
        assert isinstance(effect.result, Decision)
        assert effect.result.reason is Reason.DRAINING
    assert sum(isinstance(effect, Decided) for effect in effects) == 1


def test_ranks_that_differ_are_told_both_values() -> None:
    session = make_session()
    schema = ("ids int64 jagged []",)
    cases = [
        (replace(terms(3), world_size=4), "world_size", "3", "4"),
        (terms(3, window=2), "window", "1", "2"),
        (terms(3, options=options(strategy="lpt")), "options.strategy", "minimal_move", "lpt"),
        (terms(3, schema=schema), "schema.fields[0]", "absent", "ids int64 jagged []"),
        (terms(3, schema_hash=b"\x01"), "schema.hash", "", "01"),
    ]
    for theirs, field, mine, other in cases:
        refused = session.join(0.0, 1, "", theirs)
        assert refused is not None
        assert refused.code is Code.RANKS_DIFFER
        assert refused.fatal
        assert refused.field == field
        assert mine in refused.value
        assert other in refused.value
    speeds = Session(0.0, ID, terms(2, options=options(speeds=(1.0, 2.0))), Limits())
    refused = speeds.join(0.0, 1, "", terms(2, options=options(speeds=(1.0, 3.0))))
    assert refused is not None
    assert refused.field == "options.speeds[1]"


def test_statistics_count_rounds_by_outcome() -> None:
    session = make_session(world_size=1)
    start = only_partition(session.submit(0.0, 0, submission(1), "a"))
    effects = session.partitioned(0.5, 0, make_plan(start.inputs))
    session.submit(1.0, 1, submission(1), "a")
    effects += session.drain(2.5)
    statistics = session.statistics
    for event in effects:
        if isinstance(event, Decided):
            statistics.count(event.decision, event.waited)
    assert statistics.balanced == 1
    assert statistics.identity == {Reason.DRAINING: 1}
    assert statistics.mean_wait == pytest.approx(1.0)
    assert statistics.last_round == 1


def test_a_copy_is_independent() -> None:
    session = make_session(world_size=2)
    session.submit(0.0, 0, submission(1, timeout=1), "a")
    copy = session.copy()
    copy.tick(2.0)
    assert sorted(copy.decided) == [0]
    assert sorted(session.open_rounds) == [0]
    assert not session.decided
    assert session.statistics.rounds == 0
    assert copy.snapshot() != session.snapshot()
    assert session.copy().snapshot() == session.snapshot()
    assert hash(session.copy().snapshot()) == hash(session.snapshot())


def test_fingerprints_tell_submissions_apart() -> None:
    base = submission(1, 2)
    assert base == submission(1, 2, timeout=3.0)
    different = [
        submission(2, 1),
        submission(1, 2, dtype=np.float64),
        submission(1, 2, sizes=np.array([1, 1])),
        submission(1, 2, memory=np.array([1.0, 1.0])),
        submission(1, 2, lengths=np.array([[1], [2]], np.uint32)),
        submission(1, 2, lengths=np.empty((2, 0), np.uint32)),
    ]
    assert len({base, *different}) == 1 + len(different)


def test_numbers_that_differ_only_in_their_high_bits_are_told_apart() -> None:
    """Also the same on other samples, of which products with random numbers alone would take every other for one."""
    for place in range(40):
        costs = np.zeros(41)
        costs[place] = 2.0  # 0x4000000000000000
        assert submission(*costs, dtype=np.float64) != submission(*np.roll(costs, 1), dtype=np.float64)


def test_a_node_comes_together_and_its_late_rank_alone() -> None:
    session = make_session(world_size=4)
    assert answers(session.submit(0.0, 0, node(0, 3), "node")) == {}
    assert answers(session.submit(0.1, 0, submission(1, rank=1), "alone")) == {}
    start = only_partition(session.submit(0.2, 0, node(2), "node"))
    assert sum(part.num_ranks for part in start.inputs.parts) == 4
    plan = make_plan(start.inputs)
    told = [effect for effect in session.partitioned(0.3, 0, plan) if isinstance(effect, Answer)]
    assert [(one.asker, one.ranks) for one in told] == [("node", (0, 3, 2)), ("alone", (1,))]


def test_ranks_may_say_again_with_others_what_they_said() -> None:
    session = make_session(world_size=4)
    session.submit(0.0, 0, node(0, 1, 2, timeout=1), "before")
    again = node(1, 2, 3, costs=(1,))
    assert only_partition(session.submit(0.1, 0, again, "after"))
    told = [effect for effect in session.tick(5.0) if isinstance(effect, Answer)]
    assert [(one.asker, one.ranks) for one in told] == [("before", (0, 1, 2)), ("after", (1, 2, 3))]
    liar = [*session.submit(6.0, 0, node(0, 1, costs=(2,)), "liar"), *session.submit(6.0, 0, node(0, 3), "again")]
    told = [effect for effect in liar if isinstance(effect, Answer)]
    assert [one.ranks for one in told] == [(0,), (1,), (0, 3)]
    assert [isinstance(one.result, Refusal) for one in told] == [True, True, False]


def test_of_a_node_only_who_contradicts_itself_or_is_too_far_ahead_is_refused() -> None:
    session = make_session(world_size=4, max_rounds_ahead=2)
    session.submit(0.0, 0, node(0, 1), "a")
    told = [one for one in session.submit(0.0, 0, node(1, 2, costs=(2,)), "b") if isinstance(one, Answer)]
    assert [(one.ranks, one.result.code) for one in told if isinstance(one.result, Refusal)] == [
        ((1,), Code.CONFLICTING_SUBMIT)
    ]
    assert session.open_rounds[0].submissions.keys() == {0, 1, 2}
    session.submit(0.0, 1, node(0), "a")
    told = [one for one in session.submit(0.0, 2, node(0, 1, 3), "a") if isinstance(one, Answer)]
    assert [(one.ranks, one.result.code) for one in told if isinstance(one.result, Refusal)] == [
        ((0,), Code.ROUND_OUT_OF_RANGE)
    ]
    assert session.open_rounds[2].submissions.keys() == {1, 3}


def test_a_round_decided_after_later_ones_were_forgotten_does_not_bring_them_back() -> None:
    session = make_session(world_size=2, remembered_rounds=2)
    session.submit(0.0, 0, submission(1, timeout=9), "slow")
    for number in (5, 6, 7):
        session.submit(0.0, number, submission(1, timeout=1), "a")
    session.tick(1.0)
    assert session.floor == 5
    assert answers(session.tick(9.0)).keys() == {"slow"}
    assert session.floor == 5
    refused = answers(session.submit(9.0, 5, submission(1, rank=1), "late"))["late"]
    assert isinstance(refused, Refusal)


def test_rounds_before_the_end_are_planned_and_those_behind_it_are_not() -> None:
    session = make_session(2)
    session.submit(0.0, 0, submission(1), "a")
    assert session.newest == 0
    assert session.drain(1.0, session.newest + 1) == []
    assert any(isinstance(one, StartPartition) for one in session.submit(2.0, 0, submission(2, rank=1), "b"))
    assert answers(session.submit(2.0, 1, submission(3), "a"))["a"].reason is Reason.DRAINING
    assert set(session.open_rounds) == {0}


def test_what_the_ranks_know_of_their_speeds_is_told_whatever_becomes_of_the_round() -> None:
    session, late = make_session(), LearnedSpeeds(delays=(Delay(rank=1, cause=Cause.LOADING, share=0.5, since=9),))
    session.submit(0.0, 4, submission(1, timeout=1, learned=late), "a")
    session.submit(0.0, 5, submission(1, timeout=2), "a")
    session.submit(0.0, 6, submission(1, rank=1, timeout=2), "b")
    session.tick(1.0)
    assert session.statistics.last_learned is late
    session.tick(2.0)  # of the last of these rounds rank 0 has said nothing
    assert session.statistics.last_learned == LearnedSpeeds()


def test_rounds_that_the_ranks_have_agreed_on_are_closed_as_what_they_are() -> None:
    session = make_session(2)
    for number in (3, 4, 5):
        session.submit(0.0, number, submission(1), "a")
    effects = session.told(1.0, 5, {3: unfollowed(Reason.NO_DECISION, (0, 1))})
    decided = [
        (one.round, one.decision.reason, one.decision.missing_ranks) for one in effects if isinstance(one, Decided)
    ]
    assert decided == [(3, Reason.NO_DECISION, (1,)), (4, Reason.NOT_TRAINED, ())]
    assert session.open_rounds.keys() == {5}
    # Also of a rank whose submission has been on its way for long.
    late = session.submit(2.0, 2, submission(1, rank=1), "b")
    assert [one.decision.reason for one in late if isinstance(one, Decided)] == [Reason.NOT_TRAINED]
    assert session.told(3.0, 4, {}) == []
    only_partition(session.submit(3.0, 5, submission(1, rank=1), "b"))
    assert [one.round for one in session.told(4.0, 6, {}) if isinstance(one, Decided)] == [5]
    assert session.partitioned(5.0, 5, PlanFailure(reason=Reason.WORKER_DIED, detail="")) == []


def test_the_wait_of_a_round_counts_from_when_the_nodes_leader_had_the_first_of_it() -> None:
    session = make_session(2)
    both = replace(node(0, 1), held=np.array([0.5, 2.0]))
    session.submit(10.0, 0, both, "a")
    (decided,) = [one for one in session.drain(11.0) if isinstance(one, Decided)]
    assert decided.waited == 3.0


@pytest.mark.parametrize("window", [1, 2])
def test_how_even_a_round_without_a_plan_is_follows_from_its_submissions(window: int) -> None:
    sizes = {"batch_sizes": (2, 1)} if window > 1 else {}
    chosen = options(speeds=(1.0, 0.5))
    session = Session(0.0, ID, terms(2, window=window, options=chosen), Limits())
    failed = PlanFailure(reason=Reason.PARTITION_FAILED, detail="no assignment")
    session.submit(0.0, 0, submission(4, 2, 6, rank=1, window=window, **sizes), "b")
    session.submit(0.0, 0, submission(8, 1, 1, window=window, **sizes), "a")
    (event,) = [one for one in session.partitioned(1.0, 0, failed) if isinstance(one, Decided)]
    if window == 1:  # loads of 10 and 12, over their speeds
        assert event.loaded == Loaded(6, 24.0, pytest.approx(17.0))
    else:  # 9 and 6, then 1 and 6
        assert event.loaded == Loaded(6, 12.0 + 12.0, pytest.approx((9 + 12) / 2 + (1 + 12) / 2))
    session.submit(2.0, 1, submission(8, timeout=1), "a")
    (late,) = [one for one in session.tick(3.0) if isinstance(one, Decided)]
    assert late.loaded is None  # of a rank that has not come
