"""What splitting takes by the steps measured on two H200, and whether the planner then chooses the faster way.

    python -m benchmarks.giants_prices --json benchmarks/results/giants_prices.json

Of each cell of `benchmarks/results/giants_2xh200.json` in which a sample was split, the step is that of an even
division and more: so much a gigabyte that each rank sends or receives, and so much for each split step. Both by least
squares of relative errors. Then each cell is planned again at these prices, with the costs calibrated in that run, and
the way that is chosen is told beside the measured milliseconds of both ways.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.giants_gpu_data import TimedCost
from evenkeel.partitioning import partition
from evenkeel.partitioning.splits import Divisible, SplitOptions
from evenkeel.partitioning.splits.search import split_partition

COMMAND = "python -m benchmarks.giants_prices"
MEASURED = Path(__file__).parent / "results" / "giants_2xh200.json"
POSITION = 2 * 1024 * 2 * 8 * 2  # bytes: keys and values, bf16, layers, forward and backward


def fit(cells: dict[str, Any]) -> tuple[float, float]:
    """Bytes per second of the exchange, and seconds of a split step beside it."""
    split = [cell for cell in cells.values() if cell["split"]["split_samples"] > 0]
    even = np.array([cell["even"]["median_ms"] for cell in split])
    more = np.array([cell["split"]["median_ms"] for cell in split]) - even
    gigabytes = np.array([cell["split"]["exchanged_bytes"] for cell in split]) / 1e9
    table = np.stack([gigabytes, np.ones(len(split))], axis=1)
    (per_gigabyte, fixed), *_ = np.linalg.lstsq(table / even[:, None], more / even, rcond=None)
    return 1e12 / float(per_gigabyte), 1e-3 * float(fixed)


def splits(cell: dict[str, Any], cost: TimedCost, prices: SplitOptions) -> bool:
    """Whether the planner splits a sample of a cell."""
    tokens = np.array(cell["tokens"])
    ranks, samples = tokens.shape
    spans = cost.of(tokens.reshape(-1))
    homes = np.repeat(np.arange(ranks, dtype=np.int32), samples)
    everyone = Divisible(
        samples=np.arange(tokens.size), first_items=np.full(tokens.size, float(cost.context)), spans=spans
    )
    whole = partition(spans.whole, homes, ranks, counts="free")
    return split_partition(whole, spans.whole, homes, ranks, everyone, prices, {"counts": "free"}) is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args()
    measured = json.loads(MEASURED.read_text())
    rate, fixed = fit(measured["cells"])
    found: dict[str, Any] = {"command": COMMAND, "bytes_per_second": rate, "step_seconds": fixed, "cells": {}}
    for name, row in decisions(measured, rate, fixed).items():
        found["cells"][name] = row
        print(f"{name}: {row}")
    print(f"{rate / 1e9:.0f} GB/s, {1e3 * fixed:.1f} ms a step")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def decisions(measured: dict[str, Any], rate: float, fixed: float) -> dict[str, dict[str, Any]]:
    """Of each cell, whether it is split at these prices, and milliseconds of both ways where both were measured."""
    timed = measured["calibration"]
    cost = TimedCost(per_position=timed["ms_of_a_position"], per_pair=timed["ms_of_a_pair"])
    prices = SplitOptions.at_rates(
        position_bytes=POSITION, within=rate, between=rate, cost_per_second=1e3, step_seconds=fixed, above=0.02
    )
    found = {}
    for name, cell in measured["cells"].items():
        row = {"splits": splits(cell, cost, prices), "whole_ms": cell["whole"]["median_ms"]}
        if cell["split"]["split_samples"] > 0:
            row["split_ms"] = cell["split"]["median_ms"]
        found[name] = row
    return found


if __name__ == "__main__":
    main()
