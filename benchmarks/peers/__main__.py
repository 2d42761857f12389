"""Peers' own code beside ours, out of checkouts that you give; nothing of theirs is part of Evenkeel.

    python -m benchmarks.peers --recsys-examples PATH --json FILE

The batch shuffler of NVIDIA recsys-examples in both of its modes runs beside ours, in one loop over the same batches
with the same model, on the GPUs of this host. On CPU ranks the batches are compared, and no times are told. Decisions
alone are compared by `benchmarks.balance_gap`, planners of embedding tables by `benchmarks.placement_gpu`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.end_to_end import add_ranks, add_workload, measured_by
from benchmarks.harness.results import write

MEGABYTE = 1 << 20
SETTINGS = ("off", "theirs_all_gather", "theirs_all_to_all", "evenkeel", "evenkeel_window", "evenkeel_drop_in")


def main() -> None:
    options = parse_arguments()
    try:
        found = summarize(measured_by("benchmarks.peers.shuffle_rank", options), options.skip)
    except subprocess.CalledProcessError:
        sys.exit("peers: the ranks failed; what they said is above")
    show(found, Console(width=150))
    write(options.json, {"shuffle": found})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recsys-examples", type=Path, required=True, help="checkout of NVIDIA recsys-examples")
    add_workload(parser, SETTINGS)
    add_ranks(parser, skip=6)
    parser.set_defaults(lengths=["equal", "lognormal", "zipf"], warm_up=8, mean=1000.0)
    return parser.parse_args()


def summarize(recorded: dict[str, Any], skip: int) -> dict[str, Any]:
    """What is told of each setting of each case.

    Args:
        recorded: What the ranks measured.
        skip: First steps of each block that do not count.
    """
    timed = recorded["device"] != "CPU"
    cases = []
    for case in recorded["cases"]:
        off = case["settings"].get("off")
        rows = {}
        for setting, raw in case["settings"].items():
            blocks = np.array([[block[skip:] for block in rank] for rank in raw["steps_ms"]])  # (ranks, blocks, steps)
            means = blocks.max(axis=0).mean(axis=1)
            loads = np.array(raw["loads"]).reshape(len(raw["loads"]), -1)
            row: dict[str, Any] = {"max_over_mean": float((loads.max(axis=0) / loads.mean(axis=0)).mean())}
            if timed:
                row |= {
                    "mean_ms": float(means.mean()),
                    "block_means_ms": means.tolist(),
                    "host_ms": float(np.median(np.array(raw["host_ms"]), axis=1).max()),
                    "peak_bytes": max(raw["peak_bytes"]),
                }
            if off is not None:
                row["loss_deviation"] = _deviation(raw["losses"], off["losses"])
            rows[setting] = row
        if timed:
            base = rows.get("evenkeel", {}).get("mean_ms")
            for row in rows.values():
                row["over_evenkeel"] = None if base is None else row["mean_ms"] / base
        cases.append({"case": case["case"], "seconds": case["seconds"], "settings": rows})
    kept = {key: recorded[key] for key in ("peer", "device", "ranks", "options")}
    return {**kept, "skipped_steps": skip, "cases": cases}


def _deviation(losses: list[list[float]], off: list[list[float]]) -> float:
    """Of the loss over all ranks, averaged over all steps: all settings train the same samples."""
    ours, unbalanced = (np.array(values).sum(axis=0).mean() for values in (losses, off))
    return float(abs(ours - unbalanced) / unbalanced)


def show(found: dict[str, Any], console: Console) -> None:
    """A table of all rows."""
    peer = found["peer"]
    table = Table(
        title=f"{found['ranks']} × {found['device']}; theirs: {peer['name']} at {peer['commit']}, {peer['compiled']}"
    )
    timed = ("ms a step", "each turn", "over Evenkeel", "host, ms", "peak MB")
    for heading in ("batches", "setting", *timed, "max/mean", "loss off by"):
        table.add_column(heading, justify="left" if heading in ("batches", "setting") else "right")
    for case in found["cases"]:
        for index, (setting, row) in enumerate(case["settings"].items()):
            times = ["", "", "", "", ""]
            if "mean_ms" in row:
                ratio = row["over_evenkeel"]
                times = [
                    f"{row['mean_ms']:.2f}", " ".join(f"{value:.1f}" for value in row["block_means_ms"]),
                    "" if ratio is None else f"{ratio:.3f}", f"{row['host_ms']:.2f}",
                    f"{row['peak_bytes'] / MEGABYTE:.0f}",
                ]  # fmt: skip
            deviation = row.get("loss_deviation")
            table.add_row(
                "" if index else case["case"], setting, *times, f"{row['max_over_mean']:.4f}",
                "" if deviation is None else f"{deviation:.1e}",
            )  # fmt: skip
        table.add_section()
    console.print(table)


if __name__ == "__main__":
    main()
