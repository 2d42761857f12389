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
from examples.hstu.attention import KERNELS
from services.operations.launch import running_service

SETTINGS = ("off", "embedded", "grpc", "window", "fitted")


def main() -> None:
    options = parse_arguments()
    console = Console(width=190)
    results = summarize(record(options, console), skip=options.skip)
    show(results, console)
    write(options.json, results)


def record(options: argparse.Namespace, console: Console) -> Any:
    """Runs the ranks, and the balancer if a setting needs it; returns what they measured."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        address = ""
        if "grpc" in options.settings:
            address = stack.enter_context(running_service("services.balancer")).address
        raw = Path(folder) / "raw.json"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.ranks),
            "--master-addr", "127.0.0.1", "--master-port", str(options.master_port),
            "-m", "benchmarks.end_to_end_rank", "--result", str(raw), "--balancer", address,
        ]  # fmt: skip
        for flag in PASSED_ON:
            value = getattr(options, flag)
            if isinstance(value, bool):
                command += [f"--{flag.replace('_', '-')}"] if value else []
            elif value is not None:
                command += [f"--{flag.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
        console.print(" ".join(command[1:]), highlight=False)
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": str(options.threads)})
        return json.loads(raw.read_text())


PASSED_ON = (
    "settings", "lengths", "steps", "batch_size", "max_length", "mean", "layers", "width", "heads", "head_dim",
    "items", "kernel", "no_compile", "device", "seed", "window", "warm_up", "blocks",
)  # fmt: skip


def add_workload(parser: argparse.ArgumentParser, settings: Sequence[str] = SETTINGS) -> None:
    """The flags that ranks take too."""
    parser.add_argument("--settings", nargs="+", choices=settings, default=list(settings))
    parser.add_argument("--lengths", nargs="+", choices=DISTRIBUTIONS, default=["zipf"])
    parser.add_argument("--steps", type=int, default=120, help="steps of each setting")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank")
    parser.add_argument("--max-length", type=int, default=4096, help="longest sequence")
    parser.add_argument("--mean", type=float, default=None, help="mean length of normal and lognormal")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=256)
    parser.add_argument("--items", type=int, default=100_000, help="size of the catalogue")
    parser.add_argument("--kernel", choices=KERNELS, default="auto", help="of the attention")
    parser.add_argument("--window", type=int, default=4, help="batches of a window in the setting `window`")
    parser.add_argument("--warm-up", type=int, help="batches trained before time counts; default: all")
    parser.add_argument("--no-compile", action="store_true", help="do not compile the layers")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: GPUs if there are any")
    parser.add_argument("--seed", type=int, default=0)


def add_blocks(parser: argparse.ArgumentParser) -> None:
    """The flag of ranks that run several settings."""
    parser.add_argument("--blocks", type=int, default=3, help="turns in which each setting runs its steps")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes, one GPU each")
    add_workload(parser)
    add_blocks(parser)
    parser.add_argument("--skip", type=int, default=10, help="first steps of each block that are not counted")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each rank")
    parser.add_argument("--master-port", type=int, default=29511)
    parser.add_argument("--json", type=Path, help="where to write the results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
