"""Plans are compared in the same real memory: what asks planners again until their plans take it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.placement_gpu_fit import summarize
from benchmarks.placement_gpu_planners import Try, fit_to_budget


def _planner(takes: Callable[[int], int | None]) -> tuple[Callable[[int], Try], list[int]]:
    asked: list[int] = []

    def attempt(budget: int) -> Try:
        asked.append(budget)
        return Try(budget, takes(budget), f"plan {len(asked)}")

    return attempt, asked


@pytest.mark.parametrize("factor", [0.85, 0.99, 1.36])
def test_a_planner_that_misjudges_memory_gets_the_budget_that_makes_it_right(factor: float) -> None:
    attempt, asked = _planner(lambda budget: int(budget * factor) + 1000)
    best = fit_to_budget(attempt, 1_000_000)
    assert best is not None
    assert best.used is not None
    assert 980_000 <= best.used <= 1_000_000
    assert len(asked) <= 4


def test_the_first_plan_that_is_close_is_taken() -> None:
    attempt, asked = _planner(lambda budget: budget - 5)
    best = fit_to_budget(attempt, 1_000_000)
    assert best is not None
    assert (best.built, asked) == ("plan 1", [1_000_000])


def test_of_plans_in_large_strides_the_largest_that_fits_is_taken() -> None:
    attempt, _ = _planner(lambda budget: budget // 300_000 * 300_000)
    best = fit_to_budget(attempt, 1_000_000, tries=6)
    assert best is not None
    assert best.used == 900_000


def test_a_planner_that_never_stays_within_the_budget_has_no_plan() -> None:
    attempt, asked = _planner(lambda budget: 2_000_000)
    assert fit_to_budget(attempt, 1_000_000) is None
    assert asked == sorted(asked, reverse=True)
    assert all(budget >= 0 for budget in asked)


def test_a_planner_that_finds_nothing_is_asked_with_more() -> None:
    attempt, _ = _planner(lambda budget: None if budget < 1_100_000 else budget - 300_000)
    best = fit_to_budget(attempt, 1_000_000)
    assert best is not None
    assert best.used is not None
    assert 900_000 <= best.used <= 1_000_000


def test_steps_are_counted_by_error_and_pairs_by_order() -> None:
    rows = [
        {"measured_ms": 1.0, "predicted_ms": 1.1, "error": 0.1},
        {"measured_ms": 1.1, "predicted_ms": 1.0, "error": -0.09},
        {"measured_ms": 2.0, "predicted_ms": 1.05, "error": -0.475},
    ]
    found = summarize(rows)
    assert (found["within_20_percent"], found["worst"]) == (2, -0.475)
    assert (found["pairs_15_percent_apart"], found["pairs_in_order"]) == (2, 1)
