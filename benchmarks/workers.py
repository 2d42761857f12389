"""What it costs to compute plans in processes of their own: rounds of two balancers that take turns in one run.

    python -m benchmarks.workers --json benchmarks/results/workers.json

One is the balancer as it is. The other computes its plans in threads of its own process, where a crash would end the
service. A round is timed from the first rank's submission to the last rank's decision.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.rendezvous import balancer_process, cpu_seconds, percentiles, round_times, run_load
from benchmarks.rendezvous_load import Load
from evenkeel.partitioning import warm_up

CASES = (
    (8, 128, 1, 150),
    (64, 128, 8, 100),
    (1024, 256, 8, 20),
)  # ranks, samples a rank, ranks a stream, rounds a turn
FLAGS = ["--partition-timeout-seconds", "60"]  # on a machine that does other things too, no round is given up
MODULES = {"processes": "services.balancer", "threads": "benchmarks.workers_server"}


def children_of(pid: int) -> list[int]:
    """Process ids of all that descend from a process."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            child = int(stat.parent.name)
            found += [child, *children_of(child)]
    return found


def cpu_of_all(pid: int) -> float:
    """Seconds that a process and all that descend from it have spent on all cores; those that have ended do not."""
    seconds = cpu_seconds(pid)
    for child in children_of(pid):
        with suppress(OSError):
            seconds += cpu_seconds(child)
    return seconds


def shared_memory(pid: int) -> tuple[int, int]:
    """Proportional set size of a process in bytes, and what of it is its own."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    sizes = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines()[1:]}
    return sizes["Pss"] << 10, (sizes["Private_Clean"] + sizes["Private_Dirty"]) << 10


def measure(load: Load, turns: int, processes: int, done: Callable[[], None]) -> dict[str, Any]:
    """One size: turns of both."""
    times: dict[str, list[float]] = {name: [] for name in MODULES}
    cpu = dict.fromkeys(MODULES, 0.0)
    with ExitStack() as stack:
        servers = {name: stack.enter_context(balancer_process(FLAGS, module)) for name, module in MODULES.items()}
        for turn in range(turns):
            order = list(servers.items()) if turn % 2 else list(servers.items())[::-1]
            for name, server in order:
                port, pid = server.port, server.running.pid
                before = cpu_of_all(pid)
                timings = run_load(replace(load, port=port, job=f"turn{turn}"), processes)
                if sum(timing.balanced for timing in timings) != load.world_size:
                    raise RuntimeError(f"{name}: not all ranks got a plan in the last round")
                times[name] += round_times(timings)
                cpu[name] += cpu_of_all(pid) - before
                done()
        pid = servers["processes"].running.pid
        memory = [shared_memory(each) for each in children_of(pid)]
    rounds = turns * load.rounds
    row: dict[str, Any] = {"ranks": load.world_size, "samples_per_rank": load.samples, "rounds": rounds}
    for name, of_rounds in times.items():
        p50, p99 = percentiles(of_rounds)
        row[name] = {"p50_ms": p50, "p99_ms": p99, "mean_ms": float(np.mean(of_rounds)),
                     "cpu_ms_per_round": 1e3 * cpu[name] / rounds}  # fmt: skip
    for figure in ("p50", "p99", "mean"):
        row[f"{figure}_ratio"] = row["processes"][f"{figure}_ms"] / row["threads"][f"{figure}_ms"]
    row["workers_memory_bytes"] = {
        "proportional": sum(each for each, _ in memory),
        "own": sum(own for _, own in memory),
    }
    return row


def measure_recovery(deaths: int) -> dict[str, Any]:
    """Seconds from the death of a worker to the next one's start."""
    seconds = []
    with balancer_process([], MODULES["processes"]) as balancer:
        pid = balancer.running.pid
        for _ in range(deaths):
            zygote = children_of(pid)[0]
            workers = children_of(zygote)
            victim = workers[0]
            began = time.perf_counter()
            os.kill(victim, signal.SIGKILL)
            while len(set(children_of(zygote)) - {victim}) < len(workers):
                time.sleep(0.001)
            seconds.append(time.perf_counter() - began)
            time.sleep(1.2)  # what dies as soon as it was forked is replaced more slowly
    return {"deaths": deaths, "median_ms": 1e3 * float(np.median(seconds)), "most_ms": 1e3 * max(seconds)}


def main(
    turns: Annotated[int, typer.Option(help="turns of each balancer")] = 8,
    processes: Annotated[int, typer.Option(help="processes that the ranks live in")] = 1,
    fields: Annotated[int, typer.Option(help="jagged fields")] = 4,
    deaths: Annotated[int, typer.Option(help="workers to kill")] = 10,
    share: Annotated[float, typer.Option(help="of the rounds, for a quick look")] = 1.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="result file")] = None,
) -> None:
    """Measures rounds with worker processes and with threads."""
    warm_up()
    console = Console()
    rows: list[dict[str, Any]] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("turns", total=2 * turns * len(CASES))
        for ranks, samples, per_stream, rounds in CASES:
            load = Load(
                port=0, ranks=range(ranks), world_size=ranks, samples=samples, fields=fields,
                rounds=max(5, round(share * rounds)), node_size=8, seed=1, ranks_per_stream=per_stream,
            )  # fmt: skip
            rows.append(measure(load, turns, processes, lambda: progress.advance(task)))
            console.print(rows[-1])
    recovery = measure_recovery(deaths)
    table = Table(title="Rounds with worker processes beside threads (ms)")
    for name in ("ranks", "samples", "p50", "threads", "ratio", "p99", "threads", "ratio", "CPU", "threads"):
        table.add_column(name, justify="right")
    for row in rows:
        ours, theirs = row["processes"], row["threads"]
        table.add_row(
            str(row["ranks"]), str(row["samples_per_rank"]),
            *(f"{value:.2f}" for figure in ("p50", "p99")
              for value in (ours[f"{figure}_ms"], theirs[f"{figure}_ms"], row[f"{figure}_ratio"])),
            f"{ours['cpu_ms_per_round']:.2f}", f"{theirs['cpu_ms_per_round']:.2f}",
        )  # fmt: skip
    console.print(table)
    console.print(f"a new worker after {recovery['median_ms']:.1f} ms, {recovery['most_ms']:.1f} at most")
    if json_path is not None:
        machine = {"cpus": os.cpu_count(), "load_average": os.getloadavg(), "python": platform.python_version()}
        command = "python -m benchmarks.workers " + " ".join(sys.argv[1:])
        result = {"command": command, "machine": machine, "rounds": rows, "recovery": recovery}
        json_path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
