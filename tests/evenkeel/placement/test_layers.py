from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.placement.knapsack import Knapsack, solve_knapsack
from evenkeel.placement.layers import Layers, prepare_layers, search_layers, undominated
from evenkeel.placement.limits import Limits, SolveCancelledError, Watch
from tests.evenkeel.placement.instances import brute_force_knapsack, random_knapsack


def _layers(problem: Knapsack) -> Layers:
    rates = np.geomspace(1e-3, 10, 6) * problem.cost.max() / problem.budget.max()
    prices = np.array([(a, b) for a in (0.0, *rates) for b in (0.0, *rates)])
    return prepare_layers(problem.cost, problem.use, problem.budget, prices, np.isfinite(problem.cost))


@given(st.integers(1, 1200), st.integers(1, 60), st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_what_stays_is_what_no_other_beats(num: int, values: int, seed: int) -> None:
    spent, first, second = np.random.default_rng(seed).integers(0, values, (3, num)).astype(np.float64)
    kept = undominated(spent, np.stack([first, second]))
    assert (np.diff(kept) > 0).all()
    states = np.column_stack([spent, -first, -second])
    # Each state is matched or beaten by one that stays, and no two that stay match or beat each other.
    for state in states:
        assert (states[kept] <= state).all(axis=1).any()
    for position in range(0, len(kept), max(1, len(kept) // 20)):
        assert (states[kept] <= states[kept[position]]).all(axis=1).sum() == 1


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 10_000), st.floats(0, 1), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_a_search_of_any_width_has_an_honest_bound(
    items: int, options: int, seed: int, tightness: float, width: int
) -> None:
    problem = random_knapsack(items, options, seed, tightness)
    best = brute_force_knapsack(problem)
    cutoff = float(problem.cost.sum()) + 1
    result = search_layers(_layers(problem), cutoff, most_states=width)
    assert result.bound <= min(best, cutoff) * (1 + 1e-9)
    if result.complete:
        assert result.cost == pytest.approx(min(best, cutoff))
    if result.choice is not None:
        rows = np.arange(items)
        assert problem.cost[rows, result.choice].sum() == pytest.approx(result.cost)
        assert np.all(problem.use[:, rows, result.choice].sum(axis=1) <= problem.budget + 1e-6)


def test_a_search_that_is_over_finds_and_proves_nothing() -> None:
    result = search_layers(_layers(random_knapsack(20, 8, 1, 0.4)), 1e9, most_states=10, is_over=lambda: True)
    assert (result.choice, result.complete, result.bound) == (None, False, -np.inf)


def test_a_search_is_cancelled_between_layers() -> None:
    problem = random_knapsack(80, 30, 2, 0.35)
    whole = count()
    solve_knapsack(problem, watch=Watch(Limits(should_stop=lambda: next(whole) < 0)))
    asked = next(whole)
    assert asked > 40
    for last in (3, asked // 2):
        calls = count()
        with pytest.raises(SolveCancelledError):
            solve_knapsack(problem, watch=Watch(Limits(should_stop=lambda: next(calls) >= last)))  # noqa: B023
        assert next(calls) == last + 1
