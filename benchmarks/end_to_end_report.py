"""Figures, table and plot of the end-to-end benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.end_to_end_ideal import IDEALS
from evenkeel.partitioning import partition
from trainer_client.balancing.costs.learned import fit_times
from trainer_client.observing.measurement import Breakdown

STALL = 3.0  # times the median step


def summarize(raw: dict[str, Any], *, skip: int) -> dict[str, Any]:
    """From what the ranks recorded to figures.

    Args:
        raw: What `benchmarks.end_to_end_rank` wrote.
        skip: First steps of each block to leave out.
    """
    results = {key: value for key, value in raw.items() if key != "workloads"}
    results["skipped_steps"] = skip
    results["workloads"] = {
        name: summarize_workload(workload, raw["ranks"], raw["peak_tflops"], skip)
        for name, workload in raw["workloads"].items()
    }
    return results


def summarize_workload(workload: dict[str, Any], ranks: int, peak: float | None, skip: int) -> dict[str, Any]:
    settings = workload["settings"]
    steps = min(len(setting["times"][0]) for setting in settings.values())
    block = workload.get("block_steps", steps)
    counted = np.arange(steps)
    counted = counted[counted % block >= (skip if block > skip else 0)]
    times = {name: np.array([rank[:steps] for rank in setting["times"]]) for name, setting in settings.items()}
    stalled = {name: find_stalls(table, counted) for name, table in times.items()}
    # A step that stalled in one setting is left out of all, so that all are compared on the same batches.
    chosen = np.setdiff1d(counted, np.concatenate(list(stalled.values())))
    breakdowns = {name: Breakdown.of(table[:, chosen]) for name, table in times.items()}
    trained = [name for name in settings if name not in IDEALS]  # on the same samples
    fit = fit_compute({name: settings[name] for name in trained}, breakdowns, chosen)
    bounds = bound_steps(workload["samples"], ranks, fit, chosen)
    # What a step takes besides compute does not depend on lengths; the smallest mean over the settings is attainable.
    besides = min(float((b.step - b.compute.max(axis=1)).mean()) for b in map(breakdowns.__getitem__, trained))
    allowed = besides + fit["fixed_ms"] + bounds["time_bound_ms"]
    out: dict[str, Any] = {
        "allowed_by_flops": float(bounds["flops_home"].sum() / bounds["flops_bound"].sum()),
        "step_ms_allowed": float(allowed.mean()),
        "fixed_ms": fit["fixed_ms"] + besides,
        "fit": fit,
        "layers_tflops": layers_tflops(workload.get("layers", [])),
        "settings": {},
    }
    off = breakdowns.get("off")
    if off is not None:
        out["allowed_by_time"] = float(off.step.mean() / allowed.mean())
    for name, setting in settings.items():
        breakdown = breakdowns[name]
        seconds = breakdown.step.mean() / 1e3
        flops = np.array(setting["flops"])[:, chosen]
        tflops = float(flops.sum(axis=0).mean() / ranks / seconds / 1e12)
        entry = breakdown.summary() | {
            "tflops_per_rank": tflops,
            "mfu": tflops / peak if peak else None,
            "cost_imbalance": float(np.array(setting["imbalance"])[chosen].mean()),
            "flops_imbalance": float((flops.max(axis=0) / flops.mean(axis=0)).mean()),
            "moved_share": float(np.array(setting["moved_share"])[chosen].mean()),
            "share_of_allowed": float(allowed.mean() / breakdown.step.mean()),
            "peak_gib": max(setting["peak_bytes"]) / 2**30,
            "exposed_agreement_ms_per_step": 1e3 * max(setting["exposed_seconds"]) / len(setting["times"][0]),
            "partition_ms": 1e3 * float(np.mean(setting["partition_seconds"])),
            "stalled_steps": stalled[name].tolist(),
            "compilations": max(setting.get("compilations", [0])),
            "modes": {mode: setting["modes"].count(mode) for mode in dict.fromkeys(setting["modes"])},
            "step_ms": breakdown.step.round(3).tolist(),
            "losses": setting["losses"],
        }
        if off is not None:
            entry["speedup"] = float(off.step.mean() / breakdown.step.mean())
            entry["share_of_allowed_by_flops"] = entry["speedup"] / out["allowed_by_flops"]
            entry["exposed_ms"] = entry["data_ms"] - off.summary()["data_ms"]
            entry["exposed_share"] = entry["exposed_ms"] / entry["step_ms_mean"]
        if off is not None and name in trained:
            reference = np.array(settings["off"]["losses"])
            # Later the rounding of bf16, which differs with the order of samples, has grown by itself.
            deviation = np.abs(np.array(setting["losses"]) / reference - 1)
            entry["loss_deviation"] = float(deviation[:10].max())
            entry["loss_deviation_of_mean"] = float(abs(np.mean(setting["losses"]) / reference.mean() - 1))
        if "cost_fit" in setting:
            entry["cost_fit"] = setting["cost_fit"]
        out["settings"][name] = entry
    for entry in out["settings"].values():
        if "ideal" in settings:
            entry["share_of_ideal"] = out["settings"]["ideal"]["step_ms_mean"] / entry["step_ms_mean"]
        if "fixed" in settings:
            entry["share_of_fixed"] = entry["tflops_per_rank"] / out["settings"]["fixed"]["tflops_per_rank"]
    return out


def find_stalls(times: NDArray[np.float64], counted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Steps of several times the median: kernels that were compiled for a new size, or the machine itself.

    Args:
        times: (ranks, steps, phases) milliseconds.
        counted: Steps to look at.
    """
    longest = times.sum(axis=2).max(axis=0)
    stalls: NDArray[np.int64] = counted[longest[counted] > STALL * np.median(longest[counted])]
    return stalls


def layers_tflops(layers: list[dict[str, float]]) -> float:
    """Rate of all layers over all ranks, per rank; 0 where they were not measured."""
    milliseconds = sum(rank["ms"] for rank in layers)
    return sum(rank["flops"] for rank in layers) / milliseconds / 1e9 if milliseconds else 0.0


def fit_compute(
    settings: dict[str, Any], breakdowns: dict[str, Breakdown], chosen: NDArray[np.int64]
) -> dict[str, float]:
    """Measured compute time of a rank's step as fixed + per token + per FLOP, all at least zero, by least squares."""
    rows, times = [], []
    for name, setting in settings.items():
        tokens, loads = np.array(setting["tokens"])[:, chosen].T, np.array(setting["flops"])[:, chosen].T
        rows.append(np.stack([tokens.reshape(-1) / 1e3, loads.reshape(-1) / 1e12], axis=1))
        times.append(breakdowns[name].compute.reshape(-1))
    fit = fit_times(np.concatenate(rows), np.concatenate(times))
    if fit is None:
        raise ValueError("too few steps to fit the compute time; use more --steps")
    return {
        "fixed_ms": fit.fixed,
        "ms_per_1000_tokens": float(fit.coefficients[0]),
        "ms_per_tflop": float(fit.coefficients[1]),
        "mean_error": fit.error,
    }


def bound_steps(
    samples: list[dict[str, Any]], ranks: int, fit: dict[str, float], chosen: NDArray[np.int64]
) -> dict[str, NDArray[np.float64]]:
    """For each step the largest home load and the lower bound, in FLOPs, and the lower bound in fitted time."""
    flops = np.array([rank["flops"] for rank in samples])[:, chosen]  # (ranks, steps, samples)
    tokens = np.array([rank["tokens"] for rank in samples])[:, chosen]
    milliseconds = fit["ms_per_1000_tokens"] * tokens / 1e3 + fit["ms_per_tflop"] * flops / 1e12
    homes = np.repeat(np.arange(ranks, dtype=np.int32), flops.shape[2])

    def bound(costs: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.array([partition(costs[:, s].reshape(-1), homes, ranks).lower_bound for s in range(costs.shape[1])])

    return {
        "flops_home": flops.sum(axis=2).max(axis=0),
        "flops_bound": bound(flops),
        "time_bound_ms": bound(milliseconds),
    }


COLUMNS = (
    ("median", "step_ms_median", "{:.2f}"), ("p99", "step_ms_p99", "{:.2f}"), ("mean", "step_ms_mean", "{:.2f}"),
    ("gain", "speedup", "{:.3f}"), ("of FLOPs", "share_of_allowed_by_flops", "{:.1%}"),
    ("of time", "share_of_allowed", "{:.1%}"), ("of ideal", "share_of_ideal", "{:.1%}"),
    ("TFLOP/s", "tflops_per_rank", "{:.4g}"), ("of fixed", "share_of_fixed", "{:.1%}"), ("MFU", "mfu", "{:.1%}"),
    ("FLOPs", "flops_imbalance", "{:.3f}"), ("spread", "compute_imbalance", "{:.3f}"),
    ("exposed", "exposed_ms", "{:.2f}"), ("", "exposed_share", "{:.2%}"),
    ("agree", "exposed_agreement_ms_per_step", "{:.2f}"), ("waiting", "waiting_ms", "{:.2f}"),
    ("comm.", "communication_ms", "{:.2f}"), ("moved", "moved_share", "{:.0%}"), ("GiB", "peak_gib", "{:.1f}"),
    ("loss", "loss_deviation", "{:.1e}"), ("mean loss", "loss_deviation_of_mean", "{:.1e}"),
)  # fmt: skip


def show(results: dict[str, Any], console: Console) -> None:
    """Prints a table per workload."""
    for name, workload in results["workloads"].items():
        by_time = workload.get("allowed_by_time")
        table = Table(
            title=f"{results['ranks']} × {results['machine']}, {name} lengths. Allowed by FLOPs "
            f"{workload['allowed_by_flops']:.3f}×"
            + (f", by time {by_time:.3f}× ({workload['step_ms_allowed']:.2f} ms)" if by_time else "")
        )
        table.add_column("setting")
        columns = [column for column in COLUMNS if any(column[1] in entry for entry in workload["settings"].values())]
        for title, _, _ in columns:
            table.add_column(title, justify="right")
        for setting, entry in workload["settings"].items():
            values = [form.format(entry[key]) if entry.get(key) is not None else "" for _, key, form in columns]
            table.add_row(setting, *values)
        console.print(table)
        for setting, entry in workload["settings"].items():
            if "cost_fit" in entry:
                console.print(describe_cost_fit(setting, entry["cost_fit"]), highlight=False)
            if entry["stalled_steps"] or entry["compilations"]:
                console.print(
                    f"{setting}: {entry['compilations']} graphs compiled meanwhile; left out for all settings, since "
                    f"over {STALL:.0f} times the median: steps {entry['stalled_steps']}",
                    highlight=False,
                )
        fit = workload["fit"]
        console.print(
            f"compute ≈ {fit['fixed_ms']:.2f} ms + {fit['ms_per_1000_tokens']:.3f} ms / 1000 tokens + "
            f"{fit['ms_per_tflop']:.4g} ms / TFLOP, mean error {fit['mean_error']:.1%}"
            + (f"; layers {workload['layers_tflops']:.3g} TFLOP/s" if workload["layers_tflops"] else ""),
            highlight=False,
        )


def describe_cost_fit(setting: str, fit: dict[str, Any]) -> str:
    """Whether a fitted cost was used, and how good it was."""
    if "explained" not in fit:
        return f"{setting}: no fit, too few steps or none that explains them; balanced by FLOPs"
    explained, error = fit["explained"], fit["mean_error"]
    return f"{setting}: the fit explains {explained:.1%} of the variance of compute time, mean error {error:.1%}"


def draw(results: dict[str, Any], path: Path) -> None:
    """Step times by setting as stacked phases, and the loss curves where there are any."""
    from matplotlib.figure import Figure

    workloads = results["workloads"]
    has_losses = any("losses" in entry for workload in workloads.values() for entry in workload["settings"].values())
    figure = Figure(figsize=(12 if has_losses else 7, 4.2 * len(workloads)), layout="constrained")
    axes = figure.subplots(len(workloads), 1 + has_losses, squeeze=False)
    phases = (("compute_ms", "compute", "#4c72b0"), ("waiting_ms", "waiting for the slowest", "#c44e52"),
              ("communication_ms", "exposed communication", "#dd8452"), ("data_ms", "data", "#8172b3"),
              ("optimizer_ms", "optimizer", "#55a868"))  # fmt: skip
    for (left, *others), (name, workload) in zip(axes, workloads.items(), strict=True):
        settings = workload["settings"]
        bottom = np.zeros(len(settings))
        for key, label, color in phases:
            heights = np.array([entry[key] for entry in settings.values()])
            left.bar(list(settings), heights, 0.6, bottom=bottom, label=label, color=color)
            bottom += heights
        left.axhline(workload["step_ms_allowed"], color="black", linestyle=":", label="allowed by the lengths")
        left.tick_params(axis="x", rotation=20)
        left.set(title=f"{name}, {results['ranks']} ranks: mean step", ylabel="ms")
        for right in others:
            for setting, entry in ((name, entry) for name, entry in settings.items() if name not in IDEALS):
                right.plot(entry["losses"], label=setting, linewidth=1)
            right.set(title="loss per sample", xlabel="step")
        left.set_ylim(top=1.35 * left.get_ylim()[1])  # room for the legend
        left.legend(frameon=False, fontsize=8, loc="upper right", ncols=3)
        for right in others:
            right.legend(frameon=False, fontsize=8)
        for axis in (left, *others):
            axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
