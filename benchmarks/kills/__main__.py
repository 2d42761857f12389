"""Jobs that are killed at random moments and go on: no sample lost, none trained twice, weights as if never stopped.

    python -m benchmarks.kills --kills 1000 --ranks 4 --jobs 8 --json benchmarks/results/kills.json
    python -m benchmarks.kills --seed 17 --count 1 --show                # one job again

A job trains one to three epochs on 1 to `--ranks` Gloo ranks, with windows, rounds in flight, workers of DataLoaders, a
second loader nested in the loop, checkpoints every few steps, and data whose place is found in each of the ways: a
sampler of the whole job, budgets of tokens, a loader with a state, skipping. Its runs end by SIGKILL on one rank or on
all, by an exception, or by SIGTERM, after which the ranks save and leave; the next run goes on from the last
checkpoint, with another number of ranks where the data allow it. Ranks write down every sample that they train. With
one number of ranks, the weights at the end are compared bit by bit with those of a run that was never stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.harness import zygote
from benchmarks.harness.results import write
from benchmarks.kills.jobs import KilledJob, draw
from benchmarks.kills.judge import Verdict, judge


@dataclass(slots=True)
class Tally:
    """What all jobs came to."""

    sums: Verdict = field(default_factory=Verdict)
    jobs: int = 0
    compared: int = 0
    by_data: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)

    def add(self, job: KilledJob, verdict: Verdict) -> None:
        """Counts a job."""
        self.jobs += 1
        self.compared += verdict.compared
        self.by_data[job.data] += sum(verdict.stops.values())
        self.sums.stops += verdict.stops
        for name in ("resizes", "samples", "lost", "doubled"):
            setattr(self.sums, name, getattr(self.sums, name) + getattr(verdict, name))
        if verdict.findings:
            self.wrong.append({"job": str(job), "findings": verdict.findings})

    def result(self, seconds: float) -> dict[str, Any]:
        """For the result file."""
        sums = self.sums
        return {
            "seconds": round(seconds, 1), "jobs": self.jobs, "kills": dict(sums.stops),
            "kills_by_data": dict(self.by_data), "runs_with_another_number_of_ranks": sums.resizes,
            "samples_trained": sums.samples, "lost": sums.lost, "doubled": sums.doubled,
            "jobs_compared_bit_by_bit": self.compared, "findings": self.wrong,
        }  # fmt: skip


def main() -> int:
    options = parse_arguments()
    zygote.context.set_forkserver_preload(["benchmarks.programs.preloaded", "benchmarks.kills.rank"])
    console, started, tally = Console(), time.monotonic(), Tally()
    with Progress(console=console) as progress, ThreadPoolExecutor(options.jobs) as pool:
        bar = progress.add_task("kills", total=options.kills)
        for job, verdict in _judged(options, tally, pool):
            tally.add(job, verdict)
            if options.show or verdict.findings:
                console.print(job, verdict.findings or "right", soft_wrap=True)
            progress.update(bar, completed=tally.sums.stops.total(), description=f"kills, {len(tally.wrong)} wrong")
            write(options.json, tally.result(time.monotonic() - started))
    console.print_json(json.dumps(tally.result(time.monotonic() - started)))
    return int(bool(tally.wrong))


def _judged(options: argparse.Namespace, tally: Tally, pool: ThreadPoolExecutor) -> Iterator[tuple[KilledJob, Verdict]]:
    """Jobs of ascending seeds as they end, until there were enough kills or the time is over."""
    until = time.monotonic() + options.minutes * 60
    running: dict[Future[Verdict], KilledJob] = {}
    jobs = (draw(seed, options.ranks) for seed in range(options.seed, options.seed + options.count))
    while True:
        while len(running) < options.jobs and tally.sums.stops.total() < options.kills and time.monotonic() < until:
            job = next(jobs, None)
            if job is None:
                break
            running[pool.submit(judge, job)] = job
        if not running:
            return
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            yield running.pop(future), future.result()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000, help="how many to survive")
    parser.add_argument("--count", type=int, default=1 << 30, help="jobs at most")
    parser.add_argument("--seed", type=int, default=0, help="of the first job; each further one has the next")
    parser.add_argument("--ranks", type=int, default=4, help="of a job at most")
    parser.add_argument("--jobs", type=int, default=1, help="jobs at the same time")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no job is begun")
    parser.add_argument("--show", action="store_true", help="print each job")
    parser.add_argument("--json", type=Path, help="result file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
