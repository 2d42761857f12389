"""Figures, table and plot of the convergence benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

CURVES = ("auc", "test_loss")
COLORS = ("#333333", "#4c72b0", "#c44e52", "#dd8452", "#55a868", "#8172b3", "#937860")


def summarize(recorded: dict[str, Any]) -> dict[str, Any]:
    """What was recorded, with the figures of each setting over its seeds as `settings`."""
    by_setting: dict[str, list[dict[str, Any]]] = {}
    for run in recorded["runs"]:
        by_setting.setdefault(run["setting"], []).append(run)
    ends = {curve: {name: np.array([run[curve][-1] for run in runs]) for name, runs in by_setting.items()}
            for curve in CURVES}  # fmt: skip
    settings: dict[str, Any] = {}
    for name, runs in by_setting.items():
        means = ("seconds", "imbalance_before", "imbalance", "moved_share", "other_step_share", "balanced_steps")
        entry: dict[str, Any] = {key: float(np.mean([run[key] for run in runs])) for key in means}
        entry |= {"seeds": len(runs), "lost": sum(run["lost"] for run in runs)}
        entry["steps"] = float(np.mean([len(run["loss"]) for run in runs]))
        for curve, values in ends.items():
            entry[curve] = float(values[name].mean())
            entry[f"{curve}_deviation"] = deviation(values[name])
            if "off" in values and name != "off":
                difference = entry[curve] - float(values["off"].mean())
                noise = noise_of_difference(values["off"], values[name], list(values.values()))
                entry |= {f"{curve}_difference": difference, f"{curve}_noise": noise}
                entry[f"{curve}_within"] = abs(difference) <= noise
        settings[name] = entry
    return recorded | {"settings": settings}


def deviation(values: NDArray[np.float64]) -> float:
    """Over seeds; NaN for one."""
    return float(values.std(ddof=1)) if len(values) > 1 else float("nan")


def noise_of_difference(
    one: NDArray[np.float64], other: NDArray[np.float64], all_settings: list[NDArray[np.float64]]
) -> float:
    """Twice the standard error of the difference of two means, by the deviation over seeds pooled over all settings."""
    squares = sum(float(((values - values.mean()) ** 2).sum()) for values in all_settings)
    freedom = sum(len(values) - 1 for values in all_settings)
    if not freedom:
        return float("nan")
    return float(2 * np.sqrt(squares / freedom * (1 / len(one) + 1 / len(other))))


def show(results: dict[str, Any], console: Console) -> None:
    """Prints a table."""
    best = results.get("best_auc")
    table = Table(
        title=f"{results['ranks']} ranks, {results['machine']}: {results['samples']:,} samples an epoch, "
        f"{results['tests']:,} tests" + (f", best possible AUC {best:.4f}" if best else "")
    )
    for title in ("setting", "AUC", "− off", "noise", "within", "log loss", "− off", "noise", "within", "steps",
                  "balanced", "max/mean", "moved", "other step", "lost"):  # fmt: skip
        table.add_column(title, justify="left" if title == "setting" else "right")
    for name, entry in results["settings"].items():
        row = [name]
        for curve in CURVES:
            row.append(f"{entry[curve]:.4f} ± {entry[f'{curve}_deviation']:.4f}")
            if f"{curve}_difference" in entry:
                row += [f"{entry[f'{curve}_difference']:+.4f}", f"{entry[f'{curve}_noise']:.4f}"]
                row.append("yes" if entry[f"{curve}_within"] else "NO")
            else:
                row += ["", "", ""]
        loads = f"{entry['imbalance_before']:.3f} → {entry['imbalance']:.3f}"
        row += [f"{entry['steps']:.0f}", f"{entry['balanced_steps']:.0%}", loads, f"{entry['moved_share']:.0%}"]
        table.add_row(*row, f"{entry['other_step_share']:.1%}", str(entry["lost"]))
    console.print(table)


def curve_of(runs: list[dict[str, Any]], key: str, grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """(seeds, grid) a test's curve at numbers of trained samples; the last value goes on."""
    return np.array([np.interp(grid, run["tested_after"], run[key]) for run in runs])


def smoothed_loss(runs: list[dict[str, Any]], grid: NDArray[np.float64], width: float) -> NDArray[np.float64]:
    """(seeds, grid) loss per sample over the `width` samples before each number of trained samples."""
    curves = []
    for run in runs:
        counts = np.array(run["step_samples"], dtype=np.float64)
        ends = np.concatenate([[0.0], counts.cumsum()])
        sums = np.concatenate([[0.0], (counts * np.array(run["loss"])).cumsum()])
        begins = np.maximum(grid - width, 0)
        inside = np.interp(grid, ends, ends) - np.interp(begins, ends, ends)
        curves.append((np.interp(grid, ends, sums) - np.interp(begins, ends, sums)) / inside)
    return np.array(curves)


def draw(results: dict[str, Any], path: Path) -> None:
    """Curves of AUC and loss as means over seeds, and the AUC at the end of each seed."""
    from matplotlib.figure import Figure

    by_setting: dict[str, list[dict[str, Any]]] = {}
    for run in results["runs"]:
        by_setting.setdefault(run["setting"], []).append(run)
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.2, 1.2, 1))
    end = min(run["tested_after"][-1] for run in results["runs"])
    grid = np.linspace(end / 100, end, 100)
    for (name, runs), color in zip(by_setting.items(), COLORS, strict=False):
        auc, loss = curve_of(runs, "auc", grid), smoothed_loss(runs, grid, end / 20)
        for axis, curves in ((left, auc), (middle, loss)):
            label = f"{name} (grey: its seeds)" if name == "off" else name
            axis.plot(grid, curves.mean(axis=0), label=label, color=color, linewidth=1.2)
            if name == "off":
                axis.fill_between(grid, curves.min(axis=0), curves.max(axis=0), color=color, alpha=0.2, linewidth=0)
        ends = [run["auc"][-1] for run in runs]
        right.plot(ends, [name] * len(ends), "o", color=color, markersize=5, alpha=0.7)
        right.plot([np.mean(ends)], [name], "|", color=color, markersize=16)
    if results.get("best_auc"):
        left.axhline(results["best_auc"], color="black", linestyle=":", linewidth=1, label="best possible")
    left.set(title="AUC of the test", xlabel="samples trained")
    middle.set(title="loss per sample in training", xlabel="samples trained")
    right.set(title="AUC at the end, by seed")
    right.invert_yaxis()
    left.legend(frameon=False, fontsize=8)
    for axis in (left, middle, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
