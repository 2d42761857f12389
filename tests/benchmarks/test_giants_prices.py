"""What splitting takes is that of the steps measured, and by it the planner chose the faster way in each of them."""

from __future__ import annotations

import json

from benchmarks.giants_gpu_bench import EXCHANGE_RATE
from benchmarks.giants_prices import MEASURED, decisions, fit
from evenkeel.partitioning.splits import STEP_SECONDS


def test_measured_cells_are_split_where_that_was_faster() -> None:
    measured = json.loads(MEASURED.read_text())
    rate, seconds = fit(measured["cells"])
    assert abs(rate / EXCHANGE_RATE - 1) < 0.1
    assert abs(seconds / STEP_SECONDS - 1) < 0.1
    found = decisions(measured, EXCHANGE_RATE, STEP_SECONDS)
    both = {name: row for name, row in found.items() if "split_ms" in row}
    assert {row["splits"] for row in both.values()} == {True, False}
    for name, row in both.items():
        assert row["splits"] == (row["split_ms"] < row["whole_ms"]), name
