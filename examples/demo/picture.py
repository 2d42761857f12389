"""The picture of the ranks' loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from examples.demo.summary import slowest_rank, worst_step


def draw(results: dict[str, Any], path: Path) -> Path:
    """Draws loads over mean load, one step rank by rank and every step as max/mean, and the time of a step.

    Args:
        results: What the ranks recorded, by run ("off", "on").
        path: Where the PNG goes.
    """
    figure, (bars, lines, times) = plt.subplots(1, 3, figsize=(13, 4), width_ratios=(5, 5, 3), constrained_layout=True)
    step = worst_step(results)
    colors = {"off": "#c44e52", "on": "#4c72b0"}
    world_size = len(results["off"]["ranks"])
    for offset, (name, result) in enumerate(results.items()):
        loads = np.array([rank[step]["load"] for rank in result["ranks"]])
        bars.bar(
            np.arange(world_size) + 0.4 * (offset - 0.5), loads / loads.mean(), 0.4, color=colors[name],
            label=f"balancing {name}",
        )  # fmt: skip
        after = [entry["after"] for entry in result["ranks"][0]]
        lines.plot(after, color=colors[name], label=f"balancing {name}")
        seconds = float(np.mean(slowest_rank(result)))
        drawn = times.bar(f"balancing {name}", 1000 * seconds, 0.6, color=colors[name])
        times.bar_label(drawn, fmt="%.0f ms")
    bound = [
        entry["lower_bound"] / entry["mean_load"] if entry["mean_load"] else 1.0 for entry in results["on"]["ranks"][0]
    ]
    lines.plot(bound, color="black", linestyle=":", label="lower bound")
    bars.axhline(1.0, color="black", linewidth=0.8)
    bars.set(title=f"Load of each rank, step {step}", xlabel="rank", ylabel="load / mean load")
    bars.set_xticks(range(world_size))
    lines.set(title="The slowest rank of each step", xlabel="step", ylabel="max / mean load", ylim=(0.9, None))
    times.set(title="A step with a core per rank", ylabel="CPU time of the slowest rank, ms")
    for axes in (bars, lines):
        axes.legend(frameon=False)
    for axes in (bars, lines, times):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
