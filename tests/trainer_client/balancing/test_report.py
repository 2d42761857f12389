"""What a round's report says of it, whoever planned it or whether nobody did."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from trainer_client.balancing.agreement import Mode, Reason, Verdict
from trainer_client.balancing.tickets import nothing_to_do
from trainer_client.balancing.votes import Vote

from evenkeel.partitioning.rounds import Figures, RankPlan
from evenkeel.partitioning.samples import RankSamples
from trainer_client.balancing.options import BalanceOptions
from trainer_client.balancing.report import Counters, RoundReport, report_round
from trainer_client.observing.measures import RankMeasures

SAMPLES = RankSamples(costs=np.array([4, 6]), lengths=np.array([[1], [2]]), sizes=np.array([8, 16]), batch_sizes=(2,))
VOTES = [Vote(round=0, samples=2, load=10.0, heaviest=6.0), Vote(round=0, samples=1, load=10.0, heaviest=10.0)]


def report(plan: RankPlan, mode: Mode, votes: list[Vote] = VOTES, **options: object) -> RoundReport:
    ticket = nothing_to_do()
    ticket.samples = SAMPLES
    verdict = Verdict(mode=mode, reason=Reason.NONE)
    chosen = BalanceOptions(**options)  # type: ignore[arg-type]
    (only,) = report_round(ticket, votes, verdict, plan=plan, rank=0, options=chosen, wait_seconds=0.5)
    return only


@pytest.mark.parametrize("speeds", [None, [1.0, 2.0]])
def test_without_a_plan_a_batch_is_as_even_as_it_was_loaded(speeds: list[float] | None) -> None:
    found = report(RankPlan.staying(0, SAMPLES, 1), Mode.IDENTITY, speeds=speeds)
    times = np.array([10.0, 10.0]) / np.array(speeds or [1.0, 1.0])
    assert found.imbalance_before == found.imbalance == times.max() / times.mean(), "max/mean of load over speed"
    assert found.max_load == found.max_load_before == times.max()
    assert (found.own_load, found.samples, found.own_samples, found.moved_samples) == (10.0, 3, 2, 0)
    assert (found.size, found.moved_size, found.wait_seconds) == (24, 0, 0.5)
    assert found.lower_bound == 10.0 or (speeds and np.isnan(found.lower_bound))


def test_a_plan_tells_its_own_figures() -> None:
    figures = Figures(
        mean_load=10.0, max_load_before=10.0, max_load_after=7.0, imbalance_before=4 / 3, imbalance_after=1.05,
        lower_bound=6.67, samples=3, moved_samples=1, size=40, moved_size=16, moved_size_between_nodes=16,
    )  # fmt: skip
    plan = replace(RankPlan.staying(0, SAMPLES, 1), figures=(figures,), loads=(7.0,), seconds=0.25)
    found = report(plan, Mode.SERVICE, speeds=[1.0, 2.0])
    assert (found.own_load, found.max_load, found.imbalance, found.lower_bound) == (7.0, 7.0, 1.05, 6.67)
    assert (found.moved_samples, found.size, found.moved_size, found.partition_seconds) == (1, 40, 16, 0.25)
    assert found.imbalance_before == pytest.approx(4 / 3)
    assert found.moved_share == 0.4
    # Of ranks that differ in speed the mean of load over speed changes, too: what is saved is told by the largest.
    measures = RankMeasures(job="job", rank=0)
    measures.step("train", found, 7.0)
    labels = {"job": "job", "rank": "0", "loader": "train"}
    saved = measures.registry.get_sample_value("evenkeel_trainer_saved_seconds_total", labels)
    assert saved == pytest.approx(7.0 * (10.0 / 7.0 - 1))


@pytest.mark.parametrize("planned", [False, True])  # min_samples may move some even so
def test_where_costs_cannot_be_used_loads_are_unknown(planned: bool) -> None:
    votes = [VOTES[0], replace(VOTES[1], load=0.0, heaviest=0.0, costs_valid=False)]
    plan = RankPlan.staying(0, SAMPLES, 1)
    if planned:
        figures = Figures(
            mean_load=5.0, max_load_before=10.0, max_load_after=6.0, imbalance_before=2.0, imbalance_after=1.2,
            lower_bound=6.0, samples=3, moved_samples=1, size=40, moved_size=16, moved_size_between_nodes=16,
        )  # fmt: skip
        plan = replace(plan, figures=(figures,), loads=(6.0,), seconds=0.25)
    found = report(plan, Mode.SPREAD if planned else Mode.IDENTITY, votes)
    assert found.home_loads[0] == 10.0
    unknown = (
        found.home_loads[1], found.max_load_before, found.max_load, found.imbalance_before, found.imbalance,
        found.lower_bound,
    )  # fmt: skip
    assert np.isnan(unknown).all(), unknown
    assert np.isnan(found.own_load) if planned else found.own_load == 10.0
    assert (found.samples, found.own_samples, found.size) == (3, 2, 40 if planned else 24)
    assert found.timed_load == (0.0 if planned else 10.0)
    counters = Counters()
    counters.count(found)
    assert counters.own_load == found.timed_load
    measures = RankMeasures(job="job", rank=0)
    measures.batch("train", found)
    measures.step("train", found, 7.0)
    labels = {"job": "job", "rank": "0", "loader": "train"}
    read = measures.registry.get_sample_value
    for name in ("lost_seconds_total", "saved_seconds_total"):
        assert not read(f"evenkeel_trainer_{name}", labels), name
    for when in ("before", "after", "bound"):
        assert not read("evenkeel_trainer_imbalance_excess_ratio_count", {**labels, "when": when})
    mean = read("evenkeel_trainer_mean_load", labels)
    assert mean is not None
    assert np.isnan(mean)
    assert read("evenkeel_trainer_step_seconds_count", labels) == 1
