from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.placement.knapsack import Knapsack, solve_knapsack
from evenkeel.placement.limits import SolveCancelledError, Watch
from evenkeel.placement.milp import solve_milp
from tests.evenkeel.placement.instances import brute_force_knapsack, random_knapsack, solve_by_highs


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 10_000), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_small_problems_are_solved_like_brute_force(items: int, options: int, seed: int, tightness: float) -> None:
    problem = random_knapsack(items, options, seed, tightness)
    result = solve_knapsack(problem)
    expected = brute_force_knapsack(problem)
    assert result.proved
    assert result.cost == pytest.approx(expected) if np.isfinite(expected) else result.choice is None
    assert np.isfinite(result.bound) == np.isfinite(expected)  # nothing is cheap where nothing is feasible
    if result.choice is not None:
        rows = np.arange(items)
        assert np.all(problem.use[:, rows, result.choice].sum(axis=1) <= problem.budget + 1e-6)
        assert problem.cost[rows, result.choice].sum() == pytest.approx(result.cost)
        assert result.bound <= result.cost * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_middling_problems_are_solved_like_plain_highs(seed: int) -> None:
    problem = random_knapsack(25, 8, seed, 0.1 + 0.13 * seed)
    assert solve_knapsack(problem).cost == pytest.approx(solve_by_highs(problem).objective, rel=1e-7)


@pytest.mark.parametrize("seed", range(3))
def test_the_gap_asked_for_is_proved(seed: int) -> None:
    problem = random_knapsack(120, 10, seed, 0.3)
    result = solve_knapsack(problem, gap=1e-4)
    assert result.proved
    assert 0 <= result.cost - result.bound <= 1.0001e-4 * result.cost
    assert result.bound <= solve_by_highs(problem, gap=1e-4).objective * (1 + 1e-9)


@given(st.integers(1, 4), st.integers(2, 4), st.integers(0, 10_000), st.floats(0.001, 0.02))
@settings(max_examples=30, deadline=None)
def test_no_feasible_choice_is_missed_just_above_the_minimum(items: int, options: int, seed: int, above: float) -> None:
    problem = random_knapsack(items, options, seed, 0.5)
    least = brute_force_knapsack(Knapsack(problem.use[0], problem.use, np.array([np.inf, problem.budget[1]])))
    if np.isfinite(least):
        for budget in (least, least * (1 + above)):
            tight = Knapsack(problem.cost, problem.use, np.array([budget, problem.budget[1]]))
            result = solve_knapsack(tight)
            assert result.cost == pytest.approx(brute_force_knapsack(tight))


def test_the_same_problem_gives_the_same_choice() -> None:
    problem = random_knapsack(40, 10, 3, 0.4)
    first, second = solve_knapsack(problem), solve_knapsack(problem)
    assert first.choice is not None
    assert second.choice is not None
    assert first.choice.tolist() == second.choice.tolist()


def test_an_item_without_options_makes_it_infeasible() -> None:
    problem = Knapsack(np.array([[np.inf, np.inf]]), np.zeros((2, 1, 2)), np.array([1.0, 1.0]))
    result = solve_knapsack(problem)
    assert result.choice is None
    assert result.proved


def test_a_cancelled_program_says_so() -> None:
    problem = random_knapsack(60, 30, 2, 0.35)
    size = problem.cost.size
    matrix = sp.csr_matrix(problem.use[0].reshape(1, -1))
    binary, ones = np.ones(size, dtype=bool), np.ones(size)
    low, high = np.array([0.0]), problem.budget[:1]
    with pytest.raises(SolveCancelledError):
        solve_milp(problem.cost.ravel(), matrix, low, high, binary, ones, watch=Watch(should_stop=lambda: True))
