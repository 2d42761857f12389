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
import os
import platform
import sys
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from benchmarks.harness import zygote
from benchmarks.kills.jobs import KilledJob, draw
from benchmarks.kills.judge import Verdict, judge


def main() -> int:
    options = parse_arguments()
    zygote.context.set_forkserver_preload(["benchmarks.kills.rank"])
    console, started = Console(), time.monotonic()
    total, jobs, resized, by_data, findings = Verdict(), 0, 0, Counter[str](), []
    compared = 0
    with Progress(console=console) as progress, ThreadPoolExecutor(options.jobs) as pool:
        bar = progress.add_task("kills", total=options.kills)
        running: dict[Future[Verdict], KilledJob] = {}
        seed = options.seed
        while True:
            enough = sum(total.stops.values()) >= options.kills or seed - options.seed >= options.count
            while not enough and len(running) < options.jobs and seed - options.seed < options.count:
                job = draw(seed, options.ranks)
                running[pool.submit(judge, job)] = job
                seed += 1
            if not running:
                break
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                job, verdict = running.pop(future), future.result()
                jobs, resized, compared = jobs + 1, resized + verdict.resizes, compared + verdict.compared
                total.stops += verdict.stops
                by_data[job.data] += sum(verdict.stops.values())
                total.samples += verdict.samples
                total.lost += verdict.lost
                total.doubled += verdict.doubled
                total.asked += verdict.asked
                total.size = max(total.size, verdict.size)
                total.saved_after = max(total.saved_after, verdict.saved_after)
                if verdict.findings:
                    findings.append({"job": str(job), "findings": verdict.findings})
                if options.show or verdict.findings:
                    console.print(job, verdict.findings or "right", soft_wrap=True)
            progress.update(bar, completed=sum(total.stops.values()), description=f"kills, {len(findings)} wrong")
    asked = np.array(total.asked or [0.0]) * 1e6
    median, p99 = (round(float(np.quantile(asked, share)), 1) for share in (0.5, 0.99))
    versions = {name: version(name) for name in ("torch", "numpy", "numba")}
    result: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.kills", *sys.argv[1:]]),
        "machine": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "versions": {"python": platform.python_version(), **versions},
        "seconds": round(time.monotonic() - started, 1),
        "jobs": jobs,
        "kills": dict(total.stops),
        "kills_by_data": dict(by_data),
        "runs_with_another_number_of_ranks": resized,
        "samples_trained": total.samples,
        "lost": total.lost,
        "doubled": total.doubled,
        "jobs_compared_bit_by_bit": compared,
        "state_dict_microseconds": {"median": median, "p99": p99},
        "largest_state_bytes": total.size,
        "longest_seconds_from_sigterm_to_checkpoint": round(total.saved_after, 3),
        "findings": findings,
    }
    console.print_json(json.dumps(result))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(findings))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000, help="how many to survive")
    parser.add_argument("--count", type=int, default=1 << 30, help="jobs at most")
    parser.add_argument("--seed", type=int, default=0, help="of the first job; each further one has the next")
    parser.add_argument("--ranks", type=int, default=4, help="of a job at most")
    parser.add_argument("--jobs", type=int, default=1, help="jobs at the same time")
    parser.add_argument("--show", action="store_true", help="print each job")
    parser.add_argument("--json", type=Path, help="result file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
