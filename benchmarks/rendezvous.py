"""Time of a full round at 8 to 4096 ranks, with a plain gRPC echo of the same messages beside it in the same run.

    python -m benchmarks.rendezvous --json benchmarks/results/rendezvous.json --png benchmarks/results/rendezvous.png

A round is timed from the first rank's submission to the last rank's decision. The floor is a server in the same
framework that answers every message at once with bytes of a decision's size: it neither waits, nor reads, nor decides.
Server and ranks share this machine's cores, so the ranks' own work is part of both. Ranks that share a stream submit
arrays, as a node's leader does. The processor's time of the balancer is that of its own process; that of its workers,
in which partitions run, stands apart. The direct part feeds rounds to the state machine without sockets: the time of
all that the balancer itself does.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import grpc
import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from services.balancer.decisions import Decision
from services.balancer.effects import Answer, SessionId, StartPartition
from services.balancer.limits import Limits
from services.balancer.node_answers import node_bytes
from services.balancer.session import Session
from services.balancer.submissions import SessionKey, Terms

from benchmarks.harness.plans import make_plan, said
from benchmarks.rendezvous_load import WARM_UP_ROUNDS, Load, Timing, costs_of, draw_lengths, echo_process, rank_process
from evenkeel.partitioning import warm_up
from evenkeel.partitioning.rounds import RoundPlan
from evenkeel.partitioning.samples import RankSamples
from services.operations.launch import ServiceProcess, running_service

_SPAWN = multiprocessing.get_context("spawn")
_STARTUP_SECONDS = 300.0
_MOST_STREAMS = 1024


def balancer_process(arguments: list[str], module: str = "services.balancer") -> AbstractContextManager[ServiceProcess]:
    """A real balancer, or a module that takes the same flags."""
    return running_service(module, "--log-level", "error", *arguments)


@contextmanager
def echo_server(reply_bytes: int) -> Iterator[tuple[int, int]]:
    """The floor; yields its port and process id."""
    ports = _SPAWN.Queue()
    process = _SPAWN.Process(target=echo_process, args=(reply_bytes, ports), daemon=True)
    process.start()
    try:
        yield ports.get(timeout=_STARTUP_SECONDS), process.pid or 0
    finally:
        process.terminate()
        process.join()


def run_load(load: Load, num_processes: int, seconds: float = _STARTUP_SECONDS) -> list[Timing]:
    """Spreads the ranks over processes and lets them go through the rounds, within so many seconds."""
    streams = -(-load.world_size // load.ranks_per_stream)
    num_processes = min(num_processes, streams)
    bounds = [streams * i // num_processes * load.ranks_per_stream for i in range(num_processes)] + [load.world_size]
    barrier, results = _SPAWN.Barrier(num_processes), _SPAWN.Queue()
    processes = [
        _SPAWN.Process(target=rank_process, args=(replace(load, ranks=range(low, high)), barrier, results), daemon=True)
        for low, high in itertools.pairwise(bounds)
    ]
    for process in processes:
        process.start()
    try:
        return [results.get(timeout=seconds) for _ in processes]
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def round_times(timings: list[Timing]) -> list[float]:
    """Milliseconds from the first rank's submission to the last rank's answer, per round."""
    begins = zip(*(t.began for t in timings), strict=True)
    ends = zip(*(t.ended for t in timings), strict=True)
    return [1e3 * (max(end) - min(begin)) for begin, end in zip(begins, ends, strict=True)]


def percentiles(times: list[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    return float(np.percentile(times, 50)), float(np.percentile(times, 99))


def cpu_seconds(pid: int) -> float:
    """Time that a process has spent on all cores."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def workers_seconds(pid: int) -> float:
    """The same of a balancer's workers, as far as they still live."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
    zygotes = {child for child, parent in parents.items() if parent == pid}
    return sum(cpu_seconds(child) for child, parent in parents.items() if parent in zygotes)


def resident_bytes(pid: int) -> int:
    """Memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_sockets(load: Load, num_processes: int, arguments: list[str]) -> dict[str, Any]:
    """One size: the balancer, then the floor."""
    with balancer_process(arguments) as balancer:
        port, pid = balancer.port, balancer.running.pid
        resident, cpu, workers = resident_bytes(pid), cpu_seconds(pid), workers_seconds(pid)
        ours = run_load(replace(load, port=port), num_processes)
        cpu, workers = cpu_seconds(pid) - cpu, workers_seconds(pid) - workers
        grown = resident_bytes(pid) - resident
    balanced = sum(t.balanced for t in ours)
    if balanced != load.world_size:
        raise RuntimeError(f"{load.world_size - balanced} ranks got no plan in the last round")
    reply = statistics.mean(t.received_bytes for t in ours)
    with echo_server(round(reply * load.ranks_per_stream)) as (port, pid):
        echo_cpu = cpu_seconds(pid)
        floor = run_load(replace(load, port=port), num_processes)
        echo_cpu = cpu_seconds(pid) - echo_cpu
    p50, p99 = percentiles(round_times(ours))
    floor50, floor99 = percentiles(round_times(floor))
    return {
        "ranks": load.world_size,
        "ranks_per_stream": load.ranks_per_stream,
        "p50_ms": p50,
        "p99_ms": p99,
        "echo_p50_ms": floor50,
        "echo_p99_ms": floor99,
        "sent_bytes_per_rank": statistics.mean(t.sent_bytes for t in ours),
        "received_bytes_per_rank": reply,
        "cpu_ms_per_round": 1e3 * cpu / (load.rounds + WARM_UP_ROUNDS),
        "cpu_us_per_rank": 1e6 * cpu / (load.rounds + WARM_UP_ROUNDS) / load.world_size,
        "workers_cpu_us_per_rank": 1e6 * workers / (load.rounds + WARM_UP_ROUNDS) / load.world_size,
        "echo_cpu_us_per_rank": 1e6 * echo_cpu / (load.rounds + WARM_UP_ROUNDS) / load.world_size,
        "server_memory_growth_bytes": grown,
    }


def profile_sockets(load: Load, num_processes: int, arguments: list[str]) -> list[str]:
    """Collapsed stacks of a balancer at work, by py-spy."""
    with tempfile.TemporaryDirectory() as folder, balancer_process(arguments) as balancer:
        port, pid = balancer.port, balancer.running.pid
        output = Path(folder) / "stacks"
        command = [str(Path(sys.executable).with_name("py-spy")), "record", "--pid", str(pid), "--threads"]
        spy = subprocess.Popen(
            [*command, "--format", "raw", "--rate", "100", "--output", str(output)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        run_load(replace(load, port=port), num_processes)
        spy.send_signal(signal.SIGINT)
        spy.wait(60)
        return output.read_text().splitlines()


def summarise(stacks: list[str], top: int = 25) -> str:
    """Share of the busy samples by thread, by function itself, and by function with all that it calls."""
    waiting = ("wait (threading.py", "select (selectors.py", "run (threading.py")
    threads: Counter[str] = Counter()
    itself: Counter[str] = Counter()
    under: Counter[str] = Counter()
    for line in stacks:
        stack, _, count = line.rpartition(" ")
        frames = [frame.rsplit(":", 1)[0].rstrip(")") for frame in stack.split(";")]
        if any(name in frames[-1] for name in waiting):
            continue
        threads[stack.split(";")[0].split("): ")[-1]] += int(count)
        itself[frames[-1]] += int(count)
        for frame in set(frames):
            under[frame] += int(count)
    total = max(1, sum(threads.values()))
    lines = [f"{total} busy samples"]
    for title, counter in (("by thread", threads), ("the function itself", itself), ("with all that it calls", under)):
        lines += ["", title, *(f"{100 * n / total:5.1f} %  {name}" for name, n in counter.most_common(top))]
    return "\n".join(lines) + "\n"


def measure_direct(num_ranks: int, samples: int, fields: int, rounds: int, node_size: int, seed: int) -> dict[str, Any]:
    """Rounds fed straight to the state machine: milliseconds of each step on one core, medians."""
    terms = Terms(world_size=num_ranks, num_jagged=fields)
    session = Session(0.0, SessionId(SessionKey("direct", "", ""), "run", 0), terms, Limits())
    for rank in range(num_ranks):
        session.join(0.0, rank, f"node{rank // node_size}", terms)
    steps: dict[str, list[float]] = {"submit": [], "plan": [], "partition": [], "decide": [], "encode": []}
    nbytes = 0
    for number in range(rounds):
        submissions = []
        for first in range(0, num_ranks, node_size):
            ranks = range(first, min(first + node_size, num_ranks))
            draws = [draw_lengths(np.random.default_rng([seed, number, rank]), samples, fields) for rank in ranks]
            own = [RankSamples(costs=costs_of(lengths), lengths=lengths) for lengths in draws]
            submissions.append(said(own, *ranks))
        times = [time.thread_time()]
        effects = [
            effect
            for node, submission in enumerate(submissions)
            for effect in session.submit(float(number), number, submission, node)
        ]
        times.append(time.thread_time())
        (start,) = (effect for effect in effects if isinstance(effect, StartPartition))
        plan = make_plan(start.inputs)
        if not isinstance(plan, RoundPlan):
            raise RuntimeError(plan.detail)
        times.append(time.thread_time())
        answers = [e for e in session.partitioned(float(number), number, plan) if isinstance(e, Answer)]
        times.append(time.thread_time())
        for answer in answers:
            assert isinstance(answer.result, Decision)
            node_bytes(1, answer.round, answer.ranks, answer.result)
        times.append(time.thread_time())
        for name, (begin, end) in zip(("submit", "plan", "decide", "encode"), itertools.pairwise(times), strict=True):
            steps[name].append(1e3 * (end - begin))
        steps["partition"].append(1e3 * plan.seconds)
        nbytes = plan.nbytes
    return {
        "ranks": num_ranks,
        **{f"{name}_ms": statistics.median(times) for name, times in steps.items()},
        "plan_bytes": nbytes,
    }


def main(
    ranks: Annotated[list[int], typer.Option(help="numbers of ranks, over sockets")] = [8, 64, 256, 1024, 4096],  # noqa: B006
    direct: Annotated[list[int], typer.Option(help="numbers of ranks, without sockets")] = [8, 64, 256, 1024, 4096],  # noqa: B006
    samples: Annotated[int, typer.Option(help="samples per rank")] = 128,
    fields: Annotated[int, typer.Option(help="jagged fields")] = 4,
    rounds: Annotated[int, typer.Option(help="measured rounds; a quarter of it from 256 ranks on")] = 200,
    processes: Annotated[int, typer.Option(help="processes that the ranks live in")] = 2,
    node_size: Annotated[int, typer.Option(help="ranks per host")] = 8,
    per_stream: Annotated[
        list[int], typer.Option(help="ranks that share a stream; a stream a rank up to 1024 ranks")
    ] = [1, 8],  # noqa: B006
    seed: int = 1,
    server: Annotated[str, typer.Option(help="further flags for the balancer")] = "",
    profile: Annotated[Path | None, typer.Option(help="where the time of the largest size goes, by py-spy")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="8 and 64 ranks, fewer rounds")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="result file")] = None,
    png: Annotated[Path | None, typer.Option(help="picture")] = None,
) -> None:
    """Measures rounds over sockets and without."""
    if quick:
        ranks, direct, rounds = [8, 64], [8, 64], 40
    warm_up()
    console = Console(width=140)
    over_sockets, without = [], []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("rounds", total=len(ranks) * len(per_stream) + len(direct))
        for size, shared in itertools.product(ranks, per_stream):
            if shared == 1 and size > _MOST_STREAMS:
                continue
            few = rounds if size < 256 else max(20, rounds // 4)
            load = Load(
                port=0, ranks=range(size), world_size=size, samples=samples, fields=fields,
                rounds=few, node_size=node_size, seed=seed, ranks_per_stream=min(shared, size),
            )  # fmt: skip
            over_sockets.append(measure_sockets(load, processes, server.split()))
            if profile is not None and size == max(ranks):
                # In a run of its own: the profiler stops the process to look at it.
                stacks = profile_sockets(load, processes, server.split())
                path = profile.with_name(f"{profile.stem}_{size}x{load.ranks_per_stream}{profile.suffix}")
                path.write_text(summarise(stacks))
            progress.advance(task)
        for size in direct:
            few = max(5, min(50, 20_000 // size))
            without.append(measure_direct(size, samples, fields, few, node_size, seed))
            progress.advance(task)
    by_size = {row["ranks"]: row for row in without}
    for row in over_sockets:
        plan = by_size.get(row["ranks"], {}).get("plan_ms", 0.0)
        row["plan_ms"] = plan
        row["over_floor"] = row["p50_ms"] / (row["echo_p50_ms"] + plan)
        row["over_plan"] = row["p50_ms"] / plan if plan else 0.0
    show(console, over_sockets, without)
    result = {
        "command": "python -m benchmarks.rendezvous " + " ".join(sys.argv[1:]),
        "machine": {
            "cpus": os.cpu_count(),
            "load_average": os.getloadavg(),
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "grpcio": grpc.__version__,
            "numpy": np.__version__,
        },
        "samples_per_rank": samples,
        "fields": fields,
        "over_sockets": over_sockets,
        "without_sockets": without,
    }
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(result, indent=2) + "\n")
    if png is not None:
        draw(over_sockets, without, png)


def show(console: Console, over_sockets: list[dict[str, Any]], without: list[dict[str, Any]]) -> None:
    """Prints both tables."""
    table = Table(title="Full rounds over sockets (ms; CPU of the balancer, its workers and the echo: µs a rank)")
    for name in (
        "ranks",
        "per stream",
        "p50",
        "p99",
        "echo p50",
        "echo p99",
        "plan",
        "p50 / plan",
        "p50 / (echo + plan)",
        "CPU",
        "workers' CPU",
        "echo's CPU",
        "sent B",
        "received B",
    ):
        table.add_column(name, justify="right")
    keys = ("p50_ms", "p99_ms", "echo_p50_ms", "echo_p99_ms", "plan_ms", "over_plan", "over_floor")
    cpu = ("cpu_us_per_rank", "workers_cpu_us_per_rank", "echo_cpu_us_per_rank")
    for row in over_sockets:
        table.add_row(
            str(row["ranks"]),
            str(row["ranks_per_stream"]),
            *(f"{row[key]:.2f}" for key in keys),
            *(f"{row[key]:.0f}" for key in (*cpu, "sent_bytes_per_rank", "received_bytes_per_rank")),
        )
    console.print(table)
    table = Table(title="Rounds without sockets (ms on one core, medians)")
    for name in ("ranks", "submit", "partition + slices", "decide", "encode", "plan kept, MB"):
        table.add_column(name, justify="right")
    for row in without:
        table.add_row(
            str(row["ranks"]), *(f"{row[f'{k}_ms']:.2f}" for k in ("submit", "plan", "decide", "encode")),
            f"{row['plan_bytes'] / 1e6:.2f}",
        )  # fmt: skip
    console.print(table)


def draw(over_sockets: list[dict[str, Any]], without: list[dict[str, Any]], path: Path) -> None:
    """Plots time against ranks."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), constrained_layout=True)
    for shared in sorted(
        {row["ranks_per_stream"] for row in over_sockets if row["ranks"] == over_sockets[-1]["ranks"]}
    ):
        rows = [row for row in over_sockets if row["ranks_per_stream"] == min(shared, row["ranks"])]
        sizes, label = [row["ranks"] for row in rows], f"{shared} rank{'s' * (shared > 1)} a stream"
        (line,) = axes.loglog(sizes, [row["p50_ms"] for row in rows], "o-", label=f"round, {label}")
        axes.loglog(sizes, [row["echo_p50_ms"] for row in rows], "s:", color=line.get_color(), label=f"echo, {label}")
    direct = [row["ranks"] for row in without]
    axes.loglog(direct, [row["plan_ms"] for row in without], "^-", label="partition and slices")
    axes.set_xlabel("ranks")
    axes.set_ylabel("ms")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    typer.run(main)
