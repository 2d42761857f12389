from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.placement import PlanRequest, SolveCancelledError, SolverOptions
from evenkeel.placement.building import build_problem
from evenkeel.placement.limits import Limits
from evenkeel.placement.placement_problem import PlacementProblem
from evenkeel.placement.solver import seconds, solve, usage, within_budget
from tests.evenkeel.placement.instances import brute_force_groups, random_tables, request


def _problem(count: int, seed: int, runtime: str, tightness: float, *, groups: int = 1) -> PlacementProblem:
    tables = tuple(
        replace(table, group=f"module_{index % groups}") for index, table in enumerate(random_tables(count, seed))
    )
    asked: PlanRequest = request(tables, hbm_gib=100, runtime=runtime)
    problem = build_problem(asked, np.array([0.1, 0.5]))
    low = sum(float(np.where(np.isfinite(g.time), g.hbm, np.inf).min(axis=1).sum()) for g in problem.groups)
    high = sum(float(np.where(np.isfinite(g.time), g.hbm, 0).max(axis=1).sum()) for g in problem.groups)
    host = sum(float(g.host.max(axis=1).sum()) for g in problem.groups)
    return problem.with_budget(low + (high - low) * tightness, host * (1 - 0.3 * tightness))


@given(st.integers(1, 4), st.integers(0, 5_000), st.sampled_from(["dynamicemb", "torchrec"]), st.floats(0, 1))
@settings(max_examples=35, deadline=None)
def test_fused_groups_are_solved_like_brute_force(count: int, seed: int, runtime: str, tightness: float) -> None:
    problem = _problem(count, seed, runtime, tightness)
    expected = brute_force_groups(problem)
    solution = solve(problem)
    assert solution.proved
    if not np.isfinite(expected):
        assert solution.modules is None
        return
    assert solution.modules is not None
    assert solution.cost == pytest.approx(expected)
    assert within_budget(problem, solution.modules)
    assert seconds(problem, solution.modules) == pytest.approx(solution.cost)
    assert solution.bound <= solution.cost * (1 + 1e-9)


@given(st.integers(0, 5_000), st.sampled_from(["dynamicemb", "torchrec"]), st.floats(0, 1))
@settings(max_examples=15, deadline=None)
def test_several_groups_are_solved_like_brute_force(seed: int, runtime: str, tightness: float) -> None:
    problem = _problem(4, seed, runtime, tightness, groups=2)
    expected = brute_force_groups(problem)
    assert solve(problem).cost == (pytest.approx(expected) if np.isfinite(expected) else np.inf)


@given(st.integers(1, 4), st.integers(0, 5_000), st.sampled_from(["dynamicemb", "torchrec"]), st.floats(0.002, 0.02))
@settings(max_examples=20, deadline=None)
def test_no_feasible_plan_is_missed_just_above_the_smallest_budget(
    count: int, seed: int, runtime: str, above: float
) -> None:
    problem = _problem(count, seed, runtime, 0.6)
    least = solve(problem.minimising(0))
    if least.modules is None:
        return
    assert least.cost == pytest.approx(brute_force_groups(problem.minimising(0)))
    host = float(problem.budget[1])
    for budget in (least.cost, least.cost * (1 + above)):
        assert solve(problem.with_budget(budget, host)).modules is not None
    assert solve(problem.with_budget(least.cost - 1.0, host)).modules is None


def test_a_group_shares_one_ratio_a_side() -> None:
    problem = build_problem(request(random_tables(30, 4), hbm_gib=3), np.linspace(0.05, 0.95, 19))
    solution = solve(problem)
    assert solution.modules is not None
    (group,) = problem.groups
    opened = [group.modules[m] for m in sorted(set(solution.modules[0].tolist()))]
    assert len({m.side for m in opened}) == len(opened)
    assert np.all(usage(problem, solution.modules) <= problem.budget)


def test_more_budget_is_never_slower_and_prices_are_its_slope() -> None:
    problem = build_problem(request(random_tables(12, 7), hbm_gib=2))
    costs = [solve(problem.with_budget(hbm, np.inf)).cost for hbm in np.linspace(300, 3000, 10)]
    finite = [cost for cost in costs if np.isfinite(cost)]
    assert finite == sorted(finite, reverse=True)
    assert solve(problem.with_budget(900, np.inf)).prices[0] > 0
    assert solve(problem.with_budget(1e9, np.inf)).prices[0] == 0


def test_no_tables_cost_nothing() -> None:
    assert solve(PlacementProblem((), np.array([0.0, 0.0]))).cost == 0


def test_a_search_can_be_cancelled() -> None:
    problem = build_problem(request(random_tables(30, 4), hbm_gib=3))
    with pytest.raises(SolveCancelledError):
        solve(problem, Limits(should_stop=lambda: True))


def test_a_time_limit_returns_the_best_found_with_its_gap() -> None:
    ticks = iter(range(10_000_000))
    problem = build_problem(request(random_tables(30, 4), hbm_gib=3, solver=SolverOptions(ratio_steps=20)))
    solution = solve(problem, Limits(time_limit_s=60, clock=lambda: float(next(ticks))))
    assert solution.modules is not None
    assert 0 <= solution.gap < 0.5
