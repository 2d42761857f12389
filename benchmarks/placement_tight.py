"""Fused groups under little more host memory than the least that does, beside plain HiGHS on the same program.

python -m benchmarks.placement_tight --json benchmarks/results/placement_tight.json
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import time
from pathlib import Path
from typing import Annotated, Any

import highspy
import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table as RichTable

from evenkeel.placement import PlanRequest, Runtime, Step, Table, Topology, Zipf
from evenkeel.placement.building import build_problem
from evenkeel.placement.joint import solve_joint
from evenkeel.placement.limits import DEFAULT_GAP, Limits, Watch
from evenkeel.placement.placement_problem import PlacementProblem
from evenkeel.placement.solver import seconds, solve, within_budget

RANKS = 8
LEAST_S = 10.0
_MORE = 1000.0
PARTS = (0.02, 0.1, 0.2, 0.5, 0.7, 0.9)


def draw(tables: int, groups: int, seed: int) -> PlacementProblem:
    """Tables of log-normal sizes, in groups of one size or of many, and a part of the HBM that all would take."""
    rng = np.random.default_rng([tables, groups, seed])
    sigma = float(rng.choice([1.5, 1.8, 2.5]))
    own = np.arange(tables) % groups
    if seed % 2:
        some = rng.choice(groups, tables - 2 * groups, p=rng.dirichlet(np.ones(groups)))
        own = rng.permutation(np.concatenate([np.repeat(np.arange(groups), 2), some]))
    drawn = tuple(
        Table(
            name=f"table_{index}",
            rows=int(min(2e9, rng.lognormal(15, sigma))) + 100,
            dim=int(rng.choice([32, 64, 128, 256])),
            ids_per_sample=float(rng.choice([1, 1, 5, 20])),
            access=Zipf(exponent=float(rng.uniform(0.7, 1.2))),
            group=f"group_{own[index]}",
        )
        for index in range(tables)
    )
    topology, step = Topology(ranks=RANKS, hbm_bytes=100 << 30), Step(samples_per_rank=8192 // RANKS)
    problem = build_problem(PlanRequest(tables=drawn, topology=topology, runtime=Runtime.DYNAMICEMB, step=step))
    low = sum(float(np.where(np.isfinite(group.time), group.hbm, np.inf).min(axis=1).sum()) for group in problem.groups)
    high = sum(float(np.where(np.isfinite(group.time), group.hbm, 0.0).max(axis=1).sum()) for group in problem.groups)
    return problem.with_budget(float(np.floor(low + (high - low) * PARTS[seed % len(PARTS)])), np.inf)


def ours(problem: PlacementProblem, limit_s: float) -> dict[str, Any]:
    """The planner's search."""
    begin = time.process_time()
    found = solve(problem, Limits(time_limit_s=limit_s, clock=time.process_time))
    took = time.process_time() - begin
    cost = None if found.modules is None else found.cost
    return {"cost": cost, "bound": found.bound, "gap": None if cost is None else found.gap, "seconds": took}


def plain_highs(problem: PlacementProblem, limit_s: float) -> dict[str, Any]:
    """One program over everything, given to HiGHS as it is."""
    begin = time.process_time()
    # HiGHS counts seconds of the wall, of which there are more on a busy machine: only the watch is to end it.
    watch = Watch(Limits(time_limit_s=_MORE * limit_s, clock=lambda: _MORE * time.process_time()))
    kept = [np.ones(len(group.modules), dtype=bool) for group in problem.groups]
    found = solve_joint(problem, kept, gap=DEFAULT_GAP, start=None, watch=watch)
    took = time.process_time() - begin
    fits = found.modules is not None and within_budget(problem, found.modules)
    cost = seconds(problem, found.modules) if found.modules is not None and fits else None
    gap = None if cost is None else max(0.0, (cost - found.bound) / cost)
    return {"cost": cost, "bound": max(0.0, found.bound), "gap": gap, "seconds": took}


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    sizes: Annotated[str, typer.Option(help="Tables / groups, separated by commas.")] = "60/4,160/8,400/16",
    above: Annotated[str, typer.Option(help="Host memory over the least that does.")] = "1.0005,1.002,1.01,1.05",
    seeds: Annotated[int, typer.Option(help="Problems of each size.")] = 6,
    first: Annotated[int, typer.Option(help="The first seed.")] = 0,
    limit_s: Annotated[float, typer.Option(help="CPU seconds for each search at most.")] = 30.0,
    highs: Annotated[bool, typer.Option(help="Ask plain HiGHS as well.")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="One small size and two seeds.")] = False,
) -> None:
    """Solve every problem under every budget with both, in turns."""
    console = Console()
    rows: list[dict[str, Any]] = []
    cases = list(
        itertools.product(("60/4" if quick else sizes).split(","), range(first, first + (2 if quick else seeds)))
    )
    with Progress(console=console, transient=True) as progress:
        for size, seed in progress.track(cases):
            tables, _, groups = size.partition("/")
            problem = draw(int(tables), int(groups), seed)
            least = solve(problem.minimising(1), Limits(gap=1e-6, time_limit_s=LEAST_S, clock=time.process_time))
            for part in above.split(","):
                asked = problem.with_budget(float(problem.budget[0]), least.cost * float(part))
                row: dict[str, Any] = {"size": size, "seed": seed, "above": float(part), "least_gap": least.gap}
                row["ours"] = ours(asked, limit_s)
                if highs and not quick:
                    row["highs"] = plain_highs(asked, limit_s)
                rows.append(row)
            if json_path:
                _write(json_path, limit_s, rows)
    console.print(_table(rows))


def _write(path: Path, limit_s: float, rows: list[dict[str, Any]]) -> None:
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    machine["highs"] = highspy.Highs().version()  # type: ignore[no-untyped-call]
    payload = {
        "command": f"python -m benchmarks.placement_tight --limit-s {limit_s:g}",
        "machine": machine,
        "rows": rows,
    }
    path.write_text(json.dumps(payload, indent=1) + "\n", encoding="utf-8")


def _table(rows: list[dict[str, Any]]) -> RichTable:
    out = RichTable(title="Worst and median gap, CPU seconds; HiGHS's plan and bound over ours")
    for heading in ("tables/groups", "over the least", "problems", "worst gap", "median", "CPU s", "worst",
                    "HiGHS: plans", "median gap", "cost / ours", "bound / ours", "CPU s"):  # fmt: skip
        out.add_column(heading, justify="right")
    for size, above in dict.fromkeys((row["size"], row["above"]) for row in rows):
        mine = [row for row in rows if (row["size"], row["above"]) == (size, above)]
        gaps = [1.0 if row["ours"]["gap"] is None else row["ours"]["gap"] for row in mine]
        took = [row["ours"]["seconds"] for row in mine]
        cells = [size, f"{above:g}", str(len(mine)), f"{max(gaps):.2%}", f"{np.median(gaps):.2%}"]
        cells += [f"{np.median(took):.1f}", f"{max(took):.1f}"]
        both = [(row["highs"], row["ours"]) for row in mine if "highs" in row]
        if both:
            planned = [(a, b) for a, b in both if a["cost"] is not None and b["cost"] is not None]
            cells.append(f"{len(planned)} of {len(both)}")
            cells.append(_median([a["gap"] for a, _ in planned], "{:.2%}"))
            cells.append(_median([a["cost"] / b["cost"] for a, b in planned], "{:.3f}"))
            cells.append(_median([a["bound"] / b["bound"] for a, b in both], "{:.3f}"))
            cells.append(_median([a["seconds"] for a, _ in both], "{:.1f}"))
        out.add_row(*cells)
    return out


def _median(values: list[float], form: str) -> str:
    return form.format(float(np.median(values))) if values else ""


if __name__ == "__main__":
    typer.run(main)
