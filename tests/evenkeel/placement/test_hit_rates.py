from __future__ import annotations

import numpy as np
import pytest

from benchmarks.references.key_traces import simulated
from evenkeel.placement import Eviction, Histogram, MissCurve, Zipf
from evenkeel.placement.access import different_share, fullest_rank, popularity, step_keys

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


def test_a_histogram_of_a_zipf_law_says_what_the_law_says() -> None:
    weight = np.arange(1, ROWS + 1) ** -1.1
    histogram = Histogram(keys=tuple([1.0] * ROWS), lookups=tuple((1e6 * weight / weight.sum()).tolist()))
    exact, binned = popularity(histogram, ROWS), popularity(Zipf(exponent=1.1), ROWS)
    assert binned.unique(LOOKUPS) == pytest.approx(exact.unique(LOOKUPS), rel=2e-3)


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


@pytest.mark.parametrize(("ranks", "over_mean"), [(1, 1.0), (8, 1.5), (64, 6.3), (128, 11.7)])
def test_the_fullest_rank_is_that_of_the_most_popular_keys(ranks: int, over_mean: float) -> None:
    """Figures counted with a random hash over ten million keys."""
    assert fullest_rank(Zipf(exponent=1.05), 10_000_000, 1e6, ranks) == pytest.approx(over_mean, rel=0.07)


@pytest.mark.parametrize(
    "access", [Zipf(exponent=0.0), Zipf(exponent=1.2), Histogram(keys=(3.0, 500.0), lookups=(9.0, 9.0))]
)
def test_the_fullest_of_more_ranks_is_fuller_and_never_below_the_mean(access: Zipf | Histogram) -> None:
    over_mean = [fullest_rank(access, 1000, 1e4, ranks) for ranks in (1, 2, 8, 64, 65_536)]
    assert over_mean[0] == 1.0
    assert over_mean == sorted(over_mean)
