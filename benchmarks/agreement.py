"""What agreeing costs the ranks, in real Gloo worlds on this machine, and what a step waits for when the service fails.

    python -m benchmarks.agreement [--quick] [--json FILE]

- *agreement*: a round of contributions of 1.5 kB that nobody plans, from a rank's contribution to its directive; and
  the CPU time that it takes of a rank that does not lead, over a bare gather and scatter of the same bytes.
- *faults*: the longest wait of the lead for a plan, of a job of 8 ranks whose balancer is killed, stopped, cut off.
"""

from __future__ import annotations

import argparse
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness.balancer_process import running_balancer
from benchmarks.harness.crew import Crew
from benchmarks.harness.proxy import TcpProxy
from benchmarks.harness.ranks import run_ranks
from benchmarks.harness.results import write
from benchmarks.harness.steps import Steps
from evenkeel.partitioning.rounds import RankSamples
from trainer_client import BalanceOptions
from trainer_client.balancing.batches import flatten
from trainer_client.balancing.contribution import Contribution, schema_number
from trainer_client.balancing.groups import Communicators, read_membership, take_communicators
from trainer_client.balancing.options import StreamConfig
from trainer_client.balancing.report import Counters
from trainer_client.balancing.rounds import SharedRounds, Ticket
from trainer_client.balancing.stages import make_lead

WORLDS = (8, 32)
SAMPLES = 64  # whose costs, sizes and lengths make 1.5 kB
FAULT_RANKS = 8


def _communicators() -> Communicators:
    membership = read_membership(None, None)
    assert membership is not None
    return take_communicators(membership, timedelta(seconds=120))


def agree(_: int, rounds: int) -> dict[str, float]:
    """Milliseconds of rounds, and CPU seconds of them and of bare collectives of the same bytes."""
    template = flatten({"n": torch.zeros(1, dtype=torch.int64)}).empty()
    samples = RankSamples(
        costs=np.full(SAMPLES, 7), lengths=np.ones((SAMPLES, 1), np.int64), sizes=np.full(SAMPLES, 8),
        batch_sizes=(SAMPLES,),
    )  # fmt: skip
    contribution = Contribution(samples=samples, schema=schema_number(template.schema))
    communicators, world_size, lead = _communicators(), dist.get_world_size(), None
    if communicators.leads:
        config = StreamConfig(loader="rounds", balance=False, options=BalanceOptions())
        lead = make_lead(config, template=template, nodes=["here"] * world_size)
    of_rounds = SharedRounds("rounds", communicators, depth=2, counters=Counters(), template=template, lead=lead)
    times = []
    for number in range(rounds + 20):
        if number == 20:
            cpu = time.process_time()
        dist.barrier()  # a round of nobody else is under way
        began = time.perf_counter()
        ticket = Ticket(0, contribution)
        of_rounds.put(ticket)
        ticket.future.result(60)
        times.append(1e3 * (time.perf_counter() - began))
    cpu_of_rounds = time.process_time() - cpu
    of_rounds.close(10)
    bare, packed = _communicators(), contribution.pack()
    directives = (
        None
        if lead is None
        else np.tile(np.frombuffer(np.array([256], np.uint32).tobytes() + bytes(252), np.uint8), (world_size, 1))
    )
    for number in range(rounds + 20):
        if number == 20:
            cpu = time.process_time()
        dist.barrier()
        bare.gather(packed, 4096)
        bare.scatter(directives, 4096)
    return {
        "p50_ms": float(np.percentile(times[20:], 50)), "p99_ms": float(np.percentile(times[20:], 99)),
        "cpu_ms": 1e3 * cpu_of_rounds / rounds, "bare_cpu_ms": 1e3 * (time.process_time() - cpu) / rounds,
    }  # fmt: skip


def measure_agreement(worlds: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """Rounds that nobody plans."""
    entries = []
    for ranks in worlds:
        results = run_ranks(ranks, agree, rounds)
        others = results[1:]
        cpu, bare = (float(np.median([one[name] for one in others])) for name in ("cpu_ms", "bare_cpu_ms"))
        entry = {
            "ranks": ranks, "bytes": int(24 * SAMPLES), "p50_ms": float(np.median([one["p50_ms"] for one in results])),
            "p99_ms": max(one["p99_ms"] for one in results), "cpu_ms_of_other_ranks": cpu, "bare_cpu_ms": bare,
            "cpu_over_bare": cpu / bare,
        }  # fmt: skip
        print(f"agreement of {ranks} ranks: {entry}", flush=True)
        entries.append(entry)
    return entries


def measure_faults(seconds: float) -> list[dict[str, Any]]:
    """The longest waits for a plan, before a fault and with it."""
    entries = []
    with (
        running_balancer("--log-level", "warning") as balancer,
        Crew(FAULT_RANKS) as crew,
        TcpProxy(balancer.port) as proxy,
    ):
        for fault in ("killed and restarted", "stopped", "cut off"):
            with crew.run(Steps(address=proxy.address, name=fault, timeout=2.0, pace=0.05)) as run:
                run.until(mode="service", times=20)
                begin = len(run.told)
                if fault == "cut off":
                    proxy.swallow = True
                elif fault == "stopped":
                    balancer.signal(signal.SIGSTOP)
                else:
                    balancer.kill()
                run.until(times=int(seconds / 0.05))
                proxy.heal()
                if fault == "stopped":
                    balancer.signal(signal.SIGCONT)
                elif fault != "cut off":
                    balancer.start()
                run.until(mode="service", times=10, seconds=120.0)
            waits = [1e3 * record["wait"] for record in run.results[0]["records"]]
            blocked = [1e3 * one for one in run.blocked]
            entry = {
                "fault": fault, "ranks": FAULT_RANKS, "steps": len(waits), "longest_wait_ms": max(waits[begin:]),
                "longest_wait_before_ms": max(waits[3:begin]), "longest_blocked_ms": max(blocked[begin:]),
                "longest_blocked_before_ms": max(blocked[3:begin]),
            }  # fmt: skip
            print(entry, flush=True)
            entries.append(entry)
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a little of each, to see that it works")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    quick = options.quick
    write(
        options.json,
        {
            "agreement": measure_agreement(WORLDS[:1] if quick else WORLDS, 50 if quick else 500),
            "faults": measure_faults(1.0 if quick else 10.0),
        },
    )


if __name__ == "__main__":
    main()
