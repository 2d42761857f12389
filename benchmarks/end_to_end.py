"""The whole training step with and without balancing, on the GPUs of this host (or on CPU ranks, scaled down).

    python -m benchmarks.end_to_end --ranks 8 --json benchmarks/results/end_to_end_8.json

The same model, data and seeds in every setting; settings take turns in blocks of steps, so that a host that slows down
does so for all:

- `off`: every sample is trained where it was loaded;
- `kk_all_gather`: Karmarkar-Karp with equal counts after all-gathering the batch, by a stand-in of ours that waits for
  the device; `benchmarks.peers` runs a peer's own code instead;
- `embedded`, `grpc`: minimal_move on the ranks, and by a balancer service, by FLOPs;
- `window`: as `embedded`, over windows of `--window` batches;
- `embedded_fitted`, `grpc_fitted`: the same by costs that are fitted to the clock in the first steps;
- `ideal`: batches of the same work in which all ranks have the same lengths; nothing needs to be balanced or moved;
- `fixed`: all samples of all steps have the same length, that of the mean work.

Columns beside median, 99th percentile and mean of the step in ms: `gain` over `off`; `of FLOPs` and `of time`, the
share reached of what the lengths of single batches allow: by FLOPs, the load off over the lower bound; by time, with
the part of a step that does not depend on lengths measured and the rest balanced to its own lower bound. `of ideal` is
the step of `ideal` over this one, `of fixed` this TFLOP/s over that of `fixed`: what is missing to 100 % is what the
lengths cost after balancing. `FLOPs` and `spread` are max/mean over ranks of the FLOPs trained and of the measured
compute time. `exposed` is how much longer a step waits for its batch than with `off`, which loads and copies the same,
in ms and as a share of the step; `agree` the part of it in which the training thread waited for an agreement. `loss` is
the largest deviation of the first ten steps' losses from `off`, `mean loss` that of the mean over all steps; windows
train samples in other steps, so only the second counts there.
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

from benchmarks.end_to_end_ideal import IDEALS
from benchmarks.end_to_end_report import draw, show, summarize
from benchmarks.harness.results import write
from examples.datasets import DISTRIBUTIONS
from examples.hstu.attention import KERNELS
from services.operations.launch import running_service

SETTINGS = ("off", "kk_all_gather", "embedded", "grpc", "window", "embedded_fitted", "grpc_fitted", *IDEALS)


def main() -> None:
    options = parse_arguments()
    console = Console(width=210)
    recorded = json.loads(options.from_raw.read_text()) if options.from_raw else record(options, console)
    results = summarize(recorded, skip=options.skip)
    show(results, console)
    if options.json:
        write(options.json, results)
        try:
            draw(results, options.json.with_suffix(".png"))
        except ModuleNotFoundError as error:
            console.print(f"no plot: {error}")


def record(options: argparse.Namespace, console: Console) -> Any:
    """Runs the ranks, and the balancer if a setting needs it; returns what they measured."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        address = ""
        if any(setting.startswith("grpc") for setting in options.settings):
            address = stack.enter_context(running_service("services.balancer")).address
        raw = (options.raw or Path(folder) / "raw.json").absolute()
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
        recorded = json.loads(raw.read_text())
    recorded["command"] = "python -m benchmarks.end_to_end " + " ".join(sys.argv[1:])
    return recorded


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
    parser.add_argument("--raw", type=Path, help="where to keep what every rank measured")
    parser.add_argument("--from-raw", type=Path, help="run nothing; figures from what --raw kept")
    parser.add_argument("--json", type=Path, help="where to write the results; the plot goes beside")
    return parser.parse_args()


if __name__ == "__main__":
    main()
