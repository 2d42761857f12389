"""Whether balancing changes what a model learns: AUC and loss of the ranking example with and without it.

    python -m benchmarks.convergence --ranks 2 --jobs 2 --json benchmarks/results/convergence_2xh200.json
    python -m benchmarks.convergence --device cpu --quick
    python -m benchmarks.convergence --data ml-1m --json out/convergence_ml1m.json

The model of `examples.train_hstu` predicts clicks: each sample is an event of a user, its history the events before.
Each user's last event is a test, on which all ranks together compute the area under the ROC curve as training goes on.
`--data` takes a folder or file that `benchmarks.data` reads; without it clicks are drawn by a rule
(`examples/datasets/clicks.py`), so that the best possible AUC is known. The settings differ in nothing but balancing;
a seed decides about the weights at the beginning and the order of the samples, the same in all settings:

- `off`: every sample is trained where it was loaded;
- `balanced`: batches of a fixed count, balanced on the ranks;
- `window`: the same over windows of `--window` batches, in which heavy samples change their step;
- `token_budget`: batches of as many samples as a budget of tokens allows, balanced;
- `continuous`, `roundrobin`, `hash_roundrobin`: as `balanced`, the item table sharded over the ranks by each routing.

The table gives, at the end and over all seeds, AUC and log loss of the test (mean ± deviation), their difference from
`off`, and as `noise` twice the standard error of such a difference; `within` tells whether the difference is below it.
`balanced` is the share of steps in which the ranks acted on a plan, `other step` that of samples that were trained in
another step than they were loaded for. Each sample is followed: `lost` counts those that were not trained exactly as
often as loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.convergence_report import draw, show, summarize

SETTINGS = ("off", "balanced", "window", "token_budget", "continuous", "roundrobin", "hash_roundrobin")
QUICK: dict[str, Any] = {
    "users": 300, "items": 200, "max_history": 64, "width": 32, "head_dim": 16, "batch_size": 8, "evaluations": 3,
    "seeds": 2,
}  # fmt: skip


def main() -> None:
    options = parse_arguments()
    console = Console(width=190)
    if options.from_json:
        recorded = json.loads(options.from_json.read_text())
    else:
        recorded = record(options)
        recorded["command"] = "python -m benchmarks.convergence " + " ".join(sys.argv[1:])
    results = summarize(recorded)
    show(results, console)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results) + "\n")
    if options.plot:
        draw(results, options.plot)


def record(options: argparse.Namespace) -> dict[str, Any]:
    """Has the runs done by `--jobs` groups of ranks at a time; returns what they recorded."""
    runs = [f"{setting}:{seed}" for seed in range(options.seeds) for setting in options.settings]
    if not runs:
        raise SystemExit("convergence: no runs; give --seeds 1 or more")
    # Batches stay as loaded until the kernels are compiled, which would make all settings alike.
    subprocess.run([sys.executable, "-m", "trainer_client.cli", "warm-up"], check=True, stdout=subprocess.DEVNULL)
    with tempfile.TemporaryDirectory() as folder, Progress(disable=not sys.stdout.isatty()) as progress:
        bar = progress.add_task("runs", total=len(runs))
        paths = [Path(folder) / f"{job}.json" for job in range(min(options.jobs, len(runs)))]

        def work(job: int) -> None:
            mine = runs[job :: len(paths)]
            command = [
                sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}",
                "-m", "benchmarks.convergence_rank", "--result", str(paths[job]), "--runs", *mine, *passed_on(options),
            ]  # fmt: skip
            environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            for line in process.stdout:
                finished = line.startswith("finished ")
                progress.advance(bar, int(finished))
                if finished or not progress.console.is_terminal:
                    progress.console.print(line.rstrip(), highlight=False, soft_wrap=True)
            if process.wait():
                raise SystemExit(f"convergence: the ranks of {', '.join(mine)} ended with status {process.returncode}")

        with ThreadPoolExecutor(len(paths)) as pool:
            list(pool.map(work, range(len(paths))))
        parts = [json.loads(path.read_text()) for path in paths]
    done = {f"{run['setting']}:{run['seed']}": run for part in parts for run in part["runs"]}
    together: dict[str, Any] = parts[0] | {"runs": [done[run] for run in runs]}
    return together


PASSED_ON = (
    "data", "users", "items", "mean_length", "sigma", "max_history", "per_user", "batch_size", "epochs", "evaluations",
    "window", "layers", "width", "heads", "head_dim", "embedding_dim", "learning_rate", "device",
)  # fmt: skip


def passed_on(options: argparse.Namespace) -> list[str]:
    """The flags that ranks take too."""
    given = ((flag, getattr(options, flag)) for flag in PASSED_ON)
    return [text for flag, value in given if value is not None for text in (f"--{flag.replace('_', '-')}", str(value))]


def add_workload(parser: argparse.ArgumentParser) -> None:
    """The flags that ranks take too."""
    add = parser.add_argument
    add("--data", type=Path, help="MovieLens or another data set; default: drawn clicks")
    add("--users", type=int, default=4000, help="users of drawn clicks")
    add("--items", type=int, default=1000, help="catalogue of drawn clicks")
    add("--mean-length", type=float, default=60, help="mean events of a user of drawn clicks")
    add("--sigma", type=float, default=1.8, help="of the log-normal distribution of those")
    add("--max-history", type=int, default=1024, help="older events are left out")
    add("--per-user", type=int, default=12, help="events of a user that are trained, at most")
    add("--batch-size", type=int, default=16, help="samples per rank")
    add("--epochs", type=int, default=1)
    add("--evaluations", type=int, default=8, help="how often the test is made")
    add("--window", type=int, default=4, help="batches of a window in the setting `window`")
    add("--layers", type=int, default=2)
    add("--width", type=int, default=128)
    add("--heads", type=int, default=2)
    add("--head-dim", type=int, default=64)
    add("--embedding-dim", type=int, default=32)
    add("--learning-rate", type=float, default=2e-3)
    add("--device", choices=("cuda", "cpu"), help="default: GPUs if there are any")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="processes of a run")
    add("--jobs", type=int, default=1, help="runs at a time")
    add("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    add("--seeds", type=int, default=3, help="seeds of each setting")
    add("--threads", type=int, default=1, help="CPU threads of each rank")
    add("--quick", action="store_true", help="a small data set and model; other flags do not count")
    add("--json", type=Path, help="where to write the results")
    add("--plot", type=Path, help="where to draw the curves")
    add("--from-json", type=Path, help="run nothing; table and plot of what --json kept")
    add_workload(parser)
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK)
    for name in ("ranks", "jobs", "seeds", "threads", "per_user", "batch_size", "epochs", "evaluations", "window"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; use at least 1")
    return options


if __name__ == "__main__":
    main()
