"""How fast and how good the placement solver is, beside brute force and plain HiGHS.

python -m benchmarks.placement --json benchmarks/results/placement.json
"""

from __future__ import annotations

import itertools
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import highspy
import numpy as np
import scipy.sparse as sp
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table as RichTable

from evenkeel.placement import PlanRequest, Runtime, Step, Table, Topology, Zipf, plan
from evenkeel.placement.building import build_problem
from evenkeel.placement.knapsack import Knapsack, solve_knapsack
from evenkeel.placement.limits import Limits, Watch
from evenkeel.placement.milp import solve_milp
from evenkeel.placement.solver import solve


@dataclass(frozen=True, slots=True)
class Timed:
    """A result and the seconds it took."""

    cost: float
    seconds: float


def knapsack(tables: int, options: int, seed: int) -> Knapsack:
    """Tables of log-normal sizes with half CACHING-like and half HYBRID-like options and both budgets tight."""
    draw = np.random.default_rng(seed)
    size = draw.lognormal(6, 2, tables)[:, None]
    held = np.linspace(0, 1, options // 2 + 1)[None, 1:]
    use, bend = size**0.6 * draw.uniform(0.5, 2, (tables, 1)), draw.uniform(0.5, 3, (tables, 1))
    caching, hybrid = use * (1 - held) ** bend + 0.1 * use, use * (1 - held) * 1.2 + 0.1 * use
    caching[:, -1] = hybrid[:, -1] = 0.05 * use[:, 0]
    hbm = np.ceil(size * held)
    cached_host, split_host = np.where(held < 1, np.ceil(size), 0), np.ceil(size * (1 - held))
    cost = np.concatenate([caching, hybrid], axis=1)
    uses = np.stack([np.concatenate([hbm, hbm], axis=1), np.concatenate([cached_host, split_host], axis=1)])
    low, high = hbm.min(axis=1).sum(), hbm.max(axis=1).sum()
    limit = np.floor(low + (high - low) * (0.05, 0.3, 0.5)[seed % 3])
    return Knapsack(cost, uses, np.array([limit, np.floor(size.sum() - 0.7 * limit)]))


def plain_highs(problem: Knapsack, gap: float, time_limit_s: float) -> Timed:
    """The same problem given to HiGHS as it is."""
    begin = time.perf_counter()
    items, options = problem.cost.shape
    rows = [sp.kron(sp.eye(items), np.ones((1, options)))]
    rows += [sp.csr_matrix(problem.use[b].reshape(1, -1)) for b in range(2)]
    scale, ones = 1 / problem.cost.max(), np.ones(items)
    result = solve_milp(
        problem.cost.ravel() * scale,
        sp.vstack(rows).tocsr(),
        np.concatenate([ones, [-np.inf, -np.inf]]),
        np.concatenate([ones, problem.budget]),
        np.ones(items * options, dtype=bool),
        np.ones(items * options),
        gap=gap,
        watch=Watch(Limits(time_limit_s=time_limit_s)),
    )
    return Timed(result.objective / scale, time.perf_counter() - begin)


def random_tables(count: int, seed: int) -> tuple[Table, ...]:
    """Tables of log-normal sizes."""
    draw = np.random.default_rng(seed)
    return tuple(
        Table(
            name=f"table_{index}",
            rows=int(min(2e9, draw.lognormal(15, 1.8))) + 100,
            dim=int(draw.choice([32, 64, 128, 256])),
            ids_per_sample=float(draw.choice([1, 1, 5, 20])),
            access=Zipf(exponent=float(draw.uniform(0.7, 1.2))),
        )
        for index in range(count)
    )


def request(tables: tuple[Table, ...], ranks: int, runtime: Runtime) -> PlanRequest:
    """A job whose tables take three times its HBM, with the HBM of a rank shrinking with the ranks."""
    total = sum(table.rows * table.dim * 12 for table in tables)
    index = sum(table.rows * 30 for table in tables)
    topology = Topology(ranks=ranks, hbm_bytes=int((total * 0.3 + index) / ranks) + (3 << 30))
    return PlanRequest(tables=tables, topology=topology, runtime=runtime, step=Step(samples_per_rank=8192 // ranks))


def solver_rows(console: Console, cases: list[tuple[int, int]], seeds: int, longest: float) -> list[dict[str, Any]]:
    """Solver against HiGHS on independent tables."""
    out = RichTable(title="Tables free of each other: seconds, median and worst of the instances")
    for heading in ("tables x options", "ours", "worst", "plain HiGHS", "ratio", "worst gap", "ours/HiGHS cost"):
        out.add_column(heading, justify="right")
    records = []
    with Progress(console=console, transient=True) as progress:
        for tables, options in progress.track(cases):
            exact = tables <= 50
            gap = 0.0 if exact else 1e-4
            ours, theirs, gaps, costs = [], [], [], []
            for seed in range(seeds):
                problem = knapsack(tables, options, seed)
                begin = time.perf_counter()
                result = solve_knapsack(problem, gap=gap)
                ours.append(time.perf_counter() - begin)
                gaps.append((result.cost - result.bound) / result.cost)
                peer = plain_highs(problem, gap, longest)
                theirs.append(peer.seconds)
                costs.append(result.cost / peer.cost)
            median, peer_median = float(np.median(ours)), float(np.median(theirs))
            out.add_row(
                f"{tables} x {options}", f"{median:.3f}", f"{max(ours):.3f}", f"{peer_median:.3f}",
                f"{peer_median / median:.1f}x", f"{max(gaps):.1e}", f"{max(costs):.6f}",
            )  # fmt: skip
            records.append(
                {"tables": tables, "options": options, "seconds": ours, "highs_seconds": theirs, "gaps": gaps,
                 "cost_over_highs": costs, "highs_time_limit_s": longest}
            )  # fmt: skip
    console.print(out)
    return records


def plan_rows(console: Console, counts: list[int], ranks: list[int]) -> list[dict[str, Any]]:
    """The whole way from a request to a plan, for fused groups and any number of ranks."""
    out = RichTable(title="From request to plan, fused groups: seconds")
    out.add_column("tables, runtime", justify="right")
    for number in ranks:
        out.add_column(f"{number} ranks", justify="right")
    records = []
    for count, runtime in itertools.product(counts, Runtime):
        tables = random_tables(count, count)
        cells = []
        for number in ranks:
            asked = request(tables, number, runtime)
            begin = time.perf_counter()
            found = plan(asked, split=False)
            seconds = time.perf_counter() - begin
            gap = found.gap if found.gap is not None else float("nan")
            cells.append(f"{seconds:.2f} (gap {gap:.0e})")
            records.append(
                {"tables": count, "runtime": runtime.value, "ranks": number, "seconds": seconds, "gap": found.gap,
                 "status": found.status.value}
            )  # fmt: skip
        out.add_row(f"{count} {runtime.value}", *cells)
    console.print(out)
    return records


def tight_rows(console: Console, instances: int) -> dict[str, Any]:
    """Feasible plans missed just above the smallest HBM budget that works."""
    missed = tried = 0
    worst = 0.0
    for seed, above in itertools.product(range(instances), (0.0, 0.002, 0.005, 0.01, 0.02)):
        for runtime in Runtime:
            problem = build_problem(request(random_tables(12 + seed, 100 + seed), 2, runtime))
            host = 0.8 * sum(float(group.host.max(axis=1).sum()) for group in problem.groups)
            least = solve(problem.with_budget(np.inf, host).minimising(0), Limits(gap=1e-6, time_limit_s=1.0))
            if least.modules is None:
                continue
            begin = time.perf_counter()
            solution = solve(problem.with_budget(least.cost * (1 + above), host))
            worst = max(worst, time.perf_counter() - begin)
            tried += 1
            missed += solution.modules is None
    console.print(f"budgets 0 to 2 % above the smallest that works: {missed} of {tried} feasible plans missed")
    return {"tried": tried, "missed": missed, "worst_seconds": worst}


def brute_rows(console: Console, instances: int) -> dict[str, Any]:
    """Every choice of small instances, against the solver."""
    worst = 0.0
    for seed in range(instances):
        problem = knapsack(6, 6, seed)
        items = np.arange(6)
        best = np.inf
        for choice in itertools.product(range(6), repeat=6):
            picked = np.array(choice)
            if np.all(problem.use[:, items, picked].sum(axis=1) <= problem.budget):
                best = min(best, float(problem.cost[items, picked].sum()))
        result = solve_knapsack(problem)
        worst = max(worst, abs(result.cost - best) / best if np.isfinite(best) else float(result.choice is not None))
    console.print(f"6 tables x 6 options, {instances} instances: at most {worst:.1e} from brute force")
    return {"instances": instances, "worst_relative_difference": worst}


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small cases only.")] = False,
) -> None:
    """Run all parts and print them."""
    console = Console()
    cases = [(20, 20), (50, 20), (100, 20)] if quick else [(20, 20), (50, 20), (100, 20), (100, 60), (1000, 60)]
    counts = [20, 100] if quick else [20, 100, 1000]
    parts: dict[str, Callable[[], Any]] = {
        "knapsack": lambda: solver_rows(console, cases, 3, 10.0),
        "plans": lambda: plan_rows(console, counts, [2, 64, 1024]),
        "tight": lambda: tight_rows(console, 2 if quick else 6),
        "brute_force": lambda: brute_rows(console, 3 if quick else 6),
    }
    plan(request(random_tables(3, 0), 2, Runtime.DYNAMICEMB))
    results = {name: part() for name, part in parts.items()}
    if json_path:
        machine = {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()}
        machine |= {"numpy": np.__version__, "highs": highspy.Highs().version()}  # type: ignore[no-untyped-call]
        payload = {"command": "python -m benchmarks.placement " + " ".join(sys.argv[1:]), "machine": machine, **results}
        json_path.write_text(json.dumps(payload, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
