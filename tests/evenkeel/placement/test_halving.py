from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.placement.building import build_problem
from evenkeel.placement.combinations import enumerate_combinations
from evenkeel.placement.halving import Halving, Outcome, Surroundings
from evenkeel.placement.knapsack import price_scale, solve_knapsack
from evenkeel.placement.limits import Limits, Watch
from evenkeel.placement.options import ratio_grid
from evenkeel.placement.placement_problem import PlacementProblem
from evenkeel.placement.solver import seconds, solve, within_budget
from evenkeel.placement.stacking import folded, stack, stack_knapsacks
from tests.evenkeel.placement.instances import brute_force_groups, random_tables, request

IntArray = npt.NDArray[np.int64]


def _problem(
    sizes: tuple[int, ...], seed: int, runtime: str, hbm: float, host: float, ratios: int = 2
) -> PlacementProblem:
    """Groups of so many tables, one of them large, under a part of the HBM and times the least memory of hosts."""
    names = [f"m{group}" for group, size in enumerate(sizes) for _ in range(size)]
    tables = [replace(table, group=name) for table, name in zip(random_tables(len(names), seed), names, strict=True)]
    tables[seed % len(tables)] = replace(tables[seed % len(tables)], rows=50_000_000)
    problem = build_problem(
        request(tuple(tables), hbm_gib=100, runtime=runtime),
        np.array([0.1, 0.5]) if ratios == 2 else ratio_grid(len(names), ratios),
    )
    low = sum(float(np.where(np.isfinite(g.time), g.hbm, np.inf).min(axis=1).sum()) for g in problem.groups)
    high = sum(float(np.where(np.isfinite(g.time), g.hbm, 0).max(axis=1).sum()) for g in problem.groups)
    problem = problem.with_budget(low + (high - low) * hbm, np.inf)
    least = solve(problem.minimising(1))
    return problem.with_budget(float(problem.budget[0]), float(np.floor(least.cost * host * 256) / 256))


def _halved(problem: PlacementProblem, most_cuts: int | None = None) -> tuple[float, Outcome]:
    """The best that the search finds by itself, and what it proves."""
    bound = [group for group in problem.groups if group.bound]
    free = stack([folded(group) for group in problem.groups if not group.bound])
    combinations = [enumerate_combinations(group) for group in bound]
    found = [np.inf]

    def take(cost: float) -> None:
        found[0] = min(found[0], cost)

    def offer(modules: list[IntArray], rest: IntArray) -> None:
        own, alone = iter(modules), iter(rest.tolist())
        chosen = tuple(next(own) if group.bound else np.array([next(alone)]) for group in problem.groups)
        assert within_budget(problem, chosen)
        take(seconds(problem, chosen))

    def under(opened: tuple[int, ...]) -> Outcome:
        kept = [c.open(name) for c, name in zip(combinations, opened, strict=True)]
        parts = [stack([replace(g, time=g.time[:, k], hbm=g.hbm[:, k], host=g.host[:, k])])
                 for g, k in zip(bound, kept, strict=True)]  # fmt: skip
        fixed = sum(float(c.fixed.ravel()[name]) for c, name in zip(combinations, opened, strict=True))
        best = solve_knapsack(stack_knapsacks([*parts, free] if len(free.cost) else parts, problem.budget))
        take(best.cost + fixed)
        return Outcome(best.bound + fixed, best.proved)

    dearest = 1e-9 + sum(
        float(g.openings()[1].sum() + np.where(np.isfinite(g.time), g.time, 0).max(axis=1).sum())
        for g in problem.groups
    )
    around = Surroundings(
        combinations=combinations,
        free=free,
        budget=problem.budget,
        scale=price_scale(np.array([0.0, dearest]), problem.budget),
        solve=under,
        offer=offer,
        cutoff=lambda: min(found[0] * (1 - 1e-12), dearest),
        most_cuts=most_cuts,
        watch=Watch(Limits(time_limit_s=1e6)),
    )
    outcome = Halving(around).run(dearest, np.zeros(2))
    return found[0], outcome


SIZES = st.sampled_from([(2, 2), (3, 2), (2, 2, 1), (4,), (3, 1, 1)])


@given(
    SIZES,
    st.integers(0, 5_000),
    st.sampled_from(["dynamicemb", "torchrec"]),
    st.floats(0, 1),
    st.sampled_from([0.999, 1.0, 1.0005, 1.01, 1.2]),
)
@settings(max_examples=40, deadline=None)
def test_halving_alone_finds_and_proves_what_brute_force_finds(
    sizes: tuple[int, ...], seed: int, runtime: str, hbm: float, host: float
) -> None:
    problem = _problem(sizes, seed, runtime, hbm, host)
    expected = brute_force_groups(problem)
    found, outcome = _halved(problem)
    assert outcome.proved
    assert found == (pytest.approx(expected) if np.isfinite(expected) else np.inf)
    assert outcome.bound >= found * (1 - 1e-9)


def test_memory_just_above_the_least_leaves_no_gap() -> None:
    """The dual mixes ratios of the large table that no plan can mix: its bound alone is a quarter below the best."""
    problem = _problem((15, 15, 15, 15), 31, "dynamicemb", 0.5, 1.002, ratios=100)
    found = solve(problem, Limits(time_limit_s=300))
    assert found.modules is not None
    assert within_budget(problem, found.modules)
    assert found.proved
    assert found.gap <= 1.01e-4


@given(SIZES, st.integers(0, 5_000), st.integers(0, 4))
@settings(max_examples=10, deadline=None)
def test_a_search_that_ends_early_has_a_bound_that_holds(sizes: tuple[int, ...], seed: int, cuts: int) -> None:
    problem = _problem(sizes, seed, "dynamicemb", 0.5, 1.002)
    _, outcome = _halved(problem, cuts)
    assert outcome.bound <= brute_force_groups(problem) * (1 + 1e-9)
