"""The whole training step with and without balancing, on the GPUs of this host (or on CPU ranks, scaled down).

    python -m benchmarks.end_to_end --ranks 8 --json benchmarks/results/end_to_end_8.json

The same model, data and seeds in every setting; settings take turns in blocks of steps, so that a host that slows down
does so for all:

- `off`: every sample is trained where it was loaded;
- `embedded`, `grpc`: planned by rank 0, and by a balancer service, by FLOPs;
- `window`: as `embedded`, over windows of `--window` batches;
- `fitted`: as `embedded`, by costs that are fitted to the clock in the first steps.

Columns beside median, 99th percentile and mean of the step in ms: `speed-up` over `off`; `load` and `compute`, max/mean
over ranks of the FLOPs and of the measured compute time; `exposed` is how much longer a step waits for its batch than
with `off`, which loads and copies the same, and `agreement` the part of it in which the training thread waited for the
ranks' agreement. `loss` is the largest deviation of the first ten steps' losses from `off`, `mean loss` that of the
mean over all steps; windows train samples in other steps, so only the second counts there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.end_to_end_report import show, summarize
from benchmarks.harness.results import write
from examples.datasets import DISTRIBUTIONS
from services.operations.launch import running_service

SETTINGS = ("off", "embedded", "grpc", "window", "fitted")


def main() -> None:
    options = parse_arguments()
    results = summarize(record(options), skip=options.skip)
    show(results, Console(width=190))
    write(options.json, results)


def record(options: argparse.Namespace) -> Any:
    """Runs the ranks, and the balancer if a setting needs it; returns what they measured."""
    with contextlib.ExitStack() as stack:
        options.balancer = None
        if "grpc" in options.settings:
            options.balancer = stack.enter_context(running_service("services.balancer")).address
        return measured_by("benchmarks.end_to_end_rank", options)


def measured_by(module: str, options: argparse.Namespace) -> Any:
    """Runs a module on as many ranks as the options say; returns what their first one wrote.

    Each rank is given a folder, with the options in `options.json`, and `raw.json` is to be written there.
    """
    with tempfile.TemporaryDirectory() as folder:
        told = {name: value for name, value in vars(options).items() if name != "json"}
        Path(folder, "options.json").write_text(json.dumps(told, default=str))
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks),
            "-m", module, folder,
        ]  # fmt: skip
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "2"})
        return json.loads(Path(folder, "raw.json").read_text())


def add_workload(parser: argparse.ArgumentParser, settings: Sequence[str]) -> None:
    """The flags of what is trained."""
    parser.add_argument("--settings", nargs="+", choices=settings, default=list(settings))
    parser.add_argument("--lengths", "--cases", nargs="+", choices=DISTRIBUTIONS, default=["zipf"])
    parser.add_argument("--steps", type=int, default=120, help="steps of each setting")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank")
    parser.add_argument("--max-length", type=int, default=4096, help="longest sequence")
    parser.add_argument("--mean", type=float, default=None, help="mean length of normal and lognormal")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=256)
    parser.add_argument("--items", type=int, default=100_000, help="size of the catalogue")
    parser.add_argument("--window", type=int, default=4, help="batches of a window in the setting `window`")
    parser.add_argument("--warm-up", type=int, help="batches trained before time counts; default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: GPUs if there are any")
    parser.add_argument("--seed", type=int, default=0)


def add_ranks(parser: argparse.ArgumentParser, skip: int) -> None:
    """The flags of ranks that run several settings."""
    parser.add_argument("--ranks", type=int, default=2, help="processes, one GPU each")
    parser.add_argument("--blocks", type=int, default=3, help="turns in which each setting runs its steps")
    parser.add_argument("--skip", type=int, default=skip, help="first steps of each block that are not counted")
    parser.add_argument("--json", type=Path, help="where to write the results")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload(parser, SETTINGS)
    add_ranks(parser, skip=10)
    return parser.parse_args()


if __name__ == "__main__":
    main()
