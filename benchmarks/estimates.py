"""What plans take beside what the balancer expects them to take before it begins.

    python -m benchmarks.estimates --json benchmarks/results/estimates.json

Rounds of all sizes, windows and strategies, drawn from several distributions of cost. Times are of the processor, in
one thread, as long as they would be on the machine that estimates were fitted on. `--fit` prints the coefficients of
`services.balancer.workers.estimates` that fit them best, each round weighed by its own time.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.optimize import nnls
from services.balancer.effects import PlanInput
from services.balancer.workers.arena import Arena, read_round, write_round
from services.balancer.workers.estimates import Size, cheap_seconds, full_seconds
from services.balancer.workers.worker import plan_or_failure
from services.balancer.workers.zygote import REFERENCE_SECONDS, reference_seconds

from benchmarks.harness.plans import make_plan, said
from evenkeel.partitioning import warm_up
from evenkeel.partitioning.rounds import RoundOptions
from evenkeel.partitioning.samples import RankSamples
from services.balancer.workers import estimates

# Ranks, samples a rank in all batches, batches of the window.
SIZES = (
    (2, 8, 1), (8, 32, 1), (8, 128, 1), (8, 1024, 1), (64, 16, 1), (64, 128, 1), (64, 512, 1), (256, 128, 1),
    (1024, 4, 1), (1024, 128, 1), (8, 128, 4), (8, 256, 16), (64, 128, 4), (64, 128, 16), (64, 128, 64),
    (256, 64, 4), (256, 128, 16),
)  # fmt: skip
DRAWS: dict[str, Callable[[np.random.Generator, int], NDArray[Any]]] = {
    "log-normal": lambda rng, n: np.clip(rng.lognormal(4.8, 1.0, n), 1, 8192).astype(np.int64),
    "zipf": lambda rng, n: np.clip(rng.zipf(1.5, n), 1, 1 << 20).astype(np.int64),
    "uniform": lambda rng, n: rng.integers(1, 1000, n),
    "fractions": lambda rng, n: rng.random(n) ** 8 * 1e6,
    "ones": lambda _rng, n: np.ones(n, np.int64),
}
STRATEGIES = ("minimal_move", "karmarkar_karp", "lpt")


def draw(ranks: int, samples: int, window: int, kind: str, strategy: str, fields: int, seed: int) -> PlanInput:
    """A round."""
    rng = np.random.default_rng(seed)
    batches = tuple(len(part) for part in np.array_split(np.arange(samples), window)) if window > 1 else ()
    lengths = np.ones((samples, fields), np.uint32)
    own = [RankSamples(costs=DRAWS[kind](rng, samples), lengths=lengths, batch_sizes=batches) for _ in range(ranks)]
    nodes = tuple(f"node{rank // 8}" for rank in range(ranks))
    return PlanInput(
        parts=(said(own, window=window).samples,), options=RoundOptions(strategy=strategy), nodes=nodes, window=window
    )


def seconds_of(work: Callable[[], object], least: int = 2) -> float:
    """Processor time; the least of some repeats where it is short."""
    times: list[float] = []
    while len(times) < least or (sum(times) < 0.02 and len(times) < 10):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
        if times[-1] > 0.2:
            break
    return min(times)


def spread(ratios: list[float]) -> dict[str, float]:
    """How far estimates are from times."""
    return {f"p{q}": float(np.percentile(ratios, q)) for q in (5, 25, 50, 75, 95)}


def fit(rows: list[dict[str, Any]], features: Callable[[Size], list[float]], figure: str) -> list[float]:
    """Coefficients of least squares of the relative error, none negative."""
    matrix = np.array([np.array(features(Size(**row["size"]))) / row[figure] for row in rows])
    return [float(each) for each in nnls(matrix, np.ones(len(rows)))[0]]


def main(
    fields: Annotated[int, typer.Option(help="jagged fields")] = 4,
    coefficients: Annotated[bool, typer.Option("--fit", help="print the coefficients that fit best")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="result file")] = None,
) -> None:
    """Measures plans, and what is expected of them."""
    warm_up()
    arena = Arena.create("estimates")
    rows: list[dict[str, Any]] = []
    cases = [(*size, kind, strategy) for size in SIZES for kind in DRAWS for strategy in STRATEGIES]
    speed = REFERENCE_SECONDS / reference_seconds()
    for ranks, samples, window, kind, strategy in track(cases, transient=True):
        inputs = draw(ranks, samples, window, kind, strategy, fields, seed=1)
        size = Size.of(inputs)
        read, options, _ = read_round(arena, write_round(arena, inputs))
        cheap = partial(plan_or_failure, read, options.cheapest())
        full = seconds_of(lambda inputs=inputs: make_plan(inputs)) * speed  # type: ignore[misc]
        least = seconds_of(cheap) * speed
        rows.append({
            "size": {name: getattr(size, name) for name in Size._fields}, "costs": kind,
            "seconds": full, "expected": full_seconds(size),
            "cheapest": least, "expected_cheapest": cheap_seconds(size),
        })  # fmt: skip
    figures = {
        "expected over actual": spread([row["expected"] / row["seconds"] for row in rows]),
        "the same, cheapest search": spread([row["expected_cheapest"] / row["cheapest"] for row in rows]),
    }
    console, table = Console(), Table(title=f"{len(rows)} rounds")
    for name in ("", "p5", "p25", "p50", "p75", "p95"):
        table.add_column(name, justify="right")
    for name, values in figures.items():
        table.add_row(name, *(f"{value:.2f}" for value in values.values()))
    console.print(table)
    if coefficients:
        console.print("cheapest:", fit(rows, estimates.cheap_features, "cheapest"))
        for strategy in STRATEGIES:
            of_strategy = [row for row in rows if row["size"]["strategy"] == strategy]
            console.print(strategy, fit(of_strategy, estimates.full_features, "seconds"))
        console.print("reference seconds", reference_seconds())
    if json_path is not None:
        machine = {"cpus": os.cpu_count(), "speed": speed, "python": platform.python_version()}
        command = "python -m benchmarks.estimates " + " ".join(sys.argv[1:])
        result = {"command": command, "machine": machine, "spread": figures, "rounds": rows}
        json_path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
