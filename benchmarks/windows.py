"""What windows gain where single samples outweigh a rank's share.

    python -m benchmarks.windows                     # writes benchmarks/results/windows.json, windows.md and the plot
    python -m benchmarks.windows --quick             # a few seeds, prints the table only

Eight batches of each rank are balanced in windows of K = 1, 2, 4 and 8. The figure is the sum over the eight steps of
the largest load, over that of an even division (load of all / ranks); beside it the floor max(mean, heaviest sample) of
a window, which no regrouping beats. Loads are exact: the table does not depend on the machine, but for the time of a
decision, which is processor time of one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.windows import partition_window

COMMAND = "python -m benchmarks.windows"
RESULTS = Path(__file__).parent / "results"
STEPS, WINDOWS = 8, (1, 2, 4, 8)
LENGTHS = ("giants", "zipf 1.5", "zipf 1.2")


def lengths_of(kind: str, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Lengths up to 65,536 (giants) or 4096."""
    if kind == "giants":  # log-normal of mean 600, and one sample in 200 of 32,768 to 65,536
        values = np.clip(rng.lognormal(6.0, 0.9, shape), 1, 4096).astype(np.int64)
        giant = rng.random(shape) < 1 / 200
        return np.where(giant, rng.integers(32_768, 65_537, shape), values)
    power = np.arange(1.0, 4097.0) ** -float(kind.split()[1])
    return rng.choice(4096, shape, p=power / power.sum()) + 1


def measure(kind: str, ranks: int, samples: int, seeds: int) -> list[dict[str, Any]]:
    """One row for each window."""
    rows = []
    for window in WINDOWS:
        total = even = floor = unwindowed = 0.0
        seconds, changed, moved, count = [], 0, 0, 0
        for seed in range(seeds):
            lengths = lengths_of(kind, np.random.default_rng(seed), (ranks, STEPS, samples))
            for first in range(0, STEPS, window):
                part = lengths[:, first : first + window].reshape(-1)
                costs = part * part + 5120 * part
                homes = np.repeat(np.arange(ranks), window * samples)
                steps = np.tile(np.repeat(np.arange(window), samples), ranks)
                started = time.thread_time()
                plan = partition_window(costs, homes, steps, ranks, window, sizes=part)
                seconds.append(time.thread_time() - started)
                assert plan.steps is not None
                assert (np.bincount(plan.steps, minlength=window) == ranks * samples).all()
                total += plan.total
                even += float(costs.sum()) / ranks
                floor += max(float(costs.sum()) / ranks, float(costs.max()))
                unwindowed += sum(
                    float(np.bincount(homes[steps == k], costs[steps == k], ranks).max()) for k in range(window)
                )
                changed, moved, count = changed + plan.changed, moved + plan.moved_samples, count + len(part)
        rows.append(
            {
                "lengths": kind, "ranks": ranks, "samples": samples, "window": window, "seeds": seeds,
                "off": unwindowed / even, "sum_of_largest": total / even, "floor": floor / even,
                "batch_changed": changed / count, "rank_changed": moved / count,
                "cpu_ms_median": 1e3 * float(np.median(seconds)), "cpu_ms_worst": 1e3 * max(seconds),
            }
        )  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    heads = ("lengths", "ranks × samples", "K", "off", "balanced", "floor", "steps faster than K = 1",
             "samples in another batch", "decision, CPU ms (worst)")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    single = 1.0
    for row in rows:
        single = row["sum_of_largest"] if row["window"] == 1 else single
        lines.append(
            f"| {row['lengths']} | {row['ranks']} × {row['samples']} | {row['window']} | {row['off']:.3f} "
            f"| {row['sum_of_largest']:.3f} | {row['floor']:.3f} | {single / row['sum_of_largest']:.2f}× "
            f"| {row['batch_changed']:.1%} | {row['cpu_ms_median']:.1f} ({row['cpu_ms_worst']:.0f}) |"
        )
    return "\n".join(lines) + "\n"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Sum of the largest loads over the even division, by window."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(LENGTHS), figsize=(11, 3.4), sharex=True)
    for plot, kind in zip(axes, LENGTHS, strict=True):
        shapes = sorted({(row["ranks"], row["samples"]) for row in rows})
        for ranks, samples in shapes:
            mine = [r for r in rows if (r["lengths"], r["ranks"], r["samples"]) == (kind, ranks, samples)]
            plot.plot([r["window"] for r in mine], [r["sum_of_largest"] for r in mine], "o-",
                      label=f"{ranks} × {samples}")  # fmt: skip
        plot.set(title=kind, xlabel="batches of a window", xscale="log", ylim=(0.9, None))
        plot.set_xticks(WINDOWS, [str(window) for window in WINDOWS])
        plot.minorticks_off()
        plot.axhline(1.0, color="grey", linewidth=0.8)
    axes[0].set_ylabel("Σ largest load / even division")
    axes[-1].legend(title="ranks × samples", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 seeds, 8 ranks; writes nothing")
    options = parser.parse_args()
    shapes = ((8, 32),) if options.quick else ((8, 32), (16, 32), (64, 32))
    rows = [
        row
        for kind in LENGTHS
        for ranks, samples in shapes
        for row in measure(kind, ranks, samples, 2 if options.quick else 5 if ranks > 16 else 10)
    ]
    text = table(rows) + f"\nLoad average of the machine (2 cores) while measuring: {os.getloadavg()[0]:.0f}.\n"
    print(text)
    if options.quick:
        return
    (RESULTS / "windows.json").write_text(
        json.dumps({"command": "python -m benchmarks.windows", "rows": rows}, indent=1)
    )
    (RESULTS / "windows.md").write_text(text)
    draw(rows, Path(__file__).parents[1] / "docs" / "images" / "windows.png")


if __name__ == "__main__":
    main()
