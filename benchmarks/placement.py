"""How fast and how good the search is: time and gap for 26 to 1,000 tables, and for a knapsack of independent tables.

python -m benchmarks.placement --json benchmarks/results/placement.json
python -m benchmarks.placement --quick
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.harness.results import write
from evenkeel.placement import Mode, PlanRequest, Runtime, Sharding, SolverOptions, Step, Table, Topology, Zipf, plan
from evenkeel.placement.layouts import ROW_WISE
from evenkeel.placement.limits import Watch
from evenkeel.placement.problem import Group, Module, Problem
from evenkeel.placement.search import solve

COUNTS = (26, 100, 1000)
LIMIT_S = {26: 10.0, 100: 10.0, 1000: 30.0}


def knapsack(tables: int, options: int, seed: int) -> Problem:
    """Tables of log-normal sizes with half CACHING-like and half HYBRID-like options and both budgets tight."""
    draw = np.random.default_rng(seed)
    size = draw.lognormal(6, 2, tables)[:, None]
    held = np.linspace(0, 1, options // 2 + 1)[None, 1:]
    use, bend = size**0.6 * draw.uniform(0.5, 2, (tables, 1)), draw.uniform(0.5, 3, (tables, 1))
    caching, hybrid = use * (1 - held) ** bend + 0.1 * use, use * (1 - held) * 1.2 + 0.1 * use
    caching[:, -1] = hybrid[:, -1] = 0.05 * use[:, 0]
    hbm = np.ceil(size * held)
    cached_host, split_host = np.where(held < 1, np.ceil(size), 0), np.ceil(size * (1 - held))
    low, high = hbm.min(axis=1).sum(), hbm.max(axis=1).sum()
    limit = np.floor(low + (high - low) * (0.05, 0.3, 0.5)[seed % 3])
    modules = tuple(Module(ROW_WISE, Mode.CACHING, float(number)) for number in range(options))
    pairs = (caching, hybrid), (hbm, hbm), (cached_host, split_host)
    cost, taken, host = (np.concatenate(pair, axis=1) for pair in pairs)
    group = Group(tuple(range(tables)), modules, cost, taken, host, np.ones((3, options)))
    return Problem((group,), np.array([limit, np.floor(size.sum() - 0.7 * limit)]))


def random_tables(count: int, seed: int, sharding: tuple[Sharding, ...] = (Sharding.ROW_WISE,)) -> tuple[Table, ...]:
    """Tables of log-normal sizes and four widths, all pooled."""
    draw = np.random.default_rng(seed)
    return tuple(
        Table(
            name=f"table_{index}",
            rows=int(min(2e9, draw.lognormal(15, 1.8))) + 100,
            dim=int(draw.choice([32, 64, 128, 256])),
            ids_per_sample=float(draw.choice([1, 1, 5, 20])),
            access=Zipf(exponent=float(draw.uniform(0.7, 1.2))),
            pooled=True,
            sharding=sharding,
        )
        for index in range(count)
    )


def request(tables: tuple[Table, ...], ranks: int, runtime: Runtime, limit_s: float = 30.0) -> PlanRequest:
    """A job whose tables take three times its HBM, on 20 ratios."""
    total = sum(table.rows * table.dim * 12 for table in tables)
    index = sum(table.rows * 30 for table in tables)
    topology = Topology(ranks=ranks, hbm_bytes=int((total * 0.3 + index) / ranks) + (4 << 30))
    solver = SolverOptions(ratio_steps=20, time_limit_s=limit_s)
    step = Step(samples_per_rank=max(1, 8192 // ranks))
    return PlanRequest(tables=tables, topology=topology, runtime=runtime, step=step, solver=solver)


def cases(counts: tuple[int, ...]) -> dict[str, PlanRequest]:
    """Requests by name: fused row-wise tables of both runtimes, and tables that go to ranks whole or in columns."""
    spread = (Sharding.ROW_WISE, Sharding.TABLE_WISE, Sharding.COLUMN_WISE)
    found = {}
    for count in counts:
        for runtime in Runtime:
            asked = request(random_tables(count, count), 8, runtime, LIMIT_S[count])
            found[f"{count} {runtime.value}"] = asked
        asked = request(random_tables(count, count, spread), 8, Runtime.TORCHREC, LIMIT_S[count])
        found[f"{count} torchrec on ranks"] = asked
    return found


def measured(counts: tuple[int, ...]) -> dict[str, Any]:
    """Time and gap of every case, and of knapsacks of 20 options to a gap of 0.5 %."""
    plan(request(random_tables(3, 0), 2, Runtime.DYNAMICEMB))
    found: dict[str, Any] = {}
    for name, asked in cases(counts).items():
        begin, answer = time.process_time(), plan(asked)
        found[name] = {
            "cpu_seconds": time.process_time() - begin, "status": answer.status.value, "gap": answer.gap,
            "step_ms": None if answer.seconds is None else answer.seconds * 1e3,
        }  # fmt: skip
    for count in counts:
        problems, begin = [knapsack(count, 20, seed) for seed in range(3)], time.process_time()
        results = [solve(problem, Watch(), gap=1e-4 if count > 50 else 0.0) for problem in problems]
        mean, gap = (time.process_time() - begin) / len(problems), max(1 - each.bound / each.cost for each in results)
        found[f"knapsack {count} x 20"] = {"cpu_seconds": mean, "gap": gap}
    return found


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Up to 100 tables only.")] = False,
) -> None:
    """Measure, print and write."""
    found = measured(COUNTS[:2] if quick else COUNTS)
    out = RichTable("case", "CPU s", "gap", "ms a step", "status", title="Plans")
    for name, row in found.items():
        gap = "none" if row["gap"] is None else f"{row['gap']:.2%}"
        step = f"{row['step_ms']:.3f}" if row.get("step_ms") else ""
        out.add_row(name, f"{row['cpu_seconds']:.2f}", gap, step, row.get("status", ""))
    Console().print(out)
    write(json_path, {"cases": found})


if __name__ == "__main__":
    typer.run(main)
