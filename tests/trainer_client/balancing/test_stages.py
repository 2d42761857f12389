"""Rounds at the lead: whatever a stage does, every rank hears of it, and without any of them the others go on."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from evenkeel.partitioning.rounds import RankSamples
from evenkeel.partitioning.speeds import ALL_EQUAL
from evenkeel.partitioning.splits import SplitOptions
from trainer_client import BalanceOptions
from trainer_client.balancing.asking import FIRST_PAUSE, Breaker
from trainer_client.balancing.batches import flatten
from trainer_client.balancing.contribution import Contribution, Contributions, Extras, Measure, schema_number
from trainer_client.balancing.directive import Directive, read_directive
from trainer_client.balancing.lead import Lead, Planning, Round, Stage, Templates
from trainer_client.balancing.options import StreamConfig
from trainer_client.balancing.report import Mode, Reason
from trainer_client.balancing.stages import make_lead

TEMPLATE = flatten({"id": torch.arange(2)}).empty()
RANKS = 3


def contributions(seconds: float = 0.0) -> list[Contribution]:
    """Rank 0 has all the work."""
    loaded = []
    for rank in range(RANKS):
        costs = np.full(4, 1 if rank else 100)
        samples = RankSamples(
            costs=costs, lengths=np.zeros((4, 0)), sizes=np.full(4, 8), batch_sizes=(4,), memory=np.ones(4)
        )
        measured = Measure(load=1.0, seconds=seconds * (1 + rank)) if seconds else Measure()
        loaded.append(Contribution(samples=samples, schema=schema_number(TEMPLATE.schema), measured=measured))
    return loaded


def lead(**more: Any) -> Lead:
    return make_lead(StreamConfig(options=BalanceOptions(**more)), template=TEMPLATE, nodes=["a"] * RANKS, waits=True)


def of_stages(whole: Lead, stages: list[Stage]) -> Lead:
    return Lead(whole._rules, whole._options, templates=whole._templates, nodes=["a"] * RANKS, stages=stages)


def directives(one: Lead, number: int = 0, seconds: float = 0.0) -> list[Directive]:
    given = contributions(seconds)
    table = one.directives(one.begin(number, Contributions.of(given)))
    return [read_directive(table[rank], number=number, rank=rank) for rank in range(RANKS)]


def test_a_schema_that_came_shortly_before_is_known_however_many_there_are() -> None:
    templates = Templates("train", TEMPLATE)
    for width, sent in [*((width, True) for width in (*range(1, 65), 2, 65)), (2, False)]:
        one = flatten({"id": torch.zeros(2, width)}).empty()
        extras = Extras(template=one if sent else None)  # a rank sends none if its latest batch had the same
        given = [replace(each, schema=schema_number(one.schema), extras=extras) for each in contributions()]
        template = templates.of_round(Contributions.of(given))
        assert template.schema.hash == one.schema.hash


@pytest.mark.parametrize("moment", ["begin", "finish"])
def test_a_stage_that_fails_is_the_same_error_on_all_ranks(moment: str) -> None:
    def fail(round_: Round) -> None:
        raise KeyError("a cost's fit")

    class Failing(Stage):
        """Does."""

        begin = staticmethod(fail) if moment == "begin" else Stage.begin
        finish = staticmethod(fail) if moment == "finish" else Stage.finish

    whole = lead()
    told = {str(one.decision.error) for one in directives(of_stages(whole, [*whole._stages, Failing()]))}
    assert len(told) == 1
    assert "the lead (rank 0) could not make a round: KeyError" in told.pop()


class LeavingOut(Stage):
    """Nobody trains heavy samples: they go into one more batch of the round, which is left out."""

    def __init__(self) -> None:
        self.rounds = {}  # that are under way, by number: all samples, and which are planned

    def begin(self, round_: Round) -> None:
        whole, kept = self.rounds[round_.number] = round_.samples, round_.samples.costs < 100
        arrays = {name: getattr(whole, name)[kept] for name in ("costs", "lengths", "sizes", "memory")}
        counts = np.bincount(whole.homes[kept], minlength=RANKS)
        round_.samples = replace(whole, batch_sizes=counts[:, None], **arrays)

    def finish(self, round_: Round) -> None:
        whole, kept = self.rounds.pop(round_.number)
        destinations, steps, out = whole.homes, 1 - kept.astype(np.int32), np.zeros((1, RANKS))
        destinations[kept] = round_.plan.destinations
        loads = {name: np.vstack([getattr(round_.plan, name), out]) for name in ("loads_before", "loads_after")}
        figures = round_.plan.batches * 2
        round_.plan = replace(round_.plan, destinations=destinations, steps=steps, batches=figures, **loads)
        round_.samples = replace(whole, batch_sizes=np.hstack([whole.batch_sizes, out.T.astype(int)]))
        round_.decision = replace(round_.decision, batches=(0,))


def test_a_stage_leaves_samples_out() -> None:
    whole = lead()
    for rank, one in enumerate(directives(of_stages(whole, [LeavingOut(), *whole._stages]))):
        assert (one.batches, one.reports[0].samples, one.reports[0].own_samples) == ((0,), 8, 3 if rank else 2)
        assert one.plan.own_in(1) == (0 if rank else 4)


def test_without_any_one_stage_the_others_go_on() -> None:
    whole = lead(window=2, split=SplitOptions(), learn_speeds=True)
    assert len(whole._stages) >= 5
    for left_out in (stage for stage in whole._stages if not isinstance(stage, Planning)):
        part = of_stages(whole, [stage for stage in whole._stages if stage is not left_out])
        for number in range(3):
            for one in directives(part, number, seconds=0.1):
                assert one.decision.mode is Mode.EMBEDDED
                assert one.moves


def test_a_plan_that_cannot_be_made_leaves_samples_at_home_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    (first, *_) = directives(lead(memory_caps=[1.0] * RANKS))
    assert (first.decision.mode, first.decision.reason) == (Mode.IDENTITY, Reason.PARTITION_FAILED)
    assert first.reports[0].own_load == first.reports[0].home_load == 400
    assert first.reports[0].imbalance == pytest.approx(400 / 136)
    assert "stays unbalanced (1 so far)" in caplog.text


def test_costs_that_cannot_be_used_are_told_by_their_rank_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    one, given = lead(), contributions()
    given[1] = replace(given[1], invalid=True, extras=Extras(problem="must be finite"))
    for number in range(9):
        table = one.directives(one.begin(number, Contributions.of(given)))
        for rank in range(RANKS):
            (report,) = read_directive(table[rank], number=number, rank=rank).reports
            assert (report.mode, report.reason) == (Mode.IDENTITY, Reason.INVALID_COSTS)
            np.testing.assert_equal([report.home_load, report.own_load], [(400, np.nan, 4)[rank]] * 2)
            assert np.isnan([report.imbalance_before, report.imbalance, report.max_load, report.lower_bound]).all()
    said = [record.getMessage() for record in caplog.records]
    assert all("rank(s) 1" in line and "must be finite" in line for line in said)
    assert [re.findall(r"\((\d+) so far\)", line) for line in said] == [["1"], ["2"], ["4"], ["8"]]


@pytest.mark.parametrize(
    ("options", "is_learned", "share"),
    [({}, True, 3 * 0.5 / 2.5), ({"learn_speeds": False}, False, 1.0), ({"speeds": [1, 0.5, 1]}, False, 3 * 0.5 / 2.5)],
)
def test_a_slow_rank_gets_less_to_do_unless_that_is_off_or_said(
    options: dict[str, Any], is_learned: bool, share: float
) -> None:
    one, loads, learned = lead(counts="free", **options), np.ones(RANKS), ALL_EQUAL
    costs = {"costs": np.full(24, 10), "lengths": np.zeros((24, 0)), "sizes": np.full(24, 8), "batch_sizes": (24,)}
    for number in range(40):
        seconds = loads * (1, 2, 1)
        given = [
            replace(each, samples=RankSamples(**costs), measured=Measure(load=loads[rank], seconds=seconds[rank]))
            for rank, each in enumerate(contributions())
        ]
        table = one.directives(one.begin(number, Contributions.of(given)))
        reports = [read_directive(row, number=number, rank=rank).reports[0] for rank, row in enumerate(table)]
        loads, learned = np.array([report.own_load for report in reports]), reports[0].learned
    assert loads[1] / loads.mean() == pytest.approx(share, abs=0.05)
    assert [(slow.rank, slow.speed) for slow in learned.stragglers] == [(1, 0.5)] * is_learned


@pytest.mark.parametrize("fails", [False, True])
def test_what_changes_in_a_round_that_nobody_hears_of_is_heard_in_the_next(fails: bool) -> None:
    """Whoever has no samples then reads the batches with the fields that the others' have."""
    one, wide = lead(), flatten({"id": torch.zeros(2, 5)}).empty()
    given = [replace(each, schema=schema_number(wide.schema), extras=Extras(template=wide)) for each in contributions()]
    unheard = one.begin(0, Contributions.of(given))  # the pass has ended before, unless it fails
    if fails:
        unheard.options = None  # which no stage can do with
        assert read_directive(one.directives(unheard)[0], number=0, rank=0).ended
    again = [replace(each, extras=Extras()) for each in given]
    table = one.directives(one.begin(1, Contributions.of(again)))
    read = read_directive(table[0], number=1, rank=0)
    assert read.template.schema.hash == wide.schema.hash


def test_the_third_call_in_a_row_without_an_answer_opens_the_breaker_and_pauses_grow() -> None:
    twice = Breaker().missed(0.0).missed(0.0)
    assert twice.closed
    opened = twice.missed(10.0)
    assert not opened.closed
    assert not opened.asks(10 + 0.9 * FIRST_PAUSE)
    assert opened.asks(10 + FIRST_PAUSE)
    asking = opened.asked(10 + FIRST_PAUSE)  # one round asks, and no other until that is answered
    assert not asking.asks(10 + 1.5 * FIRST_PAUSE)
    assert asking.missed(10.5).pause == 2 * FIRST_PAUSE
