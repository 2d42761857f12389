"""What a plan's figures are made of: memory, misses of caches, time of kernels, hot rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.references.key_traces import simulated
from evenkeel.placement import (
    Eviction,
    InvalidInputError,
    MissCurve,
    Mode,
    Optimizer,
    PlanRequest,
    Runtime,
    RuntimeCosts,
    Step,
    Table,
    Topology,
    Zipf,
    builtin_profile,
)
from evenkeel.placement.access import different_share, popularity, step_keys
from evenkeel.placement.calibration import fit_costs, predictor
from evenkeel.placement.hot_rows import with_hot_rows
from evenkeel.placement.options import RankLoad, mode_seconds
from evenkeel.placement.storage import dynamicemb_footprint, row_bytes, torchrec_footprint
from tests.evenkeel.placement.dynamicemb_steps import MEASURED, measured_request, measured_step, predicted_mib

MIB = 1 << 20
SMALL = 1 << 15
NONE, HALF = np.array([0.0]), np.array([0.5])


def _table(**fields: object) -> Table:
    return Table(name="t", **{"rows": 8_000_000, "dim": 128, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [(Optimizer.SGD, 512), (Optimizer.ADAM, 1536), (Optimizer.ADAGRAD, 1024), (Optimizer.ROWWISE_ADAGRAD, 528)],
)
def test_a_row_carries_its_optimizer_state(optimizer: Optimizer, expected: int) -> None:
    assert row_bytes(_table(optimizer=optimizer), training=True) == expected
    assert row_bytes(_table(optimizer=optimizer), training=False) == 512


def test_hbm_only_is_values_and_index_of_the_fullest_rank() -> None:
    # ceil(8e6 / 3) = 2,666,667 rows, in whole buckets of 128: 2,666,752.
    got = dynamicemb_footprint(_table(), Mode.HBM_ONLY, np.array([1.0]), 3, training=True)
    values, index = 2_666_752 * 1536, 2_666_752 * 21 + 2_666_752 // 128 * 4
    assert int(got[0][0]) == -(-values // (2 * MIB)) * 2 * MIB + -(-index // (2 * MIB)) * 2 * MIB
    assert int(got[1][0]) == 0


def test_a_cache_pays_for_overflow_rows_and_an_index_of_its_own() -> None:
    cached = dynamicemb_footprint(_table(), Mode.CACHING, HALF, 1, training=True)
    hybrid = dynamicemb_footprint(_table(), Mode.HYBRID, HALF, 1, training=True)
    assert int(cached[1][0]) == 8_000_000 * 1536
    assert int(hybrid[1][0]) == 4_000_000 * 1536
    assert int(cached[2][0]) == 4_000_768
    extra = 3072 * 1536 + 4_000_768 * 21 + 4_000_768 // 128 * 4
    assert int(cached[0][0] - hybrid[0][0]) == pytest.approx(extra, abs=6 * MIB)


def test_an_admission_counter_takes_hbm() -> None:
    plain = dynamicemb_footprint(_table(), Mode.HBM_ONLY, np.array([1.0]), 1, training=True)
    counted = dynamicemb_footprint(_table(admission_rows=10_000_000), Mode.HBM_ONLY, np.array([1.0]), 1, training=True)
    assert int(counted[0][0] - plain[0][0]) >= 10_000_000 * 21


def test_torchrec_keeps_adam_state_with_the_weights() -> None:
    uvm = torchrec_footprint(_table(), Mode.HOST_ONLY, NONE, 1_000_000, 128, training=True)
    assert int(uvm[0][0]) <= SMALL
    assert int(uvm[1][0]) == 3 * 512_000_000


ROWS, LOOKUPS = 20_000, 1_024


@pytest.mark.parametrize(("exponent", "cache"), [(0.8, 2_000), (0.8, 8_000), (1.05, 1_500), (1.2, 4_000)])
def test_lru_agrees_with_a_simulated_cache(exponent: float, cache: int) -> None:
    keys = step_keys(Zipf(exponent=exponent), ROWS, float(LOOKUPS), Eviction.LRU)
    size, weight = np.array([float(cache)]), np.arange(1, ROWS + 1) ** -exponent
    trace = list(np.random.default_rng(0).choice(ROWS, size=(300, LOOKUPS), p=weight / weight.sum()))
    assert keys.unique == pytest.approx(np.mean([len(np.unique(step)) for step in trace[100:]]), rel=0.01)
    assert keys.misses(size) == pytest.approx(simulated(trace, size, 100, Eviction.LRU), abs=0.015)


def test_lfu_is_the_share_of_the_most_popular_keys() -> None:
    keys = step_keys(Zipf(exponent=1.0), ROWS, float(LOOKUPS), Eviction.LFU)
    probability = 1 / np.arange(1, ROWS + 1)
    touched = 1 - (1 - probability / probability.sum()) ** LOOKUPS
    expected = 1 - touched[:5000].sum() / touched.sum()
    assert float(keys.misses(np.array([5000.0]))[0]) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("eviction", list(Eviction))
@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0])
def test_miss_rates_fall_from_one_to_nothing(eviction: Eviction, exponent: float) -> None:
    keys = step_keys(Zipf(exponent=exponent), ROWS, float(LOOKUPS), eviction)
    rates = keys.misses(np.linspace(0, ROWS, 50))
    assert rates[0] == pytest.approx(1)
    assert rates[-1] == pytest.approx(0, abs=1e-6)
    assert np.all(np.diff(rates) <= 1e-12)


def test_a_measured_curve_is_taken_as_it_is() -> None:
    curve = MissCurve(cache_fractions=(0.1, 0.5), miss_rates=(0.6, 0.2), unique_fraction=0.25)
    keys = step_keys(curve, 1000, 400.0, Eviction.LRU)
    assert keys.unique == 100
    assert keys.misses(np.array([0.0, 100.0, 300.0, 500.0, 1000.0])).tolist() == pytest.approx([1, 0.6, 0.4, 0.2, 0.2])


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.05, 1.3])
@pytest.mark.parametrize("among", [30.0, 400.0])
def test_of_lookups_that_follow_each_other_as_many_differ_as_are_drawn(exponent: float, among: float) -> None:
    weight = np.arange(1, ROWS + 1) ** -exponent
    drawn = np.random.default_rng(1).choice(ROWS, size=(400, int(among)), p=weight / weight.sum())
    expected = np.mean([len(np.unique(row)) for row in drawn]) / among
    share = different_share(Zipf(exponent=exponent), ROWS, float(LOOKUPS), among)
    assert share == pytest.approx(expected, rel=0.02)
    differ = popularity(Zipf(exponent=exponent), ROWS).unique(LOOKUPS) / LOOKUPS
    curve = MissCurve(cache_fractions=(1.0,), miss_rates=(0.0,), unique_fraction=differ)
    assert different_share(curve, ROWS, float(LOOKUPS), among) == pytest.approx(share, rel=0.05)


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


HOT_LOOKUPS = 3_000


def _of_two_tables(ranks: int, per_host: int, exponent: float = 1.0, **changes: object) -> PlanRequest:
    tables = [
        Table(name=name, rows=rows, dim=64, ids_per_sample=HOT_LOOKUPS / 100, access=Zipf(exponent=exponent))
        for name, rows in (("small", 500), ("large", 50_000))
    ]
    topology = Topology(ranks=ranks, ranks_per_host=per_host, hbm_bytes=1 << 34, hbm_reserved_bytes=7)
    return PlanRequest(tables=tuple(tables), topology=topology, step=Step(samples_per_rank=100), **changes)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([(8, 8), (16, 8), (64, 8)]), st.floats(0, 1.6), st.sampled_from([0, 10_000, 1 << 20, 1 << 30]))
def test_hot_rows_are_those_that_lower_the_bytes_of_a_link(
    machines: tuple[int, int], exponent: float, most: int
) -> None:
    (ranks, per_host), width = machines, 2 * 64 * 4
    request = _of_two_tables(ranks, per_host, exponent)
    reserved, hot = with_hot_rows(request, most)
    assert reserved.topology.hbm_reserved_bytes == 7 + sum(each.hbm_bytes for each in hot) <= 7 + most
    share = np.arange(1, 50_001) ** -exponent
    wanted = 1 - (1 - share / share.sum()) ** HOT_LOOKUPS
    for each in hot:
        assert each.hbm_bytes == each.rows * width
        assert each.all_to_all_bytes < each.without_bytes
    large = next((each for each in hot if each.table == "large"), None)
    if large is None or most < 1 << 30:
        return
    hosts = ranks // per_host
    sent = (ranks - 1) / ranks * (width + 8)
    assert large.without_bytes == pytest.approx(wanted.sum() * sent, rel=0.02)
    assert large.all_to_all_bytes == pytest.approx(wanted[large.rows :].sum() * sent, rel=0.03, abs=20 * width)

    def link(rows: int) -> float:
        """Bytes through the link of a rank, or of a host, with so many of the most popular rows hot."""
        at_owner = wanted[rows:].sum() * (width + 8) * (ranks - 1 if hosts == 1 else ranks - per_host)
        return at_owner / (ranks if hosts == 1 else hosts) + rows * width * (ranks - 1) / ranks

    assert link(large.rows) <= min(link(rows) for rows in range(0, 50_000, 50)) * 1.01


def test_torchrec_has_none() -> None:
    with pytest.raises(InvalidInputError, match="runtime: has no hot rows"):
        with_hot_rows(_of_two_tables(8, 8, runtime=Runtime.TORCHREC), 1 << 20)
