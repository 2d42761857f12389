"""How far what key statistics saw is from what caches miss later, and what they cost.

python -m benchmarks.key_statistics --json benchmarks/results/key_statistics.json
python -m benchmarks.key_statistics --trace keys.npy --trace clicks.csv --column 1

Statistics are taken of the first half of a trace, whole and by a sample; LRU and LFU caches of nine sizes are simulated
over the second. The curve's own error and drift stand beside.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.harness.results import write
from benchmarks.key_files import read_keys
from benchmarks.key_traces import TRACES, simulated
from evenkeel.key_statistics import KeySampler, KeyTrace, dumps, miss_curve
from evenkeel.placement import Eviction

SHARES = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
_MOST_STEPS = 2_000


def sampled(steps: list[Any], most: int) -> KeyTrace:
    """What a sampler keeps of a trace."""
    sampler = KeySampler(["table"], max_references=most)
    for keys in steps:
        sampler.observe([(keys.astype(np.int64), np.array([[0, 0, len(keys)]]))], len(keys))
    return sampler.traces()["table"]


def judge(name: str, steps: list[Any]) -> list[dict[str, Any]]:
    """Both policies on one trace: seen on the first half, held against caches simulated over the second."""
    half = len(steps) // 2
    keys = len(np.unique(np.concatenate(steps)))
    sizes = np.array(SHARES) * keys
    begin = time.process_time()
    whole = sampled(steps[:half], 2_000_000)
    seconds = time.process_time() - begin
    rows = []
    for eviction in Eviction:
        actual = simulated(steps, sizes, half, eviction)
        row: dict[str, Any] = {"trace": name, "policy": eviction.value, "steps": len(steps), "keys": keys}
        for kind, trace in (("whole", whole), ("sample", sampled(steps[:half], 100_000))):
            curve = miss_curve(trace, keys, eviction=eviction)
            rates = np.interp(np.array(SHARES), curve.access.cache_fractions, curve.access.miss_rates)
            row[kind] = {"off": float(np.abs(rates - actual).max()), "error": curve.error, "drift": curve.drift}
        rows.append(row | {"cpu_s_to_observe": seconds, "file_bytes": len(dumps({"table": whole}))})
    return rows


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    trace: Annotated[list[Path] | None, typer.Option(help="Key traces, as `benchmarks.key_files` reads them.")] = None,
    column: Annotated[int, typer.Option(help="Column of text files.")] = 0,
    lookups: Annotated[int, typer.Option(help="Lookups of a step.")] = 2_048,
    steps: Annotated[int, typer.Option(help="Steps of made traces.")] = 200,
) -> None:
    """Judge made traces, or those of files."""
    every: dict[str, list[Any]] = {}
    for path in trace or ():
        keys = read_keys(path, column)
        count = max(2, min(_MOST_STEPS, len(keys) // lookups))
        every[path.name.partition(".")[0]] = np.array_split(keys, count)
    if not every:
        every = {name: list(make(np.random.default_rng(1), steps, lookups)) for name, make in TRACES.items()}
    rows = [row for name, parts in every.items() for row in judge(name, parts)]
    table = Table(title="worst difference from simulated caches, and what the curve says of itself")
    for heading in ("trace", "policy", "off", "off by a sample", "error", "drift"):
        table.add_column(heading, justify="left" if heading in ("trace", "policy") else "right")
    for row in rows:
        figures = (row["whole"]["off"], row["sample"]["off"], row["whole"]["error"], row["whole"]["drift"])
        table.add_row(row["trace"], row["policy"], *(f"{figure:.3f}" for figure in figures))
    Console().print(table)
    write(json_path, {"rows": rows})


if __name__ == "__main__":
    typer.run(main)
