"""What the demo tells at its end.

Its ranks share the cores of one machine, so the wall clock shows the work of all ranks, not the wait for the slowest.
What a step would take with a core per rank is the CPU time that the slowest rank's process takes in it, its part in
balancing and in moving samples included. That is measured, and told beside the wall clock. It leaves out how long
messages are under way. The first step, which loads code, is left out too.
"""

from __future__ import annotations

import os
from collections import Counter
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table


def summarize(results: dict[str, Any]) -> dict[str, Any]:
    """Figures of each run, by name ("off", "on")."""
    summary = {}
    for name, result in results.items():
        steps = result["ranks"][0]
        modes = Counter(step["mode"] for step in steps)
        size = sum(step["size"] for step in steps) if name == "on" else 0
        summary[name] = {
            "steps": len(steps),
            "imbalance_before": mean(step["before"] for step in steps),
            "imbalance_after": mean(step["after"] for step in steps),
            "lower_bound": mean(step["lower_bound"] / step["mean_load"] for step in steps if step["mean_load"]),
            "moved_share": sum(step["moved"] for step in steps) / size if size else 0.0,
            "lost": result["lost"],
            "doubled": result["doubled"],
            "rounds": dict(modes),
            "balanced_by_service": modes.get("service", 0),
            "final_loss": sum(rank[-1]["loss"] for rank in result["ranks"]) / len(result["ranks"]),
            "seconds": sum(step["wall_seconds"] for step in steps),
            "step_seconds": mean(step["wall_seconds"] for step in steps[1:]),
            "step_seconds_with_a_core_per_rank": mean(slowest_rank(result)),
        }
    return summary


def show(summary: dict[str, Any], results: dict[str, Any], console: Console) -> None:
    """Prints the table, and the loads of one step and the time of a step as bars."""
    world_size = len(results["off"]["ranks"])
    table = Table(title="Mean of all steps")
    table.add_column("")
    for name in summary:
        table.add_column(f"balancing {name}", justify="right")
    rows = [
        ("max/mean load before", "imbalance_before", "{:.3f}"),
        ("max/mean load after", "imbalance_after", "{:.3f}"),
        ("lower bound", "lower_bound", "{:.3f}"),
        ("share of bytes moved", "moved_share", "{:.1%}"),
        ("samples lost", "lost", "{}"),
        ("samples doubled", "doubled", "{}"),
        ("steps", "steps", "{}"),
        ("steps by the service's plan", "balanced_by_service", "{}"),
        ("loss of the last step", "final_loss", "{:.4f}"),
        ("a step, a core per rank *", "step_seconds_with_a_core_per_rank", "{:.3f} s"),
        (f"a step, {cores()} cores for {world_size} ranks", "step_seconds", "{:.3f} s"),
        ("the run, wall clock", "seconds", "{:.1f} s"),
    ]
    for label, key, form in rows:
        table.add_row(label, *(form.format(summary[name][key]) for name in summary))
    console.print(table)
    step = worst_step(results)
    for name, result in results.items():
        loads = [rank[step]["load"] for rank in result["ranks"]]
        console.print(f"loads of step {step}, balancing {name}:")
        for rank, load in enumerate(loads):
            width = round(48 * load / max(rank_steps[step]["load"] for rank_steps in results["off"]["ranks"]))
            console.print(f"  rank {rank} {'█' * width}", highlight=False)

    console.print(
        "* CPU time of the slowest rank in each step, measured here: the step's time if each rank had a core to itself",
        soft_wrap=True,
    )
    times = {name: figures["step_seconds_with_a_core_per_rank"] for name, figures in summary.items()}
    for name, seconds in times.items():
        width = round(48 * seconds / max(times.values()))
        console.print(f"  balancing {name:<3} {'█' * width} {1000 * seconds:.0f} ms", highlight=False)
    console.print(
        f"with a core per rank, a step takes {times['off'] / times['on']:.2f} times as long without balancing"
    )


def slowest_rank(result: dict[str, Any]) -> list[float]:
    """CPU seconds of the slowest rank in each step but the first, of a run."""
    return [max(rank[step]["cpu_seconds"] for rank in result["ranks"]) for step in range(1, len(result["ranks"][0]))]


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def worst_step(results: dict[str, Any]) -> int:
    """The step whose loads are the most uneven without balancing, among those that all runs have."""
    steps = min(len(result["ranks"][0]) for result in results.values())
    before = [step["before"] for step in results["off"]["ranks"][0][:steps]]
    return before.index(max(before))
