"""Partitions: how near the bound, how much they move, how long they take.

    python -m benchmarks.partitioning --json benchmarks/results/partitioning.json

A grid of ranks, samples a rank, distributions of lengths and costs; traffic between nodes; memory caps beside a MILP
solver; times beside the published ones of a C++ Karmarkar-Karp; a plan for 4096 ranks with its slices. `--quick` takes
a minute. Parts that a run leaves out (`--parts`) stay as they are in the JSON file.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import numba
import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.harness.results import write
from benchmarks.partitioning_draws import COSTS, LENGTHS, as_problem
from benchmarks.partitioning_least import least_crossing, least_moved
from benchmarks.partitioning_memory import measure_memory
from benchmarks.partitioning_times import STRATEGIES, measure_times
from evenkeel.partitioning import partition, slice_plan, warm_up
from evenkeel.partitioning.exchange import exchange_from
from evenkeel.partitioning.karmarkar_karp import differenced
from evenkeel.partitioning.lpt import at_home, longest_first
from evenkeel.partitioning.problem import Problem, crowding_bound, with_crowding

PARTS = ("grid", "nodes", "memory", "times")
LONG, LONG_SAMPLES = 100, 10_000  # effort of the long search, and the samples up to which it is run
SAMPLED = ("uniform", "lognormal", "zipf_1.2")  # lengths for which the moved share has an aim


def long_search(problem: Problem) -> float:
    """Smallest maximum of searches a hundred times as long, from the homes and from both other strategies."""
    problem = with_crowding(problem)
    overload = min(
        exchange_from(problem, start(problem), plain=False, effort=LONG)[1]
        for start in (at_home, longest_first, differenced)
    )
    return float(np.ldexp(float(problem.arrays.limits.max()) + max(overload, 0.0), -problem.cost_exponent))


def measure_cell(ranks: int, samples: int, lengths: str, cost: str, seeds: int) -> dict[str, Any]:
    """Means over seeds of one cell of the grid; maxima as shares of the bound and of the certificate."""
    over: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    moved: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    before, certified, reach, least = [], [], [], []
    known: list[float] = []
    homes = np.repeat(np.arange(ranks, dtype=np.int32), samples)
    for seed in range(seeds):
        sizes = LENGTHS[lengths](np.random.default_rng(seed), ranks * samples)
        costs = COSTS[cost](sizes)
        results = {s: partition(costs, homes, ranks, strategy=s, sizes=sizes) for s in STRATEGIES}
        bound = results["lpt"].lower_bound or 1.0
        problem = as_problem(costs, homes, ranks, sizes)
        crowded = crowding_bound(problem.arrays.costs, problem.order, samples, ranks)
        crowded = float(np.ldexp(crowded, -problem.cost_exponent))
        for strategy, result in results.items():
            over[strategy].append(float(result.loads.max()) / bound)
            moved[strategy].append(result.moved_size / max(1, int(sizes.sum())))
        before.append(results["lpt"].home_imbalance)
        reach.append(bound * ranks / max(1.0, float(costs.sum())))
        largest = float(results["minimal_move"].loads.max())
        certified.append(largest / max(bound, crowded))
        limits = np.full(ranks, max(largest, 1.001 * bound))
        least.append(least_moved(costs, sizes, homes, limits) / max(1, int(sizes.sum())))
        if certified[-1] > 1.002 and costs.size <= LONG_SAMPLES and len(known) < 3:
            known.append(largest / min(largest, long_search(problem)))
    ours = np.array(over["minimal_move"])
    best = np.minimum(over["karmarkar_karp"], over["lpt"])
    return {
        "ranks": ranks,
        "samples": samples,
        "lengths": lengths,
        "cost": cost,
        "seeds": seeds,
        "home_imbalance": statistics.mean(before),
        "bound_over_mean": statistics.mean(reach),
        "over_bound": {s: statistics.mean(v) for s, v in over.items()},
        "over_bound_worst": float(ours.max()),
        "over_certificate": statistics.mean(certified),
        "over_certificate_worst": max(certified),
        "over_best_known_worst": max(known, default=None),
        "moved_share": {s: statistics.mean(v) for s, v in moved.items()},
        "least_moved_share": statistics.mean(least),
        "missed": int(((ours > 1.002) & (best <= 1.002)).sum()),
        "worse": int((ours > best * 1.001 * (1 + 1e-12)).sum()),
    }


def measure_nodes(shapes: list[tuple[int, int]], ranks_per_node: int, seeds: int) -> list[dict[str, Any]]:
    """Traffic between nodes, beside balancing without regard to nodes and the least that any balance needs."""
    entries = []
    for ranks, samples in shapes:
        homes = np.repeat(np.arange(ranks, dtype=np.int32), samples)
        nodes = np.arange(ranks) // ranks_per_node
        for lengths in SAMPLED:
            for cost, work in COSTS.items():
                crossing: dict[str, float] = dict.fromkeys(("aware", "blind", "karmarkar_karp", "least"), 0.0)
                worst = 0.0
                for seed in range(seeds):
                    sizes = LENGTHS[lengths](np.random.default_rng(seed), ranks * samples)
                    costs = work(sizes)
                    aware = partition(costs, homes, ranks, sizes=sizes, nodes=nodes)
                    blind = partition(costs, homes, ranks, sizes=sizes)
                    peer = partition(costs, homes, ranks, sizes=sizes, strategy="karmarkar_karp")
                    crossing["aware"] += aware.moved_size_between_nodes
                    crossing["blind"] += float(sizes[nodes[blind.destinations] != nodes[homes]].sum())
                    crossing["karmarkar_karp"] += float(sizes[nodes[peer.destinations] != nodes[homes]].sum())
                    crossing["least"] += least_crossing(
                        costs, sizes, nodes[homes], 1.001 * aware.lower_bound * ranks_per_node
                    )
                    worst = max(worst, aware.imbalance / blind.imbalance)
                entries.append(
                    {"ranks": ranks, "samples": samples, "ranks_per_node": ranks_per_node, "lengths": lengths}
                    | {"cost": cost, "seeds": seeds, "imbalance_aware_over_blind": worst, "crossing": crossing}
                )
    return entries


def measure_round(ranks: int, samples: int, fields: int, ranks_per_node: int) -> dict[str, Any]:
    """Median milliseconds of partitioning and slicing one round of many ranks; one a node stands for no nodes."""
    sizes = LENGTHS["lognormal"](np.random.default_rng(0), ranks * samples)
    costs, lengths = COSTS["L²+1024L"](sizes), np.repeat(sizes[:, None], fields, axis=1)
    homes, counts = np.repeat(np.arange(ranks, dtype=np.int32), samples), np.full(ranks, samples)
    nodes = np.arange(ranks) // ranks_per_node if ranks_per_node > 1 else None
    times: dict[str, list[float]] = {"partition": [], "slice": [], "views": []}
    for _ in range(7):
        marks = [time.perf_counter()]
        plan = partition(costs, homes, ranks, sizes=sizes, nodes=nodes)
        marks.append(time.perf_counter())
        slices = slice_plan(plan.destinations, counts, lengths)
        marks.append(time.perf_counter())
        assert len([slices[rank] for rank in range(ranks)]) == ranks
        marks.append(time.perf_counter())
        for name, begin, end in zip(times, marks, marks[1:], strict=False):
            times[name].append((end - begin) * 1e3)
    shape = {"ranks": ranks, "samples": samples, "fields": fields, "ranks_per_node": ranks_per_node}
    return shape | {k: statistics.median(v) for k, v in times.items()}


def print_grid(console: Console, cells: list[dict[str, Any]]) -> None:
    table = Table(title="Largest load over the lower bound; means over ranks, costs and seeds")
    for column in ("samples", "lengths", "before", "KK", "LPT", "minimal move", "over certificate", "worst", "moved"):
        table.add_column(column, justify="left" if column == "lengths" else "right")
    for column in ("least", "moved by KK", "missed", "worse", "over best known"):
        table.add_column(column, justify="right")
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault((cell["samples"], cell["lengths"]), []).append(cell)
    for (samples, lengths), group in groups.items():
        over = {s: statistics.mean(c["over_bound"][s] for c in group) for s in STRATEGIES}
        table.add_row(
            str(samples),
            lengths,
            f"{statistics.mean(c['home_imbalance'] for c in group):.2f}",
            *(f"{over[s]:.4f}" for s in STRATEGIES),
            f"{statistics.mean(c['over_certificate'] for c in group):.4f}",
            f"{max(c['over_certificate_worst'] for c in group):.4f}",
            f"{statistics.mean(c['moved_share']['minimal_move'] for c in group):.1%}",
            f"{statistics.mean(c['least_moved_share'] for c in group):.1%}",
            f"{statistics.mean(c['moved_share']['karmarkar_karp'] for c in group):.1%}",
            str(sum(c["missed"] for c in group)),
            str(sum(c["worse"] for c in group)),
            f"{max(c['over_best_known_worst'] or 1.0 for c in group):.4f}",
        )
    console.print(table)
    console.print(
        "missed: minimal move ends above 1.002 and another strategy does not; worse: above the best other by more than"
        " the tolerance. Certificate: the larger of the bound and of what crowding of heavy samples proves. Best known:"
        " of a search a hundred times as long, where the certificate is more than 0.2 % away. Least: what must leave"
        " ranks above what minimal move ends at, the last sample of each in part; no assignment moves less."
    )


def print_rest(console: Console, results: dict[str, Any]) -> None:
    table = Table(title="Traffic between nodes, as a share of balancing without regard to nodes")
    for column in ("ranks", "samples", "lengths", "cost", "of minimal move", "of KK", "least possible", "over least"):
        table.add_column(column, justify="right")
    for entry in results["nodes"]:
        crossing = entry["crossing"]
        blind = max(crossing["blind"], 1.0)
        table.add_row(
            *(str(entry[k]) for k in ("ranks", "samples", "lengths", "cost")),
            f"{crossing['aware'] / blind:.3f}",
            f"{crossing['aware'] / max(crossing['karmarkar_karp'], 1.0):.3f}",
            f"{crossing['least'] / blind:.3f}",
            f"{crossing['aware'] / max(crossing['least'], 1.0):.2f}",
        )
    console.print(table)
    console.print(
        "least possible: what must leave the nodes above 1.001 times the bound, in whole samples; a quarter is out of"
        " reach where it is above 0.250"
    )
    table = Table(title="Memory caps")
    for column in (
        "ranks",
        "samples",
        "instances",
        "found",
        "impossible, proven",
        "MILP finds, we do not",
        "slowest ms",
    ):
        table.add_column(column, justify="right")
    for entry in results["memory"]:
        table.add_row(*(str(entry[k]) for k in ("ranks", "samples", "instances", "found", "impossible", "missed")),
                      f"{entry['slowest_ms']:.1f}")  # fmt: skip
    console.print(table)
    table = Table(title="Median ms of a call")
    for column in ("ranks", "samples", "lengths", "KK", "LPT", "minimal move", "over KK: plain", "searched", "draws"):
        table.add_column(column, justify="right")
    for column in ("KK search", "C++", "over C++"):
        table.add_column(column, justify="right")
    for entry in results["times"]:
        published = entry["published_cpp"]
        table.add_row(
            *(str(entry[k]) for k in ("ranks", "samples", "lengths")),
            *(f"{entry[s]:.3f}" for s in STRATEGIES),
            *(
                "" if entry[k] is None else f"{entry[k]:.2f}"
                for k in ("over_karmarkar_karp_plain", "over_karmarkar_karp_searched")
            ),
            f"{entry['plain_suffices']} + {entry['seeds'] - entry['plain_suffices']}",
            f"{entry['karmarkar_karp_search']:.3f}",
            f"{published}" if published else "",
            f"{entry['karmarkar_karp_search'] / published:.2f}" if published else "",
        )
    console.print(table)
    console.print(
        "over KK: times of minimal move over Karmarkar-Karp's on draws for which the plain search suffices, and on"
        " those that need a further one, with the number of each. KK search: differencing and its sort alone, as the"
        " published C++; the other times are of whole calls, in which sets are matched to ranks."
    )
    for entry in results["rounds"]:
        console.print({k: round(v, 2) for k, v in entry.items()})


def one_of(names: Collection[str]) -> Any:
    """An option that takes some of these names."""

    def checked(chosen: list[str]) -> list[str]:
        if unknown := set(chosen) - set(names):
            raise typer.BadParameter(f"{', '.join(sorted(unknown))}: there are {', '.join(names)}")
        return chosen

    return typer.Option(callback=checked, help=f"some of {', '.join(names)}", show_default="all")


def main(
    ranks: Annotated[list[int], typer.Option(help="numbers of ranks")] = [8, 64, 256, 1024],  # noqa: B006
    samples: Annotated[list[int], typer.Option(help="samples a rank")] = [8, 32, 128, 512],  # noqa: B006
    lengths: Annotated[list[str], one_of(LENGTHS)] = list(LENGTHS),  # noqa: B006
    costs: Annotated[list[str], one_of(COSTS)] = list(COSTS),  # noqa: B006
    parts: Annotated[list[str], one_of(PARTS)] = list(PARTS),  # noqa: B006
    seeds: Annotated[int, typer.Option(help="draws of each cell")] = 20,
    samples_per_cell: Annotated[
        int, typer.Option(help="fewer seeds where a cell would have more samples, at least 2")
    ] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="small shapes, three seeds")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="result file")] = None,
) -> None:
    """Measures partitions: how near the bound, how much they move, how long they take."""
    if quick:
        ranks, samples, seeds = [8, 32], [8, 32, 128], 3
    console = Console(width=150)
    with console.status("compiling the kernels, or loading them"):
        warm_up()
    results: dict[str, Any] = {"grid": [], "nodes": [], "memory": [], "times": [], "rounds": [], "commands": {}}
    if json_path and json_path.exists():
        results |= json.loads(json_path.read_text())
    results["machine"] = f"{platform.machine()}, {os.cpu_count()} CPUs"
    results["versions"] = {"python": platform.python_version(), "numpy": np.__version__, "numba": numba.__version__}
    for part in parts:
        results["commands"][part] = "python -m benchmarks.partitioning " + " ".join(sys.argv[1:])
    if "times" in parts:
        growth = [(8, 32), (8, 128), (8, 512), (64, 32), (64, 128), (64, 512), (256, 32), (256, 128), (256, 256)]
        shapes = [(8, 128), (64, 128)] if quick else [*growth, (1024, 32), (1024, 128), (1024, 256)]
        results["times"] = measure_times(shapes, 7 if quick else 9, 2 if quick else 7)
        results["rounds"] = [measure_round(256 if quick else 4096, 128, 4, per_node) for per_node in (1, 8)]
    if "grid" in parts:
        results["grid"] = []
        grid = list(itertools.product(samples, lengths, ranks, costs))
        for count, drawn, size, cost in track(grid, "grid", console=console):
            draws = max(2, min(seeds, samples_per_cell // (size * count))) if samples_per_cell else seeds
            results["grid"].append(measure_cell(size, count, drawn, cost, draws))
        print_grid(console, results["grid"])
    if "nodes" in parts:
        shapes = [(32, 32)] if quick else [(64, 32), (64, 128), (256, 128)]
        results["nodes"] = measure_nodes(shapes, 8, 2 if quick else 5)
    if "memory" in parts:
        shapes = [(2, 4), (4, 4)] if quick else [(2, 4), (4, 4), (4, 8), (8, 4), (8, 8), (8, 32), (64, 32)]
        drawn_from = {name: LENGTHS[name] for name in ("uniform", "normal", "lognormal", "zipf_1.2")}
        results["memory"] = [measure_memory(size, count, drawn_from, 2 if quick else 4) for size, count in shapes]
    print_rest(console, results)
    write(json_path, results)


if __name__ == "__main__":
    typer.run(main)
