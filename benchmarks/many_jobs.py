"""How many jobs one balancer carries, and what a job of a thousand ranks does to the small ones beside it.

    python -m benchmarks.many_jobs --json benchmarks/results/many_jobs.json --png benchmarks/results/many_jobs.png
    python -m benchmarks.many_jobs --quick

Jobs of 8 ranks go through rounds as fast as they are answered, with a stream a rank and with one stream of their node;
an echo of the same messages in the same framework takes turns with the balancer. Balancer, workers and all ranks share
this machine's cores: what a round takes of the processor's time in the balancer's process is firm, rounds a second and
times of rounds are those of this machine. The ranks speak HTTP/2 by themselves (`many_jobs_load.py`), at a fraction of
the server's time for a message. Then small jobs in steps of a quarter of a second are timed alone and beside a job of
1,024 ranks, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections import Counter
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.many_jobs_load import Fleet, Shape
from benchmarks.rendezvous import balancer_process, cpu_seconds, echo_server, percentiles, resident_bytes
from benchmarks.workers import cpu_of_all
from evenkeel.partitioning import warm_up
from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol import balancer_pb2_grpc as pb_grpc

JOBS = (1, 10, 100, 300)
PER_STREAM = (1, 8)
SMALL = Shape(name="small", count=50, per_stream=8, step=0.25)
LARGE = Shape(name="large", count=1, ranks=1024, per_stream=8, step=1.0)
FLAGS = ["--messages-per-second", "1000000"]  # else a stream is held to the rate of one that trains
_ANSWER_BYTES = 800  # to a rank


def rounds_of(port: int) -> dict[str, pb.SessionStats]:
    """What has become of each job's rounds."""
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.max_receive_message_length", -1)]) as channel:
        stub = pb_grpc.BalancerServiceStub(channel)  # type: ignore[no-untyped-call]
        reply = stub.GetSessionStats(pb.GetSessionStatsRequest(), timeout=60)
    return {one.job: one for one in reply.sessions}


def without_plan(port: int) -> dict[str, int]:
    """Rounds that had no plan, by reason."""
    found: Counter[str] = Counter()
    for stats in rounds_of(port).values():
        found.update(stats.rounds_identity)
    return dict(found)


def measure_jobs(count: int, per_stream: int, turns: int, seconds: float) -> dict[str, Any]:
    """So many jobs as fast as they are answered, in turns with the echo."""
    shape = Shape(name="job", count=count, per_stream=per_stream)
    found: dict[str, list[float]] = {name: [] for name in ("rate", "main", "all", "echo", "client", "memory", "share")}
    times: list[float] = []
    with ExitStack() as stack:
        balancer = stack.enter_context(balancer_process(FLAGS))
        echo_port, echo_pid = stack.enter_context(echo_server(_ANSWER_BYTES * per_stream))
        pid = balancer.running.pid
        jobs, echoes = Fleet([shape], balancer.port), Fleet([shape], echo_port, echo=True)
        jobs.run(min(2.0, seconds))
        for _ in range(turns):
            main, everything, ours = cpu_seconds(pid), cpu_of_all(pid), os.times()
            jobs.run(seconds)
            rounds = [time for job in jobs.jobs for _, time in job.times]
            of_jobs = [len(job.times) for job in jobs.jobs]
            per_round = 1e6 / len(rounds)
            found["rate"].append(len(rounds) / seconds)
            found["main"].append((cpu_seconds(pid) - main) * per_round)
            found["all"].append((cpu_of_all(pid) - everything) * per_round)
            found["client"].append((sum(os.times()[:2]) - sum(ours[:2])) * per_round)
            found["memory"].append(resident_bytes(pid))
            found["share"].append(min(of_jobs) * count / len(rounds))
            times += rounds
            echo = cpu_seconds(echo_pid)
            echoes.run(seconds / 2)
            found["echo"].append((cpu_seconds(echo_pid) - echo) * 1e6 / sum(len(job.times) for job in echoes.jobs))
        failures = without_plan(balancer.port)
        jobs.close()
        echoes.close()
    p50, p99 = percentiles([1e3 * time for time in times])
    middle = {name: float(np.median(values)) for name, values in found.items()}
    return {
        "jobs": count,
        "ranks_per_stream": per_stream,
        "rounds": len(times),
        "rounds_a_second": middle["rate"],
        "p50_ms": p50,
        "p99_ms": p99,
        "main_us_per_round": middle["main"],
        "main_us_per_round_least": min(found["main"]),
        "rounds_a_second_and_core": 1e6 / middle["main"],
        "workers_us_per_round": middle["all"] - middle["main"],
        "echo_us_per_round": middle["echo"],
        "client_us_per_round": middle["client"],
        "memory_bytes": [int(each) for each in found["memory"]],
        "least_share_of_a_job": middle["share"],
        "rounds_without_plan": failures,
    }


def measure_fairness(turns: int, seconds: float) -> dict[str, Any]:
    """Small jobs alone, and beside a large one that begins a round each second."""
    alone: list[float] = []
    beside: list[float] = []
    large: list[float] = []
    cpu = {"alone": 0.0, "beside": 0.0}
    with balancer_process([*FLAGS, "--partition-timeout-seconds", "30"]) as balancer:
        pid = balancer.running.pid
        small = Fleet([SMALL], balancer.port)
        small.run(2.0)
        for _ in range(turns):
            before = cpu_seconds(pid)
            small.run(seconds)
            cpu["alone"] += cpu_seconds(pid) - before
            alone += [time for job in small.jobs for _, time in job.times]
        small.close()
        both = Fleet([SMALL, LARGE], balancer.port)
        both.run(2.0)
        for _ in range(turns):
            before = cpu_seconds(pid)
            both.run(seconds)
            cpu["beside"] += cpu_seconds(pid) - before
            beside += [time for job in both.jobs[:-1] for _, time in job.times]
            large += [time for _, time in both.jobs[-1].times]
        stats = rounds_of(balancer.port)["large-0"]
        failures = without_plan(balancer.port)
        both.close()
    result: dict[str, Any] = {"small_jobs": SMALL.count, "step_seconds": SMALL.step, "large_ranks": LARGE.ranks}
    for name, values in (("alone", alone), ("beside", beside), ("large", large)):
        p50, p99 = percentiles([1e3 * value for value in values])
        result[name] = {"rounds": len(values), "p50_ms": p50, "p99_ms": p99, "most_ms": 1e3 * max(values)}
    result["rounds_without_plan"] = failures
    result["large_partition_ms"] = 1e3 * stats.last_balance.partition_seconds
    result["share_of_core"] = {name: seconds_used / (turns * seconds) for name, seconds_used in cpu.items()}
    return result


def show(rows: list[dict[str, Any]], fairness: dict[str, Any]) -> None:
    """Prints both tables."""
    console = Console(width=140)
    table = Table(title="Jobs of 8 ranks as fast as they are answered; microseconds of the processor a round")
    names = ("jobs", "a stream", "rounds/s", "p50 ms", "p99 ms", "main µs", "rounds/s and core", "workers µs",
             "echo µs", "client µs", "least job's share")  # fmt: skip
    for name in names:
        table.add_column(name, justify="right")
    keys = ("main_us_per_round", "rounds_a_second_and_core", "workers_us_per_round", "echo_us_per_round",
            "client_us_per_round")  # fmt: skip
    for row in rows:
        table.add_row(
            str(row["jobs"]), str(row["ranks_per_stream"]), f"{row['rounds_a_second']:.0f}",
            f"{row['p50_ms']:.1f}", f"{row['p99_ms']:.1f}", *(f"{row[key]:.0f}" for key in keys),
            f"{row['least_share_of_a_job']:.2f}",
        )  # fmt: skip
    console.print(table)
    table = Table(title=f"{SMALL.count} small jobs, a round each {SMALL.step:g} s, beside one of {LARGE.ranks} ranks")
    for name in ("", "rounds", "p50 ms", "p99 ms", "most ms"):
        table.add_column(name, justify="right")
    for name in ("alone", "beside", "large"):
        of = fairness[name]
        table.add_row(name, str(of["rounds"]), *(f"{of[key]:.1f}" for key in ("p50_ms", "p99_ms", "most_ms")))
    console.print(table)
    console.print(f"partition of the large job: {fairness['large_partition_ms']:.0f} ms")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Times of rounds and rounds a second and core by number of jobs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for per_stream, colour in zip(PER_STREAM, ("tab:blue", "tab:orange"), strict=True):
        of = [row for row in rows if row["ranks_per_stream"] == per_stream]
        jobs = [row["jobs"] for row in of]
        name = "a stream a rank" if per_stream == 1 else f"a stream for {per_stream} ranks"
        left.plot(jobs, [row["p50_ms"] for row in of], "o-", color=colour, label=f"{name}: median")
        left.plot(jobs, [row["p99_ms"] for row in of], "o:", color=colour, label="99 %")
        right.plot(jobs, [row["rounds_a_second_and_core"] for row in of], "o-", color=colour, label=name)
    left.set(xlabel="jobs of 8 ranks", ylabel="milliseconds of a round", xscale="log", yscale="log")
    right.set(xlabel="jobs of 8 ranks", ylabel="rounds a second and core", xscale="log", ylim=(0, None))
    for axes in (left, right):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measures and shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="of each size")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a turn")
    parser.add_argument("--jobs", type=int, nargs="+", default=JOBS, help="numbers of jobs")
    parser.add_argument("--quick", action="store_true", help="fewer jobs and turns")
    parser.add_argument("--json", type=Path, help="result file")
    parser.add_argument("--png", type=Path, help="picture")
    options = parser.parse_args()
    sizes, turns, seconds = options.jobs, options.turns, options.seconds
    if options.quick:
        sizes, turns, seconds = (1, 30), 1, 2.0
    warm_up()
    load = os.getloadavg()
    rows = [measure_jobs(count, per, turns, seconds) for per in PER_STREAM for count in sizes]
    fairness = measure_fairness(turns, 2 * seconds)
    show(rows, fairness)
    if options.json is not None:
        versions = {name: version(name) for name in ("grpcio", "numpy", "protobuf")}
        machine = {"cpus": os.cpu_count(), "load_average_at_start": load, "processor": platform.processor()}
        result = {
            "command": "python -m benchmarks.many_jobs " + " ".join(sys.argv[1:]),
            "machine": {**machine, "python": platform.python_version(), **versions},
            "jobs": rows,
            "fairness": fairness,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.png is not None:
        draw(rows, options.png)


if __name__ == "__main__":
    main()
