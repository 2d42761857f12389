"""A soak: random faults over a running job on real ranks, and what became of every sample of every step.

python -m benchmarks.faults --faults 1000 --seed 1 --json benchmarks/results/faults.json
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.harness.balancer_process import running_balancer
from benchmarks.harness.crew import SLACK, Crew, Run
from benchmarks.harness.kinds import Harm
from benchmarks.harness.proxy import TcpProxy
from benchmarks.harness.relay import Relay
from benchmarks.harness.results import write
from benchmarks.harness.steps import Steps

FAULTS_PER_JOB = 50
NOTHING = "none"  # what a fault's steps are held against
RANK_FAULTS = ("slow rank", "NaN cost on one rank", "request larger than the service takes")


@dataclass(slots=True, kw_only=True)
class Tally:
    """What happened; everything in `violations` should be zero."""

    faults: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)  # faults that met no message
    outcomes: Counter[str] = field(default_factory=Counter)
    back_steps: list[int] = field(default_factory=list)
    back_seconds: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)  # of each step of which no rank's data was slow
    openings: list[float] = field(default_factory=list)  # until each job's first batch
    spans: list[tuple[str, float, float]] = field(default_factory=list)  # of the job's faults, `time.monotonic`
    longest: dict[str, list[float]] = field(default_factory=dict)  # by kind, what the longest step of each was blocked
    samples: int = 0
    longest_close: float = 0.0
    breaker_changes: int = 0
    hangs: int = 0
    lost: int = 0
    doubled: int = 0
    differing: int = 0
    late: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def violations(self) -> dict[str, int]:
        """Counts of what must not happen."""
        return {
            "hangs": self.hangs, "samples lost": self.lost, "samples doubled": self.doubled,
            "steps in which ranks differed": self.differing, "steps that waited for the service": self.late,
            "errors": len(self.errors),
        }  # fmt: skip

    def take(self, run: Run, world_size: int) -> None:
        """Adds a job that has ended."""
        records = [result["records"] for result in run.results]
        if len({len(rank_records) for rank_records in records}) != 1:
            self.errors.append(f"ranks took {[len(rank_records) for rank_records in records]} steps")
        self.breaker_changes += run.results[0]["breaker_changes"]
        self.longest_close = max(self.longest_close, *(result["close_seconds"] for result in run.results))
        quiet: list[tuple[float, float]] = []  # (end, seconds blocked) of those steps
        for number, (step, blocked) in enumerate(zip(zip(*records, strict=False), run.blocked, strict=True)):
            loaded = Counter(run.steps.expected(world_size, number))
            trained = Counter(sample for record in step for sample in record["ids"])
            self.samples += loaded.total()
            self.lost += (loaded - trained).total()
            self.doubled += (trained - loaded).total()
            self.differing += len({(record["mode"], record["reason"], record["round"]) for record in step}) != 1
            if number == 0:  # ranks make their connections
                self.openings.append(blocked)
            elif not (slow := run.steps.slowness(number)):
                self.blocked.append(blocked)
                quiet.append((step[0]["at"], blocked))
                self.late += blocked > SLACK
            else:
                self.late += blocked > SLACK + slow
            self.outcomes[f"{step[0]['mode']} ({step[0]['reason']})"] += 1
            for name, where in zip(RANK_FAULTS, (run.steps.slow, run.steps.bad_costs, run.steps.big), strict=True):
                self.faults[name] += sum((rank, number) in where for rank in range(world_size))
        for kind, began, ended in self.spans:
            if during := [blocked for at, blocked in quiet if began <= at <= ended]:
                self.longest.setdefault(kind, []).append(max(during))
        self.spans.clear()


def soak(
    *, faults: int, seed: int, world_size: int, timeout: float, progress: Progress, console: Console
) -> tuple[Tally, float]:
    """Injects faults until so many have met something; returns the tally and the seconds."""
    rng, tally, started = random.Random(seed), Tally(), time.monotonic()
    task = progress.add_task("faults", total=faults)
    with (
        running_balancer("--max-message-bytes", "3000") as balancer,
        Relay(balancer.port) as relay,
        TcpProxy(relay.port) as proxy,
        Crew(world_size) as crew,
    ):
        harm = Harm(rng, balancer, relay, proxy)
        injected = job = 0
        while injected < faults:
            job += 1
            steps = make_steps(rng, world_size, proxy.address, f"soak-{job}", timeout)
            ended: list[Run] = []
            try:
                with crew.run(steps) as run:
                    ended.append(run)
                    run.until(mode="service", seconds=60.0)
                    for _ in range(min(FAULTS_PER_JOB, faults - injected)):
                        done = one_fault(rng, harm, run, tally)
                        injected += done
                        progress.advance(task, done)
            except AssertionError as error:
                said = str(error)
                tally.hangs += "within" in said or "hangs" in said
                tally.errors.append(said[:2000])
                console.print(f"[red]{said[:500]}")
                if not (ended and ended[0].results):
                    break  # the ranks are not to be had any more
            tally.take(ended[0], world_size)
    return tally, time.monotonic() - started


def one_fault(rng: random.Random, harm: Harm, run: Run, tally: Tally) -> int:
    """Injects one fault and, mostly, waits until the service balances again; now and then injects nothing."""
    began, kind = time.monotonic(), harm.pick()
    if rng.random() < 0.05:
        run.until(times=30)
        tally.spans.append((NOTHING, began, time.monotonic()))
        return 0
    if not harm.inject(kind, run):
        tally.missed[kind] += 1
        harm.heal()
        run.until(mode="service", seconds=60.0)
        return 0
    tally.faults[kind] += 1
    if rng.random() < 0.25:  # the next fault comes before the job has recovered from this one
        return 1
    harm.heal()
    run.catch_up()  # what ended during the fault, or the start of a balancer, is not counted
    healed = time.monotonic()
    row = 3
    tally.back_steps.append(run.until(mode="service", times=row, seconds=60.0) - row)
    tally.back_seconds.append(time.monotonic() - healed)
    tally.spans.append((kind, began, time.monotonic()))
    return 1


def make_steps(rng: random.Random, world_size: int, address: str, name: str, timeout: float) -> Steps:
    """A job of which some ranks are slow, wrong or large at some steps."""
    steps = Steps(address=address, name=name, timeout=timeout)

    def some(share: float) -> list[tuple[int, int]]:
        ats = [(rank, step) for rank in range(world_size) for step in range(20_000) if rng.random() < share]
        return [at for at in ats if steps.size(*at)]

    return replace(
        steps,
        slow={at: rng.uniform(0.1, 0.4) for at in some(0.001)},
        bad_costs=frozenset(some(0.001)),
        big=frozenset(some(0.001)),
    )


def report(tally: Tally, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """What became of the job."""
    return {
        "ranks": options.ranks, "seed": options.seed, "deadline_seconds": options.timeout, "seconds": round(seconds, 1),
        "steps": tally.outcomes.total(), "samples": tally.samples, "faults": tally.faults.total(),
        "violations": tally.violations, "errors": tally.errors,
        "faults_by_kind": dict(tally.faults), "met_nothing": dict(tally.missed),
        "steps_by_outcome": dict(tally.outcomes),
        "breaker_changes": tally.breaker_changes, "longest_close_seconds": tally.longest_close,
        "steps_until_balance_returned": spread(tally.back_steps),
        "seconds_until_balance_returned": spread(tally.back_seconds),
        "seconds_that_a_step_stood_still": spread(tally.blocked),
        "seconds_until_the_first_batch": spread(tally.openings),
        "longest_by_kind": {
            kind: {"cases": len(values), "median": statistics.median(values), "max": max(values)}
            for kind, values in sorted(tally.longest.items())
        },
    }  # fmt: skip


def spread(values: list[Any]) -> dict[str, float]:
    """Median, 95th and 99.9th percentile and the largest."""
    ordered = sorted(values) or [0.0]
    last = len(ordered) - 1
    return {
        "median": statistics.median(ordered), "p95": ordered[last * 95 // 100], "p99.9": ordered[last * 999 // 1000],
        "max": ordered[-1],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--faults", type=int, default=200, help="faults to inject between ranks and balancer")
    parser.add_argument("--seed", type=int, default=0, help="of the random choice of faults and instants")
    parser.add_argument("--ranks", type=int, default=3, help="processes of the job")
    parser.add_argument("--timeout", type=float, default=2.0, help="seconds that a call of the service may take")
    parser.add_argument("--quick", action="store_true", help="30 faults")
    parser.add_argument("--json", type=Path, help="where the result goes")
    options = parser.parse_args()
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        tally, seconds = soak(
            faults=30 if options.quick else options.faults, seed=options.seed, world_size=options.ranks,
            timeout=options.timeout, progress=progress, console=console,
        )  # fmt: skip
    result = report(tally, options, seconds)
    console.print_json(data=result)
    write(options.json, result)
    return int(any(tally.violations.values()))


if __name__ == "__main__":
    sys.exit(main())
