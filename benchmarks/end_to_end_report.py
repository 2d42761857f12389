"""Figures and table of the end-to-end benchmark."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from trainer_client.observing.measurement import Breakdown

STALL = 3.0  # times the median step

COLUMNS = (
    ("median", "step_ms_median", "{:.2f}"), ("p99", "step_ms_p99", "{:.2f}"), ("mean", "step_ms_mean", "{:.2f}"),
    ("speed-up", "speedup", "{:.3f}"), ("TFLOP/s", "tflops_per_rank", "{:.4g}"), ("load", "cost_imbalance", "{:.3f}"),
    ("compute", "compute_imbalance", "{:.3f}"), ("exposed", "exposed_ms", "{:.2f}"),
    ("agreement", "exposed_agreement_ms_per_step", "{:.2f}"), ("waiting", "waiting_ms", "{:.2f}"),
    ("moved", "moved_share", "{:.0%}"), ("GiB", "peak_gib", "{:.1f}"), ("loss", "loss_deviation", "{:.1e}"),
    ("mean loss", "loss_deviation_of_mean", "{:.1e}"),
)  # fmt: skip


def summarize(raw: dict[str, Any], *, skip: int) -> dict[str, Any]:
    """From what the ranks recorded to figures.

    Args:
        raw: What `benchmarks.end_to_end_rank` wrote.
        skip: First steps of each block to leave out.
    """
    workloads = {name: _summarize(workload, raw["ranks"], skip) for name, workload in raw["workloads"].items()}
    return raw | {"skipped_steps": skip, "workloads": workloads}


def _summarize(workload: dict[str, Any], ranks: int, skip: int) -> dict[str, Any]:
    settings = workload["settings"]
    steps = min(len(setting["times"][0]) for setting in settings.values())
    block = workload.get("block_steps", steps)
    counted = np.arange(steps)
    counted = counted[counted % block >= (skip if block > skip else 0)]
    times = {name: np.array([rank[:steps] for rank in setting["times"]]) for name, setting in settings.items()}
    stalled = {name: _stalls(table, counted) for name, table in times.items()}
    # A step that stalled in one setting is left out of all, so that all are compared on the same batches.
    chosen = np.setdiff1d(counted, np.concatenate(list(stalled.values())))
    found = {}
    off = Breakdown.of(times["off"][:, chosen]) if "off" in times else None
    for name, setting in settings.items():
        breakdown = Breakdown.of(times[name][:, chosen])
        flops = np.array(setting["flops"])[:, chosen]
        entry = breakdown.summary() | {
            "tflops_per_rank": float(flops.sum(axis=0).mean() / ranks / breakdown.step.mean() / 1e9),
            "cost_imbalance": float(np.array(setting["imbalance"])[chosen].mean()),
            "moved_share": float(np.array(setting["moved_share"])[chosen].mean()),
            "peak_gib": max(setting["peak_bytes"]) / 2**30,
            "stalled_steps": stalled[name].tolist(),
            "step_ms": breakdown.step.round(3).tolist(),
        }
        entry |= {name: setting[name] for name in ("modes", "compilations", "cost_fit") if name in setting}
        if off is not None:
            entry["speedup"] = float(off.step.mean() / breakdown.step.mean())
        if off is not None and "losses" in setting:
            entry["exposed_ms"] = entry["data_ms"] - off.summary()["data_ms"]
            entry["exposed_agreement_ms_per_step"] = 1e3 * max(setting["exposed_seconds"]) / len(setting["times"][0])
            losses, reference = (np.array(one["losses"]) for one in (setting, settings["off"]))
            entry["loss_deviation"] = float(np.abs(losses[:10] / reference[:10] - 1).max())
            entry["loss_deviation_of_mean"] = float(abs(losses.mean() / reference.mean() - 1))
        found[name] = entry
    return {"settings": found}


def _stalls(times: NDArray[np.float64], counted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Counted steps of several times the median: kernels that were compiled for a new size, or the machine itself.

    Args:
        times: (ranks, steps, phases) milliseconds.
        counted: Steps to look at.
    """
    longest = times.sum(axis=2).max(axis=0)
    stalls: NDArray[np.int64] = counted[longest[counted] > STALL * np.median(longest[counted])]
    return stalls


def show(results: dict[str, Any], console: Console) -> None:
    """Prints a table per workload."""
    for name, workload in results["workloads"].items():
        settings = workload["settings"]
        columns = [column for column in COLUMNS if any(column[1] in entry for entry in settings.values())]
        heads = ("setting", *(title for title, _, _ in columns))
        table = Table(*heads, title=f"{results['ranks']} × {results['device']}, {name} lengths")
        for setting, entry in settings.items():
            table.add_row(setting, *(form.format(entry[key]) if key in entry else "" for _, key, form in columns))
        console.print(table)
        for setting, entry in settings.items():
            if "cost_fit" in entry or entry["stalled_steps"]:
                told = {"fit": entry.get("cost_fit"), "left out in all settings": entry["stalled_steps"]}
                console.print(f"{setting}: {told}", highlight=False)
