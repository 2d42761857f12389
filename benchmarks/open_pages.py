"""What open pages of the balancer cost its rounds.

    python -m benchmarks.open_pages --json benchmarks/results/open_pages.json

One job goes through rounds without a pause while pages are opened and closed in turns: none, some that read all that
they are told, some that read nothing. A turn with pages is compared with the turns without any beside it; the table
tells the median over all such pairs, and their spread. Beside it: what the balancer's memory of the last rounds takes
of a round, by itself, on one core.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import socket
import statistics
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.harness.plans import make_plan
from benchmarks.rendezvous import balancer_process, run_load
from benchmarks.rendezvous_load import Load, Timing, costs_of, draw_lengths
from evenkeel.partitioning.rounds import RoundOptions, RoundPlan
from evenkeel.partitioning.samples import RankSamples
from services.balancer.decisions import balanced
from services.balancer.effects import Decided, PlanInput, SessionId
from services.balancer.history import History
from services.balancer.submissions import SessionKey, Submission

JOB = "watched"
VIEWS = ("/v1/events", f"/v1/events?job={JOB}&group=&loader=")
SETTLE_SECONDS = 0.5


def open_pages(port: int, count: int, reads: bool, ready: Any, stop: Any) -> None:
    """A process with open pages, half of them of all jobs, half of one."""
    pages = []
    for number in range(count):
        page = socket.create_connection(("127.0.0.1", port))
        page.sendall(f"GET {VIEWS[number % 2]} HTTP/1.0\r\n\r\n".encode())
        pages.append(page)
    ready.set()
    told = 0
    if reads:
        for page in pages:
            page.setblocking(False)
    while not stop.wait(0.1):
        for page in pages if reads else ():
            try:
                while data := page.recv(1 << 20):
                    told += len(data)
            except BlockingIOError:
                pass
    if reads:
        print(f"{count} pages were told {told / 1e6:.1f} MB")


class Turns:
    """Opens pages in turns beside the job, and notes when."""

    def __init__(self, port: int, pages: int, seconds: float) -> None:
        self.port, self.pages, self.seconds = port, pages, seconds
        self.spans: list[tuple[str, float, float]] = []
        self._context = multiprocessing.get_context("spawn")

    def run(self, rounds: int) -> None:
        """So many turns of each kind, one without pages before and after each."""
        for _ in range(rounds):
            for kind in ("none", "reading", "none", "idle"):
                self._turn(kind)
        self._turn("none")

    def _turn(self, kind: str) -> None:
        ready, stop = self._context.Event(), self._context.Event()
        process = None
        if kind != "none":
            process = self._context.Process(
                target=open_pages, args=(self.port, self.pages, kind == "reading", ready, stop), daemon=True
            )
            process.start()
            ready.wait(120)
        time.sleep(SETTLE_SECONDS)
        began = time.monotonic()
        time.sleep(self.seconds)
        self.spans.append((kind, began, time.monotonic()))
        if process is not None:
            stop.set()
            process.join(30)


def by_turn(timings: list[Timing], spans: list[tuple[str, float, float]]) -> list[tuple[str, float, float, int]]:
    """Median and 99th percentile of the rounds of each turn, in milliseconds, and how many there were."""
    begins = np.min([timing.began for timing in timings], axis=0)
    ends = np.max([timing.ended for timing in timings], axis=0)
    found = []
    for kind, first, last in spans:
        inside = 1e3 * (ends - begins)[(begins >= first) & (ends <= last)]
        if inside.size:
            found.append((kind, float(np.percentile(inside, 50)), float(np.percentile(inside, 99)), int(inside.size)))
    return found


def against_none(turns: list[tuple[str, float, float, int]], kind: str, at: int) -> list[float]:
    """Each turn's figure over the mean of those without pages before and after it."""
    ratios = []
    for place in range(1, len(turns) - 1):
        before, own, after = turns[place - 1 : place + 2]
        if own[0] == kind and before[0] == after[0] == "none":
            ratios.append(float(own[at]) / ((float(before[at]) + float(after[at])) / 2))
    return ratios


def history_seconds(ranks: int, samples: int) -> float:
    """Seconds that the memory of rounds takes of one round, on one core."""
    draws = [draw_lengths(np.random.default_rng([1, rank]), samples, 4) for rank in range(ranks)]
    parts = tuple(Submission(samples=RankSamples(costs=costs_of(own), lengths=own)) for own in draws)
    plan = make_plan(PlanInput(submissions=parts, options=RoundOptions(), nodes=("",) * ranks))
    assert isinstance(plan, RoundPlan)
    history = History(ranks)
    session = SessionId(SessionKey(JOB, "", ""), "run", 0)
    rounds = 2000
    began = time.thread_time()
    for number in range(rounds):
        for rank in range(ranks):
            history.arrived(number * 0.002, number, rank)
        history.decided(number * 0.002, 1e9, Decided(session, number, balanced(plan), 0.001))
    return (time.thread_time() - began) / rounds


def main(
    ranks: Annotated[int, typer.Option(help="Of the job.")] = 8,
    samples: Annotated[int, typer.Option(help="Per rank and round.")] = 128,
    pages: Annotated[int, typer.Option(help="Open at a time.")] = 50,
    seconds: Annotated[float, typer.Option(help="Of a turn.")] = 3.0,
    turns: Annotated[int, typer.Option(help="Of each kind.")] = 6,
    quick: Annotated[bool, typer.Option("--quick", help="Two short turns of each kind.")] = False,
    output: Annotated[Path | None, typer.Option("--json", help="Where the figures go.")] = None,
) -> None:
    """Measures, and prints the ratios."""
    seconds, turns = (1.0, 2) if quick else (seconds, turns)
    load = Load(port=0, ranks=range(ranks), world_size=ranks, samples=samples, fields=4, rounds=1, node_size=8, seed=1,
                job=JOB)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder) / "port"
        flags = ["--port", "0", "--metrics-port", "0", "--metrics-port-file", str(port_file)]
        with balancer_process(flags) as balancer:
            found = measure(load, balancer.port, int(port_file.read_text()), pages, seconds, turns)
    measured = by_turn(*found)
    table = Table("pages", "p50 ms", "p99 ms", "p50 over none", "p99 over none", "spread of p50")
    figures: dict[str, Any] = {}
    for kind in ("none", "reading", "idle"):
        own = [turn for turn in measured if turn[0] == kind]
        p50, p99 = (statistics.median(float(turn[at]) for turn in own) for at in (1, 2))
        ratios = [against_none(measured, kind, at) for at in (1, 2)]
        over = [statistics.median(one) if one else 1.0 for one in ratios]
        spread = [min(ratios[0]), max(ratios[0])] if ratios[0] else [1.0, 1.0]
        figures[kind] = {"p50_ms": p50, "p99_ms": p99, "p50_over_none": over[0], "p99_over_none": over[1],
                         "p50_spread": spread, "rounds": sum(turn[3] for turn in own)}  # fmt: skip
        named = {"none": "none", "reading": f"{pages} that read", "idle": f"{pages} that do not"}[kind]
        table.add_row(named, f"{p50:.3f}", f"{p99:.3f}", f"{over[0]:.3f}", f"{over[1]:.3f}",
                      f"{spread[0]:.3f} to {spread[1]:.3f}")  # fmt: skip
    Console().print(table)
    share = {count: history_seconds(count, samples) for count in (ranks, 64, 1024)}
    for count, spent in share.items():
        Console().print(f"memory of a round of {count} ranks: {1e6 * spent:.1f} µs")
    if output is not None:
        machine = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count(),
                   "python": platform.python_version()}  # fmt: skip
        content = {**machine, "ranks": ranks, "samples": samples, "pages": pages, "seconds": seconds, "turns": measured,
                   "kinds": figures, "history_seconds_per_round": share}  # fmt: skip
        output.write_text(json.dumps(content, indent=1) + "\n")


def measure(
    load: Load, port: int, metrics_port: int, pages: int, seconds: float, turns: int
) -> tuple[list[Timing], list[tuple[str, float, float]]]:
    """Runs the job beside the turns; its timings, and when each turn was."""
    began = time.monotonic()
    run_load(replace(load, port=port, rounds=500, job="beforehand"), 1)
    each = (time.monotonic() - began) / 500
    planned = (4 * turns + 1) * (seconds + SETTLE_SECONDS + 2.0)
    result: list[list[Timing]] = []
    job = threading.Thread(
        target=lambda: result.append(run_load(replace(load, port=port, rounds=max(1000, int(planned / each))), 1))
    )
    job.start()
    time.sleep(4.0)  # its process starts, and its first rounds
    beside = Turns(metrics_port, pages, seconds)
    beside.run(turns)
    job.join()
    return result[0], beside.spans


if __name__ == "__main__":
    typer.run(main)
