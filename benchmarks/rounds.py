"""Served rounds, with planning alone beside them: how long one takes, and how many a balancer serves.

    python -m benchmarks.rounds [--quick] [--json FILE]

A round is what the lead does with all contributions in its hands, until slices are ready to scatter: the request is
written, sent to a balancer in processes of its own, the response read, the plan cut. Its floor is `plan_round` and
`slice_round` in this process; both take turns, on the same rounds. Of many jobs, each has a connection of its own and
asks again as soon as it is answered, all from this process, which shares the machine's cores with the balancer;
requests are written ahead.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks.harness.balancer_process import running_balancer
from benchmarks.harness.results import write
from evenkeel.partitioning import warm_up
from evenkeel.partitioning.rounds import RoundOptions, RoundSamples
from evenkeel.partitioning.stages import plan_round, slice_round
from evenkeel.protocol.plan_round import RoundNames, RunFacts, read_response, write_request

SAMPLES, FIELDS = 128, 4
RANKS = (8, 64, 256, 1024, 4096)
JOBS = (1, 10, 100, 300)
JOB_RANKS = 8
DRAWS = 4  # rounds of each size
METHOD = "/evenkeel.balancer.v2.BalancerService/PlanRound"
METADATA = (("evenkeel-job", "job"),)
TIMEOUT_SECONDS = 30.0
_CHANNEL = [
    ("grpc.max_send_message_length", 1 << 28),
    ("grpc.max_receive_message_length", 1 << 28),
    ("grpc.use_local_subchannel_pool", 1),
]


def draw_samples(ranks: int, seed: int) -> RoundSamples:
    """A round of lognormal lengths, whose costs are those of a transformer's positions."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.exp(rng.normal(6, 1.2, (ranks * SAMPLES, FIELDS))), 1, 8192).astype(np.uint32)
    longest = lengths[:, 0].astype(np.int64)
    return RoundSamples(
        batch_sizes=np.full((ranks, 1), SAMPLES, np.int64), costs=longest**2 + 1024 * longest, lengths=lengths
    )


def request_of(samples: RoundSamples, number: int = 0) -> bytes:
    """The request for a round's plan."""
    return write_request(samples, RoundOptions(), RoundNames(job="job", round=number), RunFacts())


def measure_sizes(address: str, sizes: tuple[int, ...], seconds: float) -> list[dict[str, Any]]:
    """Milliseconds of served rounds and of their floor, by number of ranks."""
    entries = []
    with grpc.insecure_channel(address, options=_CHANNEL) as channel:
        call = channel.unary_unary(METHOD)

        def serve(samples: RoundSamples) -> None:
            response = call(request_of(samples), timeout=TIMEOUT_SECONDS, metadata=METADATA)
            slice_round(read_response(response, samples), samples)

        def plan(samples: RoundSamples) -> None:
            slice_round(plan_round(samples, RoundOptions()), samples)

        for ranks in sizes:
            rounds = [draw_samples(ranks, seed) for seed in range(DRAWS)]
            for samples in rounds:
                serve(samples)
                plan(samples)
            served, floor, ends, number = [], [], time.perf_counter() + seconds, 0
            while time.perf_counter() < ends or number < 2 * DRAWS:
                samples = rounds[number % DRAWS]
                served.append(_milliseconds(serve, samples))
                floor.append(_milliseconds(plan, samples))
                number += 1
            entry = {
                "ranks": ranks,
                "rounds": number,
                "p50_ms": float(np.percentile(served, 50)),
                "p99_ms": float(np.percentile(served, 99)),
                "floor_ms": float(np.percentile(floor, 50)),
            }
            entry["over_floor"] = entry["p50_ms"] / entry["floor_ms"]
            print(
                f"{ranks:5} ranks: p50 {entry['p50_ms']:.2f}, p99 {entry['p99_ms']:.2f}, floor "
                f"{entry['floor_ms']:.2f} ms, {entry['over_floor']:.2f} times",
                flush=True,
            )
            entries.append(entry)
    return entries


async def measure_jobs(address: str, numbers: tuple[int, ...], seconds: float) -> list[dict[str, Any]]:
    """Rounds a second, by number of jobs."""
    requests = [request_of(draw_samples(JOB_RANKS, seed), seed) for seed in range(2 * DRAWS)]
    entries = []
    for jobs in numbers:
        channels = [grpc.aio.insecure_channel(address, options=_CHANNEL) for _ in range(jobs)]
        counts, ends = np.zeros(jobs, np.int64), float("inf")

        async def run(job: int) -> None:
            call = channels[job].unary_unary(METHOD)  # noqa: B023
            while time.perf_counter() < ends:  # noqa: B023
                await call(requests[int(counts[job]) % len(requests)], timeout=TIMEOUT_SECONDS, metadata=METADATA)  # noqa: B023
                counts[job] += 1  # noqa: B023

        running = [asyncio.create_task(run(job)) for job in range(jobs)]
        while counts.min() < 2:  # all are connected
            await asyncio.sleep(0.01)
        counts[:] = 0
        began = time.perf_counter()
        ends = began + seconds
        await asyncio.gather(*running)
        taken = time.perf_counter() - began
        await asyncio.gather(*[channel.close() for channel in channels])
        entry = {
            "jobs": jobs,
            "rounds_per_second": float(counts.sum() / taken),
            "least_share": float(counts.min() / counts.mean()),
        }
        print(
            f"{jobs:5} jobs: {entry['rounds_per_second']:.0f} rounds a second, the slowest job "
            f"{entry['least_share']:.2f} of the mean",
            flush=True,
        )
        entries.append(entry)
    return entries


def _milliseconds(call: Callable[[RoundSamples], None], samples: RoundSamples) -> float:
    began = time.perf_counter()
    call(samples)
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a second of each, to see that it works")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    seconds = 1.0 if options.quick else 10.0
    warm_up()
    with running_balancer("--log-level", "warning", interpreter=True) as balancer:
        sizes = measure_sizes(balancer.address, RANKS, seconds)
        jobs = asyncio.run(measure_jobs(balancer.address, JOBS, seconds))
    document = {
        "samples_per_rank": SAMPLES,
        "fields": FIELDS,
        "sizes": sizes,
        "ranks_of_each_job": JOB_RANKS,
        "jobs": jobs,
    }
    write(options.json, document)


if __name__ == "__main__":
    main()
