from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from evenkeel.placement import (
    Mode,
    PlanRequest,
    Runtime,
    Sharding,
    Table,
    Topology,
    builtin_profile,
    plan,
    whole_step_seconds,
)
from evenkeel.placement.calibration import measured_samples, request_of, with_whole_steps
from evenkeel.placement.fields import encode
from evenkeel.placement.hardware import StepCosts, parse_profile
from evenkeel.placement.whole_step import measured_costs, seconds_of, step_work

MEASURED, MEASURED_ONE_RANK = (measured_costs(one_rank=each) for each in (False, True))
MEASURED_STEPS = Path(__file__).parent / "measured"
COSTS = StepCosts(
    host_s=1e-3,
    exchange_host_s=2e-3,
    table_host_s=1e-5,
    cache_host_s=5e-4,
    rows_host_s=3e-4,
    exchange_gpu_s=3e-4,
    copies=5.0,
)


def _request(ranks: int, *tables: Table) -> PlanRequest:
    topology = Topology(ranks=ranks, hbm_bytes=1 << 36)
    return PlanRequest(tables=tables, topology=topology, hardware="h200", runtime=Runtime.TORCHREC)


def _table(name: str, mode: Mode, **more: object) -> Table:
    return replace(Table(name=name, rows=100_000, dim=64, modes=(mode,)), **more)  # type: ignore[arg-type]


def test_one_rank_has_costs_of_its_own() -> None:
    request = _request(1, _table("a", Mode.HBM_ONLY))
    found = plan(request)
    assert whole_step_seconds(request, found) == pytest.approx(seconds_of(step_work(request, found), MEASURED_ONE_RANK))
    torchrec = replace(request.profile.costs(Runtime.TORCHREC), step=replace(COSTS, host_s=0.2))
    torchrec = replace(torchrec, step_one_rank=replace(COSTS, host_s=0.5))
    written = encode(replace(request.profile, runtimes={"torchrec": torchrec}))
    profile = parse_profile(json.loads(json.dumps(written)))
    assert profile.costs(Runtime.TORCHREC) == torchrec
    for ranks, seconds in ((1, 0.502), (2, 0.202)):
        own = replace(request, hardware=profile, topology=replace(request.topology, ranks=ranks))
        assert whole_step_seconds(own, plan(own)) == pytest.approx(seconds, rel=2e-3)


def test_tables_without_exchange_take_their_own_time() -> None:
    request = _request(2, _table("a", Mode.HBM_ONLY, sharding=Sharding.DATA_PARALLEL))
    found = plan(request)
    assert found.seconds is not None
    assert found.host_seconds is not None
    assert whole_step_seconds(request, found) == pytest.approx(found.seconds + found.host_seconds)


def test_the_slower_of_host_and_gpu_tells() -> None:
    request = _request(2, _table("a", Mode.HBM_ONLY))
    found = plan(request)
    launched = MEASURED.host_s + MEASURED.exchange_host_s + MEASURED.rows_host_s
    assert whole_step_seconds(request, found) == pytest.approx(launched, rel=0.01)
    slow = replace(found, seconds=1.0, host_seconds=0.0)
    assert whole_step_seconds(request, slow) == pytest.approx(1.0, rel=1e-3)
    assert whole_step_seconds(request, replace(found, seconds=None)) is None


@pytest.mark.parametrize(
    ("file", "field"),
    [("steps_2xh200.json", "step"), ("steps_h200.json", "step_one_rank")],
)
def test_a_profile_is_calibrated_with_steps_that_were_measured(file: str, field: str) -> None:
    rows = json.loads((MEASURED_STEPS / file).read_text("utf-8"))["rows"]
    samples = measured_samples(rows[::2])
    profile, told = with_whole_steps(builtin_profile("h200"), samples)
    assert [sample for sample, _ in told] == list(samples)
    for sample, predicted in told:
        request = request_of(sample, profile)
        assert whole_step_seconds(request, plan(request)) == pytest.approx(predicted)
        assert predicted == pytest.approx(sample.seconds, rel=0.3)
    before, after = builtin_profile("h200").costs(Runtime.TORCHREC), profile.costs(Runtime.TORCHREC)
    assert after == replace(before, **{field: getattr(after, field)}) != before


@pytest.mark.parametrize(
    ("file", "profile", "steps"),
    [
        ("steps_h200.json", "h200", 50),
        ("steps_h200_first.json", "h200", 34),
        ("steps_h100.json", "h100", 34),
    ],
)
def test_measured_steps_are_predicted_within_a_fifth(file: str, profile: str, steps: int) -> None:
    record = json.loads((MEASURED_STEPS / file).read_text("utf-8"))
    samples = measured_samples(record["rows"])
    assert len(samples) == steps
    for sample in samples:
        request = request_of(sample, builtin_profile(profile))
        predicted = whole_step_seconds(request, plan(request)) or 0.0
        assert predicted == pytest.approx(sample.seconds, rel=0.2), sample.name
