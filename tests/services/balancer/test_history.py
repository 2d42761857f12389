"""What is remembered of a session's rounds."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.harness.plans import said
from evenkeel.partitioning.rounds import RoundOptions, plan_round
from evenkeel.partitioning.samples import RankSamples, RoundSamples
from services.balancer.decisions import Reason, balanced, identity, unfollowed
from services.balancer.effects import Decided, Loaded, PlanInput, SessionId
from services.balancer.history import COLUMNS, ROUNDS, History, heaviest
from services.balancer.submissions import SessionKey
from tests.evenkeel.partitioning.test_split_rounds import giants
from tests.services.balancer.samples import node, submission

SESSION = SessionId(SessionKey("job", "default", "train"), "run", 0)
COSTS = ((9, 1, 5, 5), (1, 1, 1, 1))


def planned(
    costs: tuple[tuple[int, ...], ...] = COSTS, batch_sizes: tuple[tuple[int, ...], ...] | None = None, **options: Any
) -> Any:
    ranks = [RankSamples(costs=np.array(own), lengths=np.ones((len(own), 1), np.int64)) for own in costs]
    if batch_sizes is not None:
        ranks = [replace(rank, batch_sizes=sizes) for rank, sizes in zip(ranks, batch_sizes, strict=True)]
    columns = RoundSamples.columns(
        [said(ranks, window=len((batch_sizes or ((1,),))[0])).samples], None, with_memory=False
    )
    samples = RoundSamples(**{name: column.joined() for name, column in columns.items()})
    return plan_round(samples, RoundOptions(**options))


def round_of(number: int, decision: Any, waited: float = 0.25) -> Decided:
    return Decided(SESSION, number, decision, waited)


def column(history: History, name: str, since: int = 0) -> list[float]:
    return history.rows(since)[:, COLUMNS.index(name)].tolist()


def test_the_figures_of_the_last_rounds_are_those_of_their_plans() -> None:
    history, plan = History(2), planned()
    assert history.rows().shape == (0, len(COLUMNS))
    for number in range(ROUNDS + 10):
        history.decided(number * 1.0, 1e9 + number, round_of(number, balanced(plan)))
    assert column(history, "round") == list(range(10, ROUNDS + 10))
    assert column(history, "number") == column(history, "round")
    assert set(column(history, "before")) == {20.0}
    assert set(column(history, "after")) == {plan.figures.max_load_after}
    assert set(column(history, "bound")) == {12.0}
    assert column(history, "round", since=ROUNDS + 8) == [ROUNDS + 8, ROUNDS + 9]
    assert column(history, "round", since=ROUNDS + 10) == []


def test_saved_time_is_that_of_the_step_without_balancing() -> None:
    """Steps of 2 s on two GPUs; unbalanced they would take 20/12 as long."""
    history, plan = History(2), planned()
    assert plan.figures.max_load_after == 12.0
    for number in range(11):
        history.decided(2.0 * number, 1e9, round_of(number, balanced(plan)))
    assert history.interval == pytest.approx(2.0)
    assert history.saved_seconds == pytest.approx(10 * 2 * 2.0 * (20 / 12 - 1))
    assert history.lost_seconds == 0.0
    history.decided(20.0 + 3600, 1e9, round_of(11, balanced(plan)))  # a pause of an hour saves nothing
    assert history.saved_seconds < 12 * 2 * 2.0 * (20 / 12 - 1) * 1.4


def test_rounds_that_ranks_submit_ahead_do_not_tell_how_often_rounds_come() -> None:
    history, plan = History(2), planned()
    for number, now in enumerate((0.0, 0.001, 0.002, *(0.25 * step for step in range(1, 30)))):
        history.decided(now, 1e9, round_of(number, balanced(plan)))
    assert history.interval == pytest.approx(0.25, rel=0.1)


def test_all_batches_of_a_window_count() -> None:
    """One batch that balancing makes even, and one that is even: the round saves what both of them do."""
    plan = planned(((9, 3, 6, 6), (1, 1, 6, 6)), ((2, 2), (2, 2)))
    before = sum(batch.max_load_before for batch in plan.batches)
    after = sum(batch.max_load_after for batch in plan.batches)
    assert after < before
    history = History(2)
    for number in range(11):
        history.decided(2.0 * number, 1e9, round_of(number, balanced(plan)))
    assert history.saved_seconds == pytest.approx(10 * 2 * 2.0 * (before / after - 1))
    mean = sum(batch.mean_load for batch in plan.batches)
    assert history.lost_seconds == pytest.approx(10 * 2 * 2.0 * (1 - mean / after))


def test_the_bound_is_in_the_measure_of_the_imbalance_where_ranks_differ_in_speed() -> None:
    """Loads of 8 and 4 over speeds of 1 and 1/2 take 8 seconds on both: even, and no assignment is faster."""
    figures = planned(((4, 2), (2, 4)), speeds=(1.0, 0.5), counts="free").figures
    assert figures.max_load_after == figures.lower_bound == 8.0
    assert figures.imbalance_after == figures.imbalance_bound == 1.0
    assert figures.imbalance_before == pytest.approx(12 / 9)


def test_rounds_without_a_plan_are_told_with_reason_and_ranks() -> None:
    history = History(4)
    late = identity(Reason.DEADLINE, "rank(s) 3 did not come within 1 s", (3,))
    history.decided(0.0, 1e9, round_of(0, late))
    history.decided(1.0, 1e9 + 1, round_of(1, balanced(planned())))
    (told,) = history.fallbacks
    assert (told.round, told.reason, told.missing_ranks) == (0, "deadline", (3,))
    assert history.missed == {3: 1}
    assert math.isnan(column(history, "after")[0])
    assert column(history, "reason") == [Reason.DEADLINE, 0]


def test_a_round_counts_once_the_ranks_have_told_what_they_did() -> None:
    history, plan = History(2), planned()
    assert history.told(0) == []
    for number in range(4):
        assert not history.decided(1.0 * number, 1e9 + number, round_of(number, balanced(plan)))
    assert history.decided(4.0, 1e9 + 4, round_of(4, identity(Reason.DEADLINE, "rank(s) 1 did not come", (1,))))
    assert column(history, "round") == [4]  # without a plan there is nothing to follow
    bad = {1: unfollowed(Reason.INVALID_COSTS, (1,)), 2: unfollowed(Reason.NOT_TRAINED, ())}
    counted = history.told(3, bad)
    assert [(event.round, event.decision.reason) for event in counted] == [(0, Reason.NONE), (1, Reason.INVALID_COSTS)]
    assert column(history, "round") == [4, 0, 1]
    assert column(history, "time") == [1e9 + 4, 1e9, 1e9 + 1]  # when they were decided
    assert column(history, "reason") == [Reason.DEADLINE, 0, Reason.INVALID_COSTS]
    assert [(one.round, one.reason) for one in history.fallbacks] == [(4, "deadline"), (1, "invalid_costs")]
    assert history.fallbacks[-1].detail == "the costs of rank(s) 1 cannot be used; their logs say why"
    assert (history.newest, history.missed, history.gaps) == (4, {1: 1}, type(history.gaps)())
    assert history.told(3, bad) == []  # again, after a reconnect
    assert [event.round for event in history.told()] == [3]


def test_rounds_that_are_not_followed_save_nothing() -> None:
    followed, not_followed, plan = History(2), History(2), planned()
    for history in (followed, not_followed):
        history.told(0)
        for number in range(20):
            history.decided(1.0 * number, 1e9, round_of(number, balanced(plan)))
            history.told(number + 1, {number: unfollowed(Reason.COMPILING, (0,))} if history is not_followed else {})
    assert followed.saved_seconds > 10
    assert not_followed.saved_seconds == 0.0
    assert not_followed.lost_seconds == pytest.approx(19 * 2 * (1 - 12 / 20), rel=0.1)  # as loaded: 20 and 4
    assert not_followed.lost_seconds > followed.lost_seconds == 0.0
    assert followed.interval == not_followed.interval == pytest.approx(1.0)


def test_what_rounds_without_a_plan_cost_is_known_where_loads_are() -> None:
    caps = identity(Reason.PARTITION_FAILED, "no assignment within the memory caps")
    known, unknown, told = Loaded(8, 20.0, 10.0), History(2), History(2)
    by_ranks, bad = unfollowed(Reason.NOT_FOLLOWED, by_ranks=True), unfollowed(Reason.INVALID_COSTS, (1,))
    told.told(0)
    for number in range(20):
        now = 1.0 * number
        for history in (unknown, told):
            assert not history.knows_loads
        assert unknown.decided(now, 1e9, round_of(number, identity(Reason.DEADLINE, "rank(s) 1 did not come", (1,))))
        assert told.decided(now, 1e9, round_of(number, caps)._replace(loaded=known))
        told.told(number + 1, {number: bad if number % 2 else by_ranks})
    assert unknown.lost_seconds == told.lost_seconds == 0.0
    history = History(2)
    history.told(0)
    for number in range(21):
        assert history.decided(1.0 * number, 1e9, round_of(number, caps)._replace(loaded=known))
        assert history.knows_loads == (number > 0)  # once the ranks have told that all samples stayed
        history.told(number + 1, {})
    assert history.lost_seconds == pytest.approx(20 * 2 * 0.5)


def test_a_round_of_no_samples_is_the_end_of_a_loop_and_none_without_a_plan() -> None:
    history = History(2)
    costly = identity(Reason.TOO_COSTLY, "takes too long")
    assert history.decided(0.0, 1e9, round_of(0, costly)._replace(loaded=Loaded(8, 20.0, 10.0)))
    assert not history.decided(1.0, 1e9, round_of(1, costly)._replace(loaded=Loaded(0, 0.0, 0.0)))
    assert (history.rounds, [one.round for one in history.fallbacks]) == (1, [0])


def test_of_ranks_that_tell_no_more_only_some_rounds_are_held() -> None:
    history, plan = History(2), planned()
    history.told(0)
    held = [not history.decided(1.0 * number, 1e9, round_of(number, balanced(plan))) for number in range(100)]
    assert 0 < sum(held) < 50
    assert len(history.told()) == sum(held)
    assert sorted(column(history, "round")) == list(range(100))


def test_rounds_that_did_not_come_are_counted_and_late_decisions_are_no_gap() -> None:
    history, plan = History(2), planned()
    for came, decided in ((0, 0), (1, 1), (5, None), (6, None), (7, 7), (None, 6), (None, 5), (8, 8)):
        if came is not None:
            history.arrived(0.1 * came, came, submission(0))
        if decided is not None:
            history.decided(1.0, 1e9, round_of(decided, balanced(plan)))
    assert [(gap.first, gap.last) for gap in history.gaps] == [(2, 4)]
    assert (history.num_gaps, history.skipped) == (1, 3)


def test_a_round_of_a_gap_that_comes_after_all_counts_once() -> None:
    """As rounds that lie unread while the balancer is stopped: those of new streams may be read before them."""
    history = History(2)
    for number in (0, 9):
        history.arrived(0.1 * number, number, submission(0))
        history.decided(1.0, 1e9, round_of(number, balanced(planned())))
    late = identity(Reason.DEADLINE, "the balancer itself did not run for 4 s")
    for number, gaps in ((1, [(2, 8)]), (5, [(2, 4), (6, 8)]), (8, [(2, 4), (6, 7)])):
        history.arrived(2.0, number, submission(0))
        history.decided(3.0, 1e9, round_of(number, late))
        assert [(gap.first, gap.last) for gap in history.gaps] == gaps
        assert history.skipped == sum(last - first + 1 for first, last in gaps)
        assert history.num_gaps == len(gaps)


def test_rounds_that_nobody_trained_are_neither_counted_nor_a_gap() -> None:
    history, plan, none = History(2), planned(), unfollowed(Reason.NOT_TRAINED)
    for number in range(3):
        history.arrived(0.1 * number, number, submission(0))
    history.told(0)
    assert not history.decided(1.0, 1e9, round_of(0, balanced(plan)))
    assert not history.decided(1.0, 1e9, round_of(2, none))  # came, and was open when the loop was over
    assert [event.round for event in history.told(5, {1: none, 2: none, 3: none, 4: none})] == [0]
    history.arrived(0.5, 5, submission(0))
    history.decided(1.0, 1e9, round_of(5, balanced(plan)))
    assert [event.round for event in history.told()] == [5]
    assert (history.rounds, history.num_gaps, [*history.gaps], [*history.fallbacks]) == (2, 0, [], [])


def test_what_the_ranks_balanced_by_themselves_is_told_once_and_saves_nothing() -> None:
    history, plan = History(2), planned()
    history.told(0)
    history.decided(1.0, 1e9, round_of(0, identity(Reason.DEADLINE, "rank(s) 1 did not come", (1,))))
    history.decided(2.0, 1e9, round_of(1, balanced(plan)))
    told = {
        0: unfollowed(Reason.NOT_FOLLOWED, by_ranks=True),
        1: unfollowed(Reason.NO_DECISION, (1,), by_ranks=True),
    }
    for _ in range(2):  # again, after a reconnect
        history.told(2, told)
        assert history.by_ranks == 2
    assert [(one.reason, one.detail) for one in history.fallbacks] == [
        ("deadline", "rank(s) 1 did not come; the ranks balanced it by themselves"),
        ("no_decision", "rank(s) 1 got no answer in time; the ranks balanced it by themselves"),
    ]
    assert column(history, "reason") == [Reason.DEADLINE, Reason.NO_DECISION]
    assert history.saved_seconds == history.lost_seconds == 0.0


def test_a_rank_that_comes_last_is_known_by_its_lateness() -> None:
    history, plan = History(3), planned()
    now = 0.0
    for number in range(50):
        now += 1.0
        for rank, late in ((1, 0.0), (0, 0.001), (2, 0.3)):
            history.arrived(now + late, number, submission(1, rank=rank))
        history.arrived(
            now + 0.9, number, submission(1, rank=1)
        )  # asks again after a reconnect: it came when it came first
        history.decided(now + 0.3, 1e9, round_of(number, balanced(plan)))
    assert history.late == {0: pytest.approx(0.001), 1: 0.0, 2: pytest.approx(0.3)}


def test_of_ranks_that_come_together_the_last_is_known_by_how_long_the_others_were_held() -> None:
    """Two nodes: one sends all at once when its last rank has come, the other says nothing of it."""
    history, plan = History(4), planned()
    for number in range(50):
        history.arrived(number + 0.5, number, replace(node(0, 1), held=np.array([0.3, 0.0])))
        history.arrived(number + 0.6, number, node(2, 3))
        history.decided(number + 0.6, 1e9, round_of(number, balanced(plan)))
    near = {0: 0.0, 1: 0.3, 2: 0.4, 3: 0.4}
    assert history.late == {rank: pytest.approx(late) for rank, late in near.items()}
    assert replace(node(0, 1), held=np.array([1e9, 0.0])).arrivals(100.0) == {0: 40.0, 1: 100.0}


def test_a_round_that_is_never_decided_is_given_up() -> None:
    history, plan = History(2), planned()
    history.arrived(0.0, 0, submission(1, rank=0))
    for number in range(1, 100):
        history.arrived(number * 1.0, number, submission(1, rank=0))
        history.arrived(number + 0.5, number, submission(1, rank=1))
        history.decided(number + 0.5, 1e9, round_of(number, balanced(plan)))
    assert history.late == {0: 0.0, 1: pytest.approx(0.5)}


def test_of_heavy_samples_in_pieces_the_first_ones_rank_and_their_number_are_told() -> None:
    done = giants()
    inputs = PlanInput(parts=(done.samples,), options=done.options, nodes=("",) * 4)
    found = heaviest((0, inputs, done.plan()), 12)
    assert [(one["home"], one["pieces"]) for one in found] == [
        (0, 4),
        *[(home, 1) for home in (3, 3, 3, 2, 2, 2, 1, 1, 1, 0, 0)],
    ]
    of_home = {rank: done.plan().of(rank).ranks_in(0).tolist() for rank in range(4)}
    for home, ranks in of_home.items():
        assert sorted(one["rank"] for one in found if one["home"] == home) == sorted(ranks)


def test_the_heaviest_samples_are_found_when_somebody_looks() -> None:
    history, plan = History(2), planned()
    ranks = [RankSamples(costs=np.array(own), lengths=np.ones((len(own), 1), np.int64)) for own in COSTS]
    inputs = PlanInput(parts=(said(ranks).samples,), options=RoundOptions(), nodes=("a", "b"))
    first, second, *_ = heaviest((0, inputs, plan), 3)
    assert (first["cost"], first["home"], first["share"]) == (9.0, 0, pytest.approx(0.75))
    assert (second["cost"], second["home"]) == (5.0, 0)
    assert (first["rank"], first["pieces"]) == (plan.slices.destinations[0], 1)
    history.look_at_sample()
    assert (history.sample_wanted, history.heaviest) == (True, None)
    history.planned(100.0, 7, inputs, plan)
    assert history.sample_wanted is False
    history.look_at_sample(again=False)
    assert history.heaviest is not None
    assert (history.heaviest["round"], len(history.heaviest["samples"])) == (7, 8)
    history.planned(100.0, 8, inputs, plan)
    history.forget_sample(105.0)
    assert history.sample is not None
    history.forget_sample(111.0)  # nobody has come
    assert history.sample is None


def test_a_giant_round_is_not_kept() -> None:
    history = History(2)
    plan = SimpleNamespace(slices=SimpleNamespace(destinations=np.zeros((1 << 20) + 1, np.int32)))
    history.planned(0.0, 1, SimpleNamespace(), plan)  # type: ignore[arg-type]
    assert history.sample is None
