"""What open pages of the balancer cost its rounds.

    python -m benchmarks.open_pages --json benchmarks/results/open_pages.json

One job goes through rounds without a pause while pages are opened and closed in many short turns: none, some that read
all that they are told, some that read nothing. A turn with pages is compared with the turns without any beside it; told
are medians over all such pairs, each with the bounds that hold it with 95 %, of the rounds' times, which all else on
the machine changes too, and of the processor's time that the balancer takes for a round. A thread of its own writes to
pages: its share of the processor's time is counted, not compared, and so hardly depends on what else runs. Beside it:
what the balancer's memory of the last rounds takes of a round, by itself, on one core.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import socket
import statistics
import tempfile
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from services.balancer.decisions import balanced
from services.balancer.effects import Decided, PlanInput, SessionId
from services.balancer.submissions import SessionKey

from benchmarks.harness.plans import make_plan, said
from benchmarks.rendezvous import balancer_process, run_load
from benchmarks.rendezvous_load import Load, Timing, costs_of, draw_lengths
from evenkeel.partitioning.rounds import RoundOptions, RoundPlan
from evenkeel.partitioning.samples import RankSamples
from services.balancer.history import History

JOB = "watched"
VIEWS = ("/v1/events", f"/v1/events?job={JOB}&group=&loader=")
SETTLE_SECONDS = 0.3
_MOST_SECONDS = 3600.0  # that the job may take


def open_pages(port: int, count: int) -> list[socket.socket]:
    """Connections of open pages, half of them of all jobs, half of one, each from an address of its own.

    The balancer bounds how many requests an address makes in a second, and turns are short.

    Raises:
        RuntimeError: If the balancer refuses one.
    """
    pages = []
    for number in range(count):
        page = socket.create_connection(("127.0.0.1", port), source_address=(f"127.0.1.{number + 1}", 0))
        page.sendall(f"GET {VIEWS[number % 2]} HTTP/1.0\r\n\r\n".encode())
        status = page.recv(15)
        if b" 200 " not in status:
            raise RuntimeError(f"page {number}: {status!r}")
        page.setblocking(False)
        pages.append(page)
    return pages


def wait_for_job(port: int) -> None:
    """Until the balancer knows the job, whose process takes a while to start; a minute at most. Opens no page."""
    deadline = time.monotonic() + 60.0
    while True:
        time.sleep(1.0)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/session?job={JOB}&group=&loader="):
                return
        except urllib.error.HTTPError:
            if time.monotonic() > deadline:
                raise


def read_all(pages: list[socket.socket]) -> int:
    """Reads what there is; how many bytes."""
    told = 0
    for page in pages:
        with contextlib.suppress(BlockingIOError):
            while data := page.recv(1 << 20):
                told += len(data)
    return told


class Span(NamedTuple):
    """When a turn was, and the processor's time that each of the balancer's threads took in it, in seconds."""

    kind: str
    first: float
    last: float
    used: dict[str, float]


class Turn(NamedTuple):
    """The rounds of a turn: their median and 99th percentile, and the processor's time of each, in milliseconds."""

    kind: str
    p50: float
    p99: float
    cpu: float
    rounds: int


def processor_seconds(pid: int) -> dict[str, float]:
    """What each thread of a process has used so far."""
    used = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            used[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return used


def shares_of_pages(spans: list[Span]) -> tuple[float, float]:
    """Of a core, and of all that the balancer takes: the thread that writes to pages, which begins with the first."""
    reading = [span for span in spans if span.kind == "reading"]
    seconds = sum(span.last - span.first for span in reading)
    later = {thread for span in reading for thread in span.used} - spans[0].used.keys()
    taken = max((sum(span.used.get(thread, 0.0) for span in reading) for thread in later), default=0.0)
    return taken / seconds, taken / sum(sum(span.used.values()) for span in reading)


def median_within(values: list[float]) -> list[float]:
    """The median, and the two of the values between which that of all there could be lies with 95 %."""
    ordered, count = sorted(values), len(values)
    low = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2))
    return [statistics.median(ordered), ordered[low], ordered[count - 1 - low]]


class Turns:
    """Opens pages in turns beside the job, and notes when."""

    def __init__(self, pid: int, port: int, pages: int, seconds: float) -> None:
        self.pid, self.port, self.pages, self.seconds = pid, port, pages, seconds
        self.spans: list[Span] = []
        self.told = 0

    def run(self, rounds: int) -> None:
        """So many turns of each kind, one without pages before and after each."""
        for _ in range(rounds):
            for kind in ("none", "reading", "none", "idle"):
                self._turn(kind)
        self._turn("none")

    def _turn(self, kind: str) -> None:
        pages = [] if kind == "none" else open_pages(self.port, self.pages)
        self._pass(SETTLE_SECONDS, pages if kind == "reading" else [])
        began, used = time.monotonic(), processor_seconds(self.pid)
        self.told += self._pass(self.seconds, pages if kind == "reading" else [])
        last, after = time.monotonic(), processor_seconds(self.pid)
        self.spans.append(Span(kind, began, last, {name: now - used.get(name, 0.0) for name, now in after.items()}))
        for page in pages:
            page.close()

    def _pass(self, seconds: float, reading: list[socket.socket]) -> int:
        end, told = time.monotonic() + seconds, 0
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(0.1, left))
            told += read_all(reading)
        return told


def by_turn(timings: list[Timing], spans: list[Span]) -> list[Turn]:
    """What became of the rounds of each turn that was over before the job was."""
    begins = np.min([timing.began for timing in timings], axis=0)
    ends = np.max([timing.ended for timing in timings], axis=0)
    found = []
    for kind, first, last, used in spans:
        inside = 1e3 * (ends - begins)[(begins >= first) & (ends <= last)]
        if inside.size and ends[-1] >= last:
            p50, p99 = (float(value) for value in np.percentile(inside, (50, 99)))
            found.append(Turn(kind, p50, p99, 1e3 * sum(used.values()) / inside.size, int(inside.size)))
    return found


def against_none(turns: list[Turn], kind: str, figure: str) -> list[float]:
    """Each turn's figure over the mean of those without pages before and after it."""
    return [
        getattr(own, figure) / ((getattr(before, figure) + getattr(after, figure)) / 2)
        for before, own, after in zip(turns, turns[1:], turns[2:], strict=False)
        if own.kind == kind and before.kind == after.kind == "none"
    ]


def history_seconds(ranks: int, samples: int) -> float:
    """Seconds that the memory of rounds takes of one round, on one core."""
    draws = [draw_lengths(np.random.default_rng([1, rank]), samples, 4) for rank in range(ranks)]
    parts = said([RankSamples(costs=costs_of(own), lengths=own) for own in draws]).samples
    plan = make_plan(PlanInput(parts=(parts,), options=RoundOptions(), nodes=("",) * ranks))
    assert isinstance(plan, RoundPlan)
    history, submissions = (
        History(ranks),
        [
            said([RankSamples(costs=np.ones(1, np.int64), lengths=np.ones((1, 4), np.int64))], rank)
            for rank in range(ranks)
        ],
    )
    session = SessionId(SessionKey(JOB, "", ""), "run", 0)
    rounds = 2000
    began = time.thread_time()
    for number in range(rounds):
        for rank in range(ranks):
            history.arrived(number * 0.002, number, submissions[rank])
        history.decided(number * 0.002, 1e9, Decided(session, number, balanced(plan), 0.001))
    return (time.thread_time() - began) / rounds


def main(
    ranks: Annotated[int, typer.Option(help="Of the job.")] = 8,
    samples: Annotated[int, typer.Option(help="Per rank and round.")] = 128,
    pages: Annotated[int, typer.Option(help="Open at a time.")] = 50,
    seconds: Annotated[float, typer.Option(help="Of a turn.")] = 1.0,
    turns: Annotated[int, typer.Option(help="Of each kind.")] = 60,
    quick: Annotated[bool, typer.Option("--quick", help="Four turns of half a second of each kind.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the figures go.")] = None,
) -> None:
    """Measures, and prints the ratios."""
    seconds, turns = (0.5, 4) if quick else (seconds, turns)
    load = Load(port=0, ranks=range(ranks), world_size=ranks, samples=samples, fields=4, rounds=1, node_size=8, seed=1,
                job=JOB)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder) / "port"
        flags = ["--port", "0", "--metrics-port", "0", "--metrics-port-file", str(port_file)]
        with balancer_process(flags) as balancer:
            place = balancer.port, balancer.running.pid, int(port_file.read_text())
            measured, (of_core, of_balancer) = measure(load, *place, pages, seconds, turns)
    table = Table("pages", "turns", "p50 ms", "p99 ms", "CPU ms", "p50 over none", "CPU over none")
    figures: dict[str, Any] = {}
    for kind, named in (("none", "none"), ("reading", f"{pages} that read"), ("idle", f"{pages} that do not")):
        own = [turn for turn in measured if turn.kind == kind]
        figures[kind] = {"turns": len(own), "rounds": sum(turn.rounds for turn in own)}
        cells = [str(len(own))]
        for figure in ("p50", "p99", "cpu"):
            figures[kind][f"{figure}_ms"] = middle = statistics.median(getattr(turn, figure) for turn in own)
            cells.append(f"{middle:.3f}")
        for figure in ("p50", "cpu"):
            over = median_within(against_none(measured, kind, figure) or [1.0])
            figures[kind][f"{figure}_over_none"] = over
            cells.append(f"{over[0]:.3f} ({over[1]:.3f} to {over[2]:.3f})")
        table.add_row(named, *cells)
    Console(width=120).print(table)
    Console().print(
        f"the thread that writes to {pages} pages that read: {of_core:.2%} of a core, {of_balancer:.2%} of the balancer"
    )
    share = {count: history_seconds(count, samples) for count in (ranks, 64, 1024)}
    for count, spent in share.items():
        Console().print(f"memory of a round of {count} ranks: {1e6 * spent:.1f} µs")
    if json_path is not None:
        machine = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count(),
                   "python": platform.python_version()}  # fmt: skip
        content = {**machine, "ranks": ranks, "samples": samples, "pages": pages, "seconds": seconds, "kinds": figures,
                   "pages_share_of_core": of_core, "pages_share_of_balancer": of_balancer,
                   "history_seconds_per_round": share, "turns": [turn._asdict() for turn in measured]}  # fmt: skip
        json_path.write_text(json.dumps(content, indent=1) + "\n")


def measure(
    load: Load, port: int, pid: int, metrics_port: int, pages: int, seconds: float, turns: int
) -> tuple[list[Turn], tuple[float, float]]:
    """Runs the job beside the turns; also the shares that the pages' thread took."""
    began = time.monotonic()
    run_load(replace(load, port=port, rounds=1000, job="beforehand"), 1)
    each = (time.monotonic() - began) / 1000
    rounds = max(1000, int(1.3 * (4 * turns + 1) * (seconds + SETTLE_SECONDS + 1.0) / each))
    result: list[list[Timing]] = []
    long = replace(load, port=port, rounds=rounds)
    job = threading.Thread(target=lambda: result.append(run_load(long, 1, _MOST_SECONDS)))
    job.start()
    wait_for_job(metrics_port)
    beside = Turns(pid, metrics_port, pages, seconds)
    beside.run(turns)
    job.join()
    Console().print(f"pages that read were told {beside.told / 1e6:.1f} MB")
    return by_turn(result[0], beside.spans), shares_of_pages(beside.spans)


if __name__ == "__main__":
    typer.run(main)
