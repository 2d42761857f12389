"""Peers' own code beside ours, out of checkouts that you give; nothing of theirs is part of Evenkeel.

    python -m benchmarks.peers --recsys-examples PATH --json FILE

The batch shuffler of NVIDIA recsys-examples in both of its modes runs beside ours, in one loop over the same batches
with the same model, on the GPUs of this host. On CPU ranks the batches are compared, and no times are told. Decisions
alone are compared by `benchmarks.balance_gap`, planners of embedding tables by `benchmarks.placement_gpu`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.harness.results import write
from benchmarks.peers.cases import SHUFFLE_FLAGS, add_shuffle_flags

MEGABYTE = 1 << 20


def main() -> None:
    options = parse_arguments()
    try:
        found = summarize(_record(options), options.skip)
    except subprocess.CalledProcessError:
        sys.exit("peers: the ranks failed; what they said is above")
    show(found, Console(width=150))
    write(options.json, {"shuffle": found})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes, one GPU each")
    parser.add_argument("--skip", type=int, default=6, help="first steps of each block that are not counted")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each rank")
    parser.add_argument("--master-port", type=int, default=29521)
    parser.add_argument("--json", type=Path, help="where to write the results")
    add_shuffle_flags(parser)
    return parser.parse_args()


def _record(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the ranks; what they measured."""
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw.json"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.ranks),
            "--master-addr", "127.0.0.1", "--master-port", str(options.master_port),
            "-m", "benchmarks.peers.shuffle_rank", "--result", str(raw),
        ]  # fmt: skip
        for flag in SHUFFLE_FLAGS:
            value = getattr(options, flag)
            if isinstance(value, bool):
                command += [f"--{flag.replace('_', '-')}"] if value else []
            elif value is not None:
                command += [f"--{flag.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": str(options.threads)})
        recorded: dict[str, Any] = json.loads(raw.read_text())
    return recorded


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
    for heading in (
        "batches",
        "setting",
        "ms a step",
        "each turn",
        "over Evenkeel",
        "host, ms",
        "peak MB",
        "max/mean",
        "loss off by",
    ):
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
