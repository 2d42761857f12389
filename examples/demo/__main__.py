"""Starts a balancer, trains on several ranks without and with it, and shows what that changed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.demo.picture import draw
from examples.demo.summary import show, summarize
from services.operations.launch import running_service

console = Console()


def demo(
    ranks: Annotated[int, typer.Option(min=2, help="Ranks to train on.")] = 4,
    steps: Annotated[int, typer.Option(min=2, help="Batches per rank.")] = 24,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per rank and batch.")] = 16,
    max_length: Annotated[int, typer.Option(min=1, help="Longest history.")] = 1024,
    short: Annotated[bool, typer.Option("--short", help="A few steps only.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the picture and the result.")] = Path("out/demo"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON instead of a table.")] = False,
) -> None:
    """Train a small sequence recommender on several ranks, balancing off and then on."""
    steps = min(steps, 12) if short else steps
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    status = Console(stderr=True) if as_json else console
    with (
        running_service("services.balancer", log_file=out / "balancer.log") as balancer,
        Progress(
            TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=status,
        ) as progress,
    ):  # fmt: skip
        status.print(f"balancer at {balancer.address}; {ranks} ranks, {steps} batches of {batch_size} histories each")
        for name, where in (("off", "off"), ("on", balancer.address)):
            task = progress.add_task(f"training, balancing {name}", total=steps)
            result = out / f"{name}.json"
            command = [
                sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
                "-m", "examples.demo.train", "--balancer", where, "--steps", str(steps),
                "--batch-size", str(batch_size), "--max-length", str(max_length), "--result", str(result),
            ]  # fmt: skip
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as training:
                assert training.stdout is not None
                for line in training.stdout:
                    with contextlib.suppress(json.JSONDecodeError):
                        progress.update(task, completed=json.loads(line)["step"])
            if training.returncode:
                raise SystemExit(f"training with balancing {name} ended with exit status {training.returncode}")
            results[name] = json.loads(result.read_text())
    summary = summarize(results)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    picture = draw(results, out / "loads.png")
    if as_json:
        print(json.dumps(summary))
    else:
        show(summary, results, console)
        console.print(f"picture: {picture}")
    if any(summary[name][count] for name in summary for count in ("lost", "doubled")):
        raise SystemExit("samples were lost or doubled")
    if summary["on"]["balanced_by_service"] == 0:
        raise SystemExit("the balancer decided no round; see " + str(out / "balancer.log"))


if __name__ == "__main__":
    typer.run(demo)
