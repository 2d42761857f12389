"""Jobs spread over several balancers, of which one is killed, replaced and drained: who misses a round?

    python -m benchmarks.spread --json benchmarks/results/spread.json    # about a minute
    python -m benchmarks.spread --quick

Three real balancers behind one `spread://` address, and jobs of two ranks in steps of half a second, each with the
trainer client's own connection. A round is missed if any of a job's ranks gets no plan within the timeout; then its
ranks open their streams again, as those of a training job do, and until all are back its rounds count as missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from rich.console import Console
from rich.table import Table
from trainer_client.balancing.service import Connection

from benchmarks.harness.balancer_process import ServiceProcess, running_balancer
from benchmarks.rendezvous_load import Load, costs_of, draw_lengths, join_message
from evenkeel.partitioning.samples import RankSamples
from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol import balancer_pb2_grpc as pb_grpc

RANKS = 2
TIMEOUT = 2.0  # seconds
_FIELDS, _SAMPLES = 2, 32


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a job.

    Attributes:
        began: By the monotonic clock.
        seconds: Until both ranks had their answers.
        instance: The balancer that gave the plan; 0: none did, it was missed.
    """

    began: float
    seconds: float
    instance: int


@dataclass(slots=True)
class Job:
    """A job of two ranks, in a thread.

    Attributes:
        name: By which it is spread.
        ranks: Their connections.
        step: Seconds from the beginning of a round to that of the next.
        timeout: Seconds after which a round is missed.
        rounds: What has become of them.
    """

    name: str
    ranks: list[Connection]
    step: float
    timeout: float
    rounds: list[Round] = field(default_factory=list)

    @property
    def home(self) -> int:
        """The balancer of its last round that had a plan."""
        return next((one.instance for one in reversed(self.rounds) if one.instance), 0)

    def is_calm(self, since: float) -> bool:
        """Whether the last two rounds had plans and began after a moment."""
        last = self.rounds[-2:]
        return len(last) == 2 and all(one.instance and one.began >= since for one in last)

    def run(self, samples: list[RankSamples], stop: threading.Event) -> None:
        """Goes through rounds until `stop`."""
        for rank in self.ranks:
            rank.start()
        number, at = 0, time.monotonic() + random.Random(self.name).random() * self.step
        while not stop.wait(max(0.0, at - time.monotonic())):
            began = time.monotonic()
            instances = self._take_round(number, samples, began) if all(rank.ready for rank in self.ranks) else {0}
            instance = instances.pop() if len(instances) == 1 else 0
            if self.rounds or instance:  # from the first with a plan on
                self.rounds.append(Round(began, time.monotonic() - began, instance))
            number, at = number + 1, at + self.step
        for rank in self.ranks:
            rank.close()

    def _take_round(self, number: int, samples: list[RankSamples], began: float) -> set[int]:
        for rank, own in zip(self.ranks, samples, strict=True):
            rank.submit(number, own, exhausted=False, timeout_ms=round(self.timeout * 900))
        found = [
            rank.decision(number, began + self.timeout, own) for rank, own in zip(self.ranks, samples, strict=True)
        ]
        plans = {one.instance if one is not None and one.plan is not None else 0 for one in found}
        for rank in self.ranks:
            rank.settle(number)
            if 0 in plans:
                rank.suspect()
        return plans


class Jobs:
    """All jobs, at work within the block."""

    def __init__(self, address: str, count: int, step: float, *, timeout: float = TIMEOUT) -> None:
        load = Load(port=0, ranks=range(RANKS), world_size=RANKS, samples=_SAMPLES, fields=_FIELDS, rounds=0,
                    node_size=RANKS, seed=1)  # fmt: skip
        self._samples = []
        for rank in range(RANKS):
            lengths = draw_lengths(np.random.default_rng([1, rank]), _SAMPLES, _FIELDS)
            self._samples.append(RankSamples(costs=costs_of(lengths), lengths=lengths))
        self.all = [Job(f"job-{number}", [], step, timeout) for number in range(count)]
        for job in self.all:
            for rank in range(RANKS):
                join = join_message(load, range(rank, rank + 1))
                join.job = job.name
                job.ranks.append(Connection(address, join, join_timeout=10.0))
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=job.run, args=(self._samples, self._stop)) for job in self.all]

    def __enter__(self) -> Jobs:
        for thread in self._threads:
            thread.start()
        self.until_calm(60.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60.0)

    def until_calm(self, seconds: float, *, since: float = 0.0) -> None:
        """Until every job's last two rounds had plans, and began after a moment.

        Raises:
            TimeoutError: If that takes longer.
        """
        deadline = time.monotonic() + seconds
        while True:
            troubled = [job for job in self.all if not job.is_calm(since)]
            if not troubled:
                return
            if time.monotonic() > deadline:
                trouble = [rank.trouble for rank in troubled[0].ranks]
                raise TimeoutError(f"{len(troubled)} jobs have no plans after {seconds:g} s, the first: {trouble}")
            time.sleep(0.05)

    def homes(self) -> dict[str, int]:
        """The balancer of each job."""
        return {job.name: job.home for job in self.all}

    def missed(self, since: float) -> dict[str, list[Round]]:
        """The rounds without a plan by job, from a moment on."""
        return {
            job.name: [one for one in job.rounds if one.began + one.seconds >= since and not one.instance]
            for job in self.all
        }


def observe(jobs: Jobs, what: str, act: Callable[[], object], lost: int = 0, *, seconds: float) -> dict[str, Any]:
    """Does something to the balancers, and tells what became of the jobs of the one that is lost, and of the others.

    Args:
        jobs: At work.
        what: In a word.
        act: Does it.
        lost: The balancer's instance; 0: none is lost.
        seconds: How long to look at least.
    """
    homes, began = jobs.homes(), time.monotonic()
    act()
    acted = time.monotonic() - began
    time.sleep(max(0.0, seconds - acted))
    jobs.until_calm(60.0, since=began + acted)
    missed, after = jobs.missed(began), jobs.homes()
    mine = [name for name, home in homes.items() if home == lost]
    others = [name for name in homes if name not in mine]
    back = [max((one.began + one.seconds for one in missed[name]), default=began) - began for name in mine]
    return {
        "what": what,
        "seconds": acted,
        "its_jobs": len(mine),
        "its_rounds_missed": sum(len(missed[name]) for name in mine),
        "its_most_rounds_missed_by_a_job": max((len(missed[name]) for name in mine), default=0),
        "its_last_round_missed_after_seconds": max(back, default=0.0),
        "other_jobs": len(others),
        "others_rounds_missed": sum(len(missed[name]) for name in others),
        "others_moved": sum(after[name] != homes[name] for name in others),
        "jobs_by_balancer": sorted(Counter(after.values()).values(), reverse=True),
    }


def instance_of(balancer: ServiceProcess) -> int:
    """The incarnation of a balancer that runs."""
    with grpc.insecure_channel(balancer.address) as channel:
        stub = pb_grpc.BalancerServiceStub(channel)  # type: ignore[no-untyped-call]
        return int(stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=60).instance)


def spread(count: int, step: float, seconds: float) -> dict[str, Any]:
    """Jobs over three balancers: one is killed and replaced, another drained and replaced."""
    with ExitStack() as stack:
        balancers = [stack.enter_context(running_balancer()) for _ in range(3)]
        address = "spread://" + ",".join(balancer.address for balancer in balancers)
        jobs = stack.enter_context(Jobs(address, count, step))
        first = Counter(jobs.homes().values())
        died, drained = balancers[:2]
        events = [observe(jobs, "nothing", lambda: None, seconds=seconds)]
        for what, balancer, end in (("killed", died, died.kill), ("drained", drained, drained.stop)):
            events.append(observe(jobs, what, end, instance_of(balancer), seconds=seconds))
            events.append(observe(jobs, "replaced", balancer.start, seconds=seconds))
        rounds = [one for job in jobs.all for one in job.rounds]
    times = [1e3 * one.seconds for one in rounds if one.instance]
    return {
        "jobs": count,
        "ranks": RANKS,
        "step_seconds": step,
        "jobs_by_balancer_at_first": sorted(first.values(), reverse=True),
        "rounds": len(rounds),
        "p50_ms": float(np.percentile(times, 50)),
        "p99_ms": float(np.percentile(times, 99)),
        "events": events,
    }


def main() -> None:
    """Measures and shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--step", type=float, default=0.5, help="seconds")
    parser.add_argument("--seconds", type=float, default=8.0, help="to look at each event, at least")
    parser.add_argument("--quick", action="store_true", help="fewer jobs, for a shorter time")
    parser.add_argument("--json", type=Path, help="result file")
    options = parser.parse_args()
    load = os.getloadavg()
    result = spread(12, 0.5, 3.0) if options.quick else spread(options.jobs, options.step, options.seconds)
    table = Table(title=f"{result['jobs']} jobs over three balancers, {result['jobs_by_balancer_at_first']}")
    for name in ("", "its jobs", "rounds missed", "of a job at most", "the last after s", "other jobs", "rounds missed",
                 "moved", "jobs then"):  # fmt: skip
        table.add_column(name, justify="right")
    for event in result["events"]:
        table.add_row(
            event["what"], str(event["its_jobs"]), str(event["its_rounds_missed"]),
            str(event["its_most_rounds_missed_by_a_job"]), f"{event['its_last_round_missed_after_seconds']:.2f}",
            str(event["other_jobs"]), str(event["others_rounds_missed"]), str(event["others_moved"]),
            str(event["jobs_by_balancer"]),
        )  # fmt: skip
    Console(width=140).print(table)
    if options.json is not None:
        machine = {"cpus": os.cpu_count(), "load_average_at_start": load, "python": platform.python_version()}
        command = "python -m benchmarks.spread " + " ".join(sys.argv[1:])
        document = {"command": command, "machine": {**machine, "grpcio": version("grpcio")}, **result}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
