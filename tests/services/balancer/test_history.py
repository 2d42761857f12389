"""What is remembered of rounds, shown of them and counted, without a balancer and with a clock of the test's."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject, settings
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from evenkeel.partitioning import PartitionError
from evenkeel.partitioning.delays import Cause, Delay
from evenkeel.partitioning.refinements import plan_round
from evenkeel.partitioning.speeds import Straggler
from evenkeel.protocol.plan_round import RoundNames, RunFacts
from services.balancer.history import (
    FORGOTTEN_SECONDS,
    LEFT_SECONDS,
    MOST_JOBS,
    MOST_STREAMS,
    OTHER,
    ROUNDS,
    History,
    StreamName,
)
from services.balancer.metrics import Metrics
from services.balancer.summary import RoundSummary, summarize
from services.balancer.views import MOST_RANKS, Views
from tests.evenkeel.protocol.rounds import make_round, rounds

NAME = StreamName("a-job", "default", "train")


def summary_of(job: str = "a-job", number: int = 0, *, ranks: int = 4, run: str = "run", **facts: Any) -> RoundSummary:
    names = RoundNames(job=job, group="default", loader="train", run_id=run, round=number)
    one = make_round(ranks, 8, seed=number, names=names, facts=RunFacts(**facts))
    return summarize(one.names, one.samples, one.options, one.facts, plan_round(one.samples, one.options))


class Watched:
    """A history whose time stands still until it is moved on."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.history = History(clock=lambda: self.now)
        self.views = Views(self.history, version="1", instance=7, draining=lambda: False)
        self.metrics = Metrics(self.history)

    def rows(self, allows: Any = lambda _job: True) -> dict[str, dict[str, Any]]:
        document = json.loads(json.dumps(self.views.overview(allows), allow_nan=False))
        return {row["job"]: row for row in document["streams"]}

    def document(self, name: StreamName = NAME, **how: Any) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(json.dumps(self.views.stream(name, **how), allow_nan=False))
        return found

    def counts(self) -> dict[tuple[str, ...], float]:
        text = generate_latest(self.metrics.registry).decode()
        families = text_string_to_metric_families(text)
        return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


@pytest.fixture
def watched() -> Watched:
    return Watched()


@settings(deadline=None, max_examples=50)
@given(rounds())
def test_any_round_is_shown_and_counted_as_it_was_planned(one: Any) -> None:
    watched = Watched()
    try:
        plan = plan_round(one.samples, one.options)
    except PartitionError:  # nothing fits into the caps
        reject()
    summary = summarize(one.names, one.samples, one.options, one.facts, plan)
    watched.history.planned(summary, 0.25)
    names, figures = one.names, plan.figures
    document = watched.document(StreamName(names.job, names.group, names.loader), all_ranks=True)
    row, loads = document["stream"], [rank["load_after"] for rank in document["ranks"]]
    assert (row["ranks"], row["window"], row["round"]) == (one.samples.num_ranks, one.samples.num_batches, names.round)
    assert loads == pytest.approx(plan.loads_after[plan.worst].tolist(), rel=1e-6)
    assert {field: values[0] for field, values in document["rounds"].items()} == {
        "number": 0, "round": names.round, "time": document["rounds"]["time"][0], "seconds": 0.25,
        "search_seconds": pytest.approx(plan.seconds, rel=1e-6), "samples": figures.samples,
        "imbalance_before": pytest.approx(figures.imbalance_before, rel=1e-6),
        "imbalance_after": pytest.approx(figures.imbalance_after, rel=1e-6),
        "imbalance_bound": pytest.approx(figures.imbalance_bound, rel=1e-6), "moved_samples": figures.moved_samples,
        "size": figures.size, "moved_size": figures.moved_size,
    }  # fmt: skip
    counts = watched.counts()
    assert counts["evenkeel_balancer_samples_total", names.job] == figures.samples
    assert counts["evenkeel_balancer_imbalance_ratio_sum", names.job, "after"] == figures.imbalance_after
    saved = one.samples.num_ranks * one.facts.step_seconds * summary.saved_steps
    assert counts["evenkeel_balancer_saved_gpu_seconds_total", names.job] == pytest.approx(max(0.0, saved))


def test_the_latest_rounds_are_kept_and_asked_for_from_where_one_is(watched: Watched) -> None:
    for number in range(ROUNDS + 5):
        watched.history.planned(summary_of(number=number % 3), 0.001)
    assert watched.document()["rounds"]["number"] == list(range(5, ROUNDS + 5))
    assert watched.document(since=ROUNDS + 3)["rounds"]["number"] == [ROUNDS + 3, ROUNDS + 4]
    assert watched.document(since=10**9)["rounds"]["round"] == []
    watched.history.planned(summary_of(run="another"), 0.001)  # begins anew
    assert watched.document()["rounds"]["number"] == [0]


def test_silence_and_failures_tell_a_streams_state(watched: Watched) -> None:
    def state() -> str:
        return str(watched.rows()["a-job"]["state"])

    watched.history.failed("a-job", "INVALID_ARGUMENT", "request")  # of nobody that is known
    watched.history.planned(summary_of(), 0.001)
    assert (state(), watched.document()["failures"]) == ("balanced", [])
    watched.now += 1
    watched.history.failed("a-job", "UNAVAILABLE", "worker")
    assert state() == "failing"
    (failure,) = watched.document()["failures"]
    assert (failure["status"], failure["reason"]) == ("UNAVAILABLE", "worker")
    assert watched.rows()["a-job"]["failed_calls"] == {"worker": 1}
    watched.history.planned(summary_of("A-job"), 0.001)
    assert list(watched.rows()) == ["a-job", "A-job"]  # those in need come first
    assert list(watched.rows(lambda job: job.startswith("A"))) == ["A-job"]
    watched.now += 1
    watched.history.planned(summary_of(number=1), 0.001)
    assert state() == "balanced"
    watched.now += 11
    assert state() == "quiet"
    watched.now += LEFT_SECONDS
    assert state() == "left"
    assert watched.counts()["evenkeel_balancer_jobs",] == 0
    watched.now += FORGOTTEN_SECONDS
    assert watched.rows() == {}
    assert watched.views.stream(NAME) is None
    watched.history.planned(summary_of("b-job"), 0.001)
    assert "a-job" not in watched.history.totals


def test_what_the_lead_has_seen_is_shown_by_rank_and_counted(watched: Watched) -> None:
    slow = Straggler(rank=1, speed=0.5, since=7)
    late = [
        Delay(rank=3, cause=cause, share=share, since=9) for cause, share in ((Cause.LOOP, 0.2), (Cause.LOADING, 0.4))
    ]
    facts: dict[str, Any] = {"stragglers": (slow,), "delays": tuple(late), "last_trouble": "none", "step_seconds": 0.5}
    watched.history.planned(summary_of(rounds_by_lead=100, **facts), 0.001)
    watched.history.planned(summary_of(number=1, rounds_by_lead=103, rounds_unbalanced=2, **facts), 0.001)
    row = watched.rows()["a-job"]
    assert (row["rounds_by_lead"], row["rounds_unbalanced"], row["last_trouble"]) == (103, 2, "none")
    assert (row["slow_ranks"], row["step_seconds"]) == (2, 0.5)
    ranks = watched.document()["ranks"]
    assert [(rank["speed"], rank["slow_since"]) for rank in ranks] == [(1.0, None), (0.5, 7), (1.0, None), (1.0, None)]
    assert [(rank["delay"], rank["delay_share"]) for rank in ranks][3] == ("loading", 0.4)  # the longer one
    assert [rank["delay"] for rank in ranks][:3] == [None] * 3
    counts = watched.counts()
    assert counts["evenkeel_balancer_rounds_by_lead_total", "a-job"] == 3  # what was before may be counted elsewhere
    assert counts["evenkeel_balancer_slow_ranks", "computing", "a-job"] == 1
    assert counts["evenkeel_balancer_slow_ranks", "loading", "a-job"] == 1


def test_of_many_ranks_the_slow_and_the_busiest_are_shown(watched: Watched) -> None:
    slow = Straggler(rank=3 * MOST_RANKS - 1, speed=0.5, since=1)
    summary = replace(
        summary_of(ranks=2, stragglers=(slow,)), ranks=3 * MOST_RANKS, loads_before=[1.0] * 3 * MOST_RANKS,
        loads_after=np.arange(3.0 * MOST_RANKS)[::-1].tolist(),
    )  # fmt: skip
    watched.history.planned(summary, 0.001)
    document = watched.document()
    assert [rank["rank"] for rank in document["ranks"]] == [*range(MOST_RANKS - 1), slow.rank]
    assert document["ranks_left_out"] == 2 * MOST_RANKS
    assert len(watched.document(all_ranks=True)["ranks"]) == 3 * MOST_RANKS


def test_memory_and_labels_are_bounded(watched: Watched) -> None:
    summary = summary_of()
    for number in range(MOST_STREAMS + 50):
        watched.history.planned(replace(summary, names=replace(summary.names, job=f"job-{number}")), 0.001)
        watched.now += 1
    assert len(watched.history.streams) == MOST_STREAMS
    assert watched.rows().keys() == {f"job-{number}" for number in range(50, MOST_STREAMS + 50)}
    assert len(watched.history.totals) <= MOST_JOBS + 1
    counts = watched.counts()
    rounds = {key[1]: value for key, value in counts.items() if key[0] == "evenkeel_balancer_rounds_total"}
    assert rounds[OTHER] > MOST_STREAMS - MOST_JOBS - 1
    assert max(value for job, value in rounds.items() if job != OTHER) == 1
