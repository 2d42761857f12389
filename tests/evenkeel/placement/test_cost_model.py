from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from evenkeel.placement import (
    Mode,
    PlanRequest,
    Runtime,
    RuntimeCosts,
    Step,
    Table,
    Topology,
    Zipf,
    builtin_profile,
    builtin_profiles,
)
from evenkeel.placement.calibration import fit_costs, predictor
from evenkeel.placement.fields import encode
from evenkeel.placement.hardware import parse_profile
from evenkeel.placement.options import RankLoad, mode_seconds, ratio_grid, table_options
from tests.evenkeel.placement.dynamicemb_steps import MEASURED, measured_request, measured_step, predicted_mib

PROFILE = builtin_profile("h200")
ROUND = RuntimeCosts(
    hbm_fixed_s=1e-3, caching_fixed_s=2e-3, host_fixed_s=2e-3, miss_factor=1.5, contention_rows=3.0, hybrid_hit=0.1
)
"""Round figures to begin a fit with: a cache or host memory launching about twice what HBM alone does."""
STEPS = [measured_step(row) for row in MEASURED]
PREDICTED = [predictor(PROFILE, Runtime.DYNAMICEMB, step) for step in STEPS]


@pytest.mark.parametrize(
    ("fitted", "others"),
    [(slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2)), (slice(None), slice(0))],
)
def test_half_of_the_measurements_predicts_the_other_half_and_the_order_of_all(fitted: slice, others: slice) -> None:
    costs = fit_costs(PROFILE, Runtime.DYNAMICEMB, STEPS[fitted], ROUND)
    order = sorted(range(len(MEASURED)), key=lambda i: MEASURED[i].milliseconds)
    assert sorted(range(len(MEASURED)), key=lambda i: PREDICTED[i](costs)) == order
    for row, seconds in zip(MEASURED[others], PREDICTED[others], strict=True):
        ample = row.cache_per_unique is None or row.cache_per_unique >= 8
        assert seconds(costs) * 1e3 == pytest.approx(row.milliseconds, rel=0.2 if ample else 0.5)


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row.mode}-{row.ratio}")
def test_predicted_memory_covers_what_was_in_use_within_a_tenth(row: object) -> None:
    mib = predicted_mib(measured_request(), row)  # type: ignore[arg-type]
    assert row.device_mib <= mib <= 1.1 * row.device_mib  # type: ignore[attr-defined]


def test_unique_keys_agree_with_those_measured() -> None:
    asked = measured_request()
    assert sum(RankLoad(asked, table).unique for table in asked.tables) == pytest.approx(173_500, rel=1e-3)


def test_profiles_survive_json_and_name_their_source() -> None:
    for profile in builtin_profiles().values():
        assert parse_profile(encode(profile)) == profile
        assert profile.source
        assert profile.date


def _asked(exponent: float, dim: int, samples: int) -> tuple[PlanRequest, Table]:
    table = Table(name="a", rows=200_000, dim=dim, ids_per_sample=8.0, access=Zipf(exponent=exponent), pooled=True)
    request = PlanRequest(
        tables=(table,),
        topology=Topology(ranks=1, hbm_bytes=1 << 40),
        hardware="h200",
        runtime=Runtime.TORCHREC,
        step=Step(samples_per_rank=samples),
    )
    return request, table


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.2])
@pytest.mark.parametrize("dim", [16, 64, 256])
@pytest.mark.parametrize("samples", [64, 4096, 32_768])
def test_the_larger_a_cache_the_shorter_a_step_from_none_to_one_of_all_rows(
    exponent: float, dim: int, samples: int
) -> None:
    request, table = _asked(exponent, dim, samples)
    load, costs = RankLoad(request, table), request.profile.costs(request.runtime)
    ratios = np.linspace(0.0, 1.0, 400)
    seconds = mode_seconds(load, Mode.CACHING, ratios, ratios * table.rows)
    hits = load.unique * (1 - load.keys.misses(ratios * table.rows))
    found = costs.cache_lookup_s * load.received + costs.cache_hit_s * hits
    assert (seconds > found).all()
    seconds = seconds - found  # of the rows, apart from looking them up in a cache
    assert (np.diff(seconds) <= 1e-12).all()
    in_host = mode_seconds(load, Mode.HOST_ONLY, ratios[:1], ratios[:1])[0]
    assert seconds[0] == pytest.approx(in_host, rel=0.01)
    assert seconds[0] > 1.5 * seconds[-1]


def test_only_caches_that_need_not_hold_a_step_may_be_smaller_than_one() -> None:
    request, table = _asked(0.8, 64, 4096)
    unique = RankLoad(request, table).unique
    grid = ratio_grid(1)
    smallest = {}
    for name, asked in (
        ("torchrec", request),
        ("prefetching", replace(request, step=replace(request.step, prefetch_depth=2))),
        ("dynamicemb", replace(request, runtime=Runtime.DYNAMICEMB)),
    ):
        cached = [ratio for own in table_options(asked, table, grid) if own.mode is Mode.CACHING for ratio in own.ratio]
        smallest[name] = min(cached) * table.rows
    assert smallest["torchrec"] < 0.1 * unique
    assert unique <= smallest["dynamicemb"] < 1.3 * unique
    assert 2 * unique <= smallest["prefetching"] < 2.3 * unique


def test_a_small_table_that_is_looked_up_often_is_not_faster_in_host_memory() -> None:
    request, table = _asked(1.2, 8, 32)
    load = RankLoad(request, replace(table, rows=3))
    one, none = np.ones(1), np.zeros(1)
    in_hbm = mode_seconds(load, Mode.HBM_ONLY, one, one * table.rows)
    in_host = mode_seconds(load, Mode.HOST_ONLY, none, none)
    assert in_host >= in_hbm
