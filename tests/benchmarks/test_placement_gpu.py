"""Plans are compared in the same real memory: what asks planners again until their plans take it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.key_files import numbered
from benchmarks.placement_gpu import QUICK, Try, fit_to_budget, make_job


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


def test_all_planners_are_compared_end_to_end(tmp_path: Path) -> None:
    keys = np.random.default_rng(0).zipf(1.3, 20_000) % 3_000
    np.save(tmp_path / "keys.npy", keys)
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks.placement_gpu", "--device", "cpu", "--quick", "--json", str(out)]
    ended = subprocess.run(
        [*command, "--keys", str(tmp_path / "keys.npy")], capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    found = json.loads(out.read_text())
    assert [cell["keys"] for cell in found["cells"]] == ["traces", "power laws"]
    for cell in found["cells"]:
        assert set(cell["planners"]) == {"by the model", "with the clock", "all cached alike", "TorchRec"}
        for figures in cell["planners"].values():
            assert set(figures["wall_ms"]) == {"0", "2"}
            assert figures["host_ms"] > 0
    assert found["summary"]


def test_tables_look_up_traces_in_their_order() -> None:
    draw = np.random.default_rng(3)
    traces = [numbered(draw.integers(0, 50, 4_000)), numbered(draw.integers(0, 9, 600))]
    job = make_job(5, QUICK, traces, "h200")
    assert [job.request.tables[index].rows for index in (0, 1)] == [50, 9]
    for index, table in enumerate(job.request.tables):
        looked_up = np.concatenate([batch[table.name][0].numpy() for batch in job.batches])
        trace = traces[index % 2]
        begin = len(trace) * (index // 2) // (3 if index % 2 == 0 else 2)
        expected = trace[(begin + np.arange(len(looked_up))) % len(trace)]
        np.testing.assert_array_equal(numbered(looked_up), numbered(expected))
