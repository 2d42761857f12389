"""Starts a balancer, trains on several ranks without and with it, and shows what that changed."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch.multiprocessing
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.demo.train import Job, count_wrong, run_rank
from services.operations.launch import running_service

WARM = 2  # first steps of a run, in which ranks connect: not timed
WIDTH = 60  # of the bars

console = Console()


def demo(
    ranks: Annotated[int, typer.Option(min=2, help="Ranks to train on.")] = 4,
    steps: Annotated[int, typer.Option(min=4, help="Batches per rank.")] = 30,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per rank and batch.")] = 16,
    max_length: Annotated[int, typer.Option(min=1, help="Longest history.")] = 1024,
    short: Annotated[bool, typer.Option("--short", help="A few steps only.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the results and the balancer's log.")] = Path("out/demo"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON instead of a table.")] = False,
) -> None:
    """Train a small recommender on several ranks, balancing off and then on."""
    out.mkdir(parents=True, exist_ok=True)
    with running_service("services.balancer", log_file=out / "balancer.log") as balancer:
        job = Job(
            balancer=balancer.address, ranks=ranks, steps=min(steps, 12) if short else steps, batch_size=batch_size,
            max_length=max_length, folder=out.resolve(),
        )  # fmt: skip
        run(job, Console(stderr=True) if as_json else console)
    results = json.loads((out / "steps.json").read_text())
    summary = summarize(job, results)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    if as_json:
        print(json.dumps(summary))
    else:
        show(summary, results)
    if any(summary[name]["lost"] + summary[name]["doubled"] for name in results):
        raise SystemExit("samples were lost or doubled")


def run(job: Job, status: Console) -> None:
    """Trains on all ranks, each a process, and shows how far they are."""
    (job.folder / "ranks").unlink(missing_ok=True)
    told = torch.multiprocessing.get_context("fork").SimpleQueue()
    training = torch.multiprocessing.start_processes(  # type: ignore[attr-defined, no-untyped-call]
        run_rank, (job, told), nprocs=job.ranks, join=False, start_method="fork"
    )
    columns = TextColumn("{task.description:<15}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=status) as progress:
        status.print(f"a balancer at {job.balancer}; {job.ranks} ranks, {job.steps} batches of {job.batch_size} each")
        tasks = {name: progress.add_task(f"balancing {name}", total=job.steps) for name in ("off", "on")}
        while not training.join(0.1):
            while not told.empty():
                name, done = told.get()
                progress.update(tasks[name], completed=done)


def summarize(job: Job, results: dict[str, Any]) -> dict[str, Any]:
    """Figures of each run, and how far their losses differ at most."""
    summary: dict[str, Any] = {}
    for name, ranks in results.items():
        steps = list(zip(*ranks, strict=True))  # of each step what all ranks did
        timed = steps[WARM:]
        lost, doubled = count_wrong(job, ranks)
        summary[name] = {
            "step_ms": 1e3 * mean(step[0]["seconds"] for step in timed),
            "mean_rank_ms": 1e3 * mean(mean(rank["computing"] for rank in step) for step in timed),
            "imbalance": mean(step[0]["imbalance"] for step in timed),
            "moved_share": mean(step[0]["moved"] for step in timed),
            "served": sum(step[0]["mode"] == "service" for step in steps),
            "steps": len(steps),
            "losses": [sum(rank["loss"] for rank in step) for step in steps],
            "lost": lost,
            "doubled": doubled,
        }
    off, on = summary["off"]["losses"], summary["on"]["losses"]
    summary["largest_loss_difference"] = max(abs(one - other) for one, other in zip(off, on, strict=True))
    return summary


def show(summary: dict[str, Any], results: dict[str, Any]) -> None:
    """Prints the table, and how the ranks spend one step."""
    off, on = summary["off"], summary["on"]
    table = Table("", *(f"balancing {name}" for name in results))
    rows: list[tuple[str, list[str]]] = [
        ("a step, wall clock", [f"{run['step_ms']:.0f} ms" for run in (off, on)]),
        ("computing of the mean rank", [f"{run['mean_rank_ms']:.0f} ms" for run in (off, on)]),
        ("largest load / mean load", [f"{run['imbalance']:.3f}" for run in (off, on)]),
        ("bytes that change rank", [f"{run['moved_share']:.1%}" for run in (off, on)]),
        ("steps planned by the balancer", [f"{run['served']} of {run['steps']}" for run in (off, on)]),
        ("samples lost, trained twice", [f"{run['lost']}, {run['doubled']}" for run in (off, on)]),
        ("loss, first step", [f"{run['losses'][0]:.4f}" for run in (off, on)]),
        ("loss, last five steps", [f"{mean(run['losses'][-5:]):.4f}" for run in (off, on)]),
    ]
    for name, cells in rows:
        table.add_row(name, *cells)
    console.print(table)
    console.print(f"losses of all steps differ by {summary['largest_loss_difference']:.0e} at most", highlight=False)
    step = max(range(off["steps"] - 1), key=lambda number: results["off"][0][number]["imbalance"])
    longest = max(rank[step]["computing"] for rank in results["off"])
    for name, ranks in results.items():
        console.print(f"step {step}, balancing {name}: computing, and waiting for the slowest rank", highlight=False)
        slowest = max(rank[step]["computing"] for rank in ranks)
        for number, rank in enumerate(ranks):
            computing = round(WIDTH * rank[step]["computing"] / longest)
            waiting = round(WIDTH * slowest / longest) - computing
            console.print(f"  rank {number} {'█' * computing}{'░' * waiting}", highlight=False)
    console.print(
        f"\nA step takes {off['step_ms'] / on['step_ms']:.2f} times as long without balancing, on this machine's wall "
        "clock. Simulated: how long each rank computes (it sleeps in proportion to what its samples cost, as the ranks "
        "share a few cores). Real: data, model, gradients, the balancer, and the moves of samples between ranks."
    )


if __name__ == "__main__":
    typer.run(demo)
