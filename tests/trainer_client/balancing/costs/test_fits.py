"""Fits of times: exact where times are, and unmoved by outliers, slow ranks and terms that say the same."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_client.balancing.costs.fitting import Fit, FitOptions, fit_in_force, fit_ranks, fit_times


def _observations(seed: int, count: int = 200) -> np.ndarray:
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.zipf(1.2, (count, 32)), 4096).astype(float)
    return np.column_stack([np.full(count, 32.0), lengths.sum(1), (lengths * (lengths + 1) / 2).sum(1)])


@given(st.floats(1e-5, 1e-1), st.floats(1e-8, 1e-4), st.floats(0, 50), st.integers(0, 100), st.booleans())
def test_recovers_exact_times(per_token: float, per_pair: float, fixed: float, seed: int, twice: bool) -> None:
    terms = _observations(seed)
    times = terms @ [0.0, per_token, per_pair] + fixed
    if twice:  # a term that says the same as another one
        terms = np.column_stack([terms, 2 * terms[:, 1]])
    fit = fit_times(terms, times)
    assert fit is not None
    assert np.allclose(terms @ fit.coefficients + fit.fixed, times, rtol=1e-3)
    assert fit.explained > 0.999
    assert np.all(fit.coefficients >= 0)
    assert fit.coefficients[0] == 0.0  # the same in every observation: part of the fixed time


@pytest.mark.parametrize("factor", [3.0, 1e6])
@pytest.mark.parametrize("every", [20, 5])
def test_outliers_do_not_count(every: int, factor: float) -> None:
    terms = _observations(1)
    clean = terms @ [0.0, 1e-3, 1e-6] + 3.0
    times = clean * (1 + 0.01 * np.random.default_rng(0).standard_normal(len(clean)))
    times[::every] *= factor
    fit = fit_times(terms, times)
    assert fit is not None
    assert np.allclose(terms @ fit.coefficients + fit.fixed, clean, rtol=0.05)
    good = 200 - 200 // every
    assert good - 10 <= fit.observations <= good
    assert fit.explained > 0.95


@pytest.mark.parametrize("speeds", [(1.0, 0.5), (1.0, 1.0, 0.6, 1.0), (0.5, 1.0, 1.0, 0.7, 1.0, 1.0, 1.0, 1.0)])
def test_ranks_that_compute_slowly_do_not_count_for_the_cost(speeds: tuple[float, ...]) -> None:
    rng, clock, tables = np.random.default_rng(3), np.array([1e-3, 3e-6]), []
    for speed in speeds:
        tokens = rng.integers(10_000, 30_000, 100).astype(np.float64)
        terms = np.column_stack([tokens, tokens * rng.uniform(200, 2000, 100)])
        tables.append(np.column_stack([terms, (terms @ clock + 5) / speed * rng.lognormal(0, 0.01, 100)]))
    fit = fit_ranks(tables)
    assert fit is not None
    assert np.allclose(fit.coefficients / fit.coefficients[0], clock / clock[0], rtol=0.05)
    assert fit.explained > 0.98


def test_a_fit_that_has_made_times_alike_stays_until_they_scatter() -> None:
    def fit(explained: float, error: float) -> Fit:
        return Fit(coefficients=np.array([1.0]), fixed=1.0, error=error, explained=explained, observations=100)

    options, good, newer = FitOptions(min_explained=0.8), fit(0.95, 0.04), fit(0.9, 0.2)
    assert fit_in_force(fit(0.5, 0.01), None, options) is None
    assert fit_in_force(good, None, options) is good
    assert fit_in_force(fit(0.1, 0.07), good, options) is good  # balanced: there is nothing left to explain
    assert fit_in_force(fit(0.1, 0.2), good, options) is None
    assert fit_in_force(newer, good, options) is newer


def test_bounds_hold_and_too_little_is_no_fit() -> None:
    terms = _observations(2)
    fit = fit_times(terms, terms @ [0.0, 1e-3, -1e-7] + 50.0, upper=np.array([np.inf, 5e-4, np.inf]))
    assert fit is not None
    assert np.all(fit.coefficients >= 0)
    assert fit.coefficients[1] <= 5e-4 * (1 + 1e-9)
    for few in (terms[:5], np.ones((50, 3)), np.zeros((0, 3))):
        assert fit_times(few, np.ones(len(few))) is None
    assert fit_times(terms, np.full(200, np.nan)) is None
