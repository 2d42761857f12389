"""Served rounds, with planning alone beside them: how long one takes, and how many a balancer serves.

    python -m benchmarks.rounds [--quick] [--json FILE]

A round is what the lead does with all contributions in its hands, until slices are ready to scatter: the request is
written, sent to a balancer in processes of its own, the response read, the plan cut. Its floors are `plan_round` and
`slice_round` in this process, and a call of a bare gRPC server that echoes as many bytes; all take turns, on the same
rounds. Of many jobs, each has a connection of its own and asks again as soon as it is answered, all from this process,
which shares the machine's cores with the balancer; requests are written ahead.

Agreement alone is a round of real Gloo ranks that nobody plans: from a rank's contribution of 1.5 kB to its directive.
Its floor is a bare gather and scatter of as many bytes, with which it takes turns; of both there is the CPU time that
they take of a rank that does not lead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import grpc
import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness import zygote
from benchmarks.harness.balancer_process import running_balancer
from benchmarks.harness.ranks import run_ranks
from benchmarks.harness.results import read_options, write
from evenkeel.partitioning import warm_up
from evenkeel.partitioning.refinements import plan_round, slice_round
from evenkeel.partitioning.rounds import RankSamples, RoundOptions, RoundSamples
from evenkeel.protocol.plan_round import RoundNames, RunFacts, read_response, write_request
from trainer_client import BalanceOptions
from trainer_client.balancing.batches import flatten
from trainer_client.balancing.contribution import Contribution, schema_number
from trainer_client.balancing.groups import read_membership, take_communicators
from trainer_client.balancing.options import StreamConfig
from trainer_client.balancing.report import Counters
from trainer_client.balancing.rounds import Rounds, Ticket
from trainer_client.balancing.stages import make_lead

SAMPLES, FIELDS = 128, 4
RANKS = (8, 64, 256, 1024, 4096)
JOBS = (1, 10, 100, 300)
JOB_RANKS = 8
DRAWS = 4  # rounds of each size
WORLDS = (8, 32)
AGREED_SAMPLES = 64  # whose costs, sizes and lengths make 1.5 kB
DIRECTIVE_BYTES = 1024
TURNS = 4
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


def measure_sizes(address: str, echo: str, sizes: tuple[int, ...], seconds: float) -> list[dict[str, Any]]:
    """Milliseconds of served rounds and of their floors, by number of ranks."""
    entries = []
    with (
        grpc.insecure_channel(address, options=_CHANNEL) as channel,
        grpc.insecure_channel(echo, options=_CHANNEL) as echoing,
    ):
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
            request = request_of(rounds[0])
            answer = len(call(request, timeout=TIMEOUT_SECONDS, metadata=METADATA))
            bounce = echoing.unary_unary(f"/echo/{answer}")
            times: dict[str, list[float]] = {"served": [], "plan": [], "echo": []}
            ends = time.perf_counter() + seconds
            while time.perf_counter() < ends or len(times["echo"]) < 2 * DRAWS:
                samples = rounds[len(times["echo"]) % DRAWS]
                times["served"].append(_milliseconds(partial(serve, samples)))
                times["plan"].append(_milliseconds(partial(plan, samples)))
                times["echo"].append(_milliseconds(partial(bounce, request, timeout=TIMEOUT_SECONDS)))
            entry = {
                "ranks": ranks, "rounds": len(times["echo"]), "p50_ms": float(np.median(times["served"])),
                "p99_ms": float(np.percentile(times["served"], 99)), "floor_ms": float(np.median(times["plan"])),
                "echo_ms": float(np.median(times["echo"])),
            }  # fmt: skip
            entry["over_floor"] = entry["p50_ms"] / entry["floor_ms"]
            print(
                f"{ranks:5} ranks: p50 {entry['p50_ms']:.2f}, p99 {entry['p99_ms']:.2f} ms; planned here "
                f"{entry['floor_ms']:.2f}, bytes echoed {entry['echo_ms']:.2f}",
                flush=True,
            )
            entries.append(entry)
    return entries


async def measure_jobs(address: str, echo: str, numbers: tuple[int, ...], seconds: float) -> list[dict[str, Any]]:
    """Rounds a second, and echoes of the same bytes, by number of jobs."""
    requests = [request_of(draw_samples(JOB_RANKS, seed), seed) for seed in range(2 * DRAWS)]
    async with grpc.aio.insecure_channel(address, options=_CHANNEL) as channel:
        answer = await channel.unary_unary(METHOD)(requests[0], timeout=TIMEOUT_SECONDS, metadata=METADATA)
    entries = []
    for jobs in numbers:
        rounds, least = await _calls_per_second(address, METHOD, requests, jobs, seconds)
        echoes, _ = await _calls_per_second(echo, f"/echo/{len(answer)}", requests, jobs, seconds)
        entries.append({"jobs": jobs, "rounds_per_second": rounds, "least_share": least, "echoes_per_second": echoes})
        print(
            f"{jobs:5} jobs: {rounds:.0f} rounds a second, the slowest job {least:.2f} of the mean; bytes echoed "
            f"{echoes:.0f}",
            flush=True,
        )
    return entries


async def _calls_per_second(
    address: str, method: str, requests: list[bytes], jobs: int, seconds: float
) -> tuple[float, float]:
    """Calls a second of all jobs together, and what the slowest gets over the mean."""
    channels = [grpc.aio.insecure_channel(address, options=_CHANNEL) for _ in range(jobs)]
    counts, ends = np.zeros(jobs, np.int64), float("inf")

    async def run(job: int) -> None:
        call = channels[job].unary_unary(method)
        while time.perf_counter() < ends:
            await call(requests[int(counts[job]) % len(requests)], timeout=TIMEOUT_SECONDS, metadata=METADATA)
            counts[job] += 1

    running = [asyncio.create_task(run(job)) for job in range(jobs)]
    while counts.min() < 2:  # all are connected
        await asyncio.sleep(0.01)
    counts[:] = 0
    began = time.perf_counter()
    ends = began + seconds
    await asyncio.gather(*running)
    taken = time.perf_counter() - began
    await asyncio.gather(*[channel.close() for channel in channels])
    return float(counts.sum() / taken), float(counts.min() / counts.mean())


def agree(rank: int, rounds: int) -> dict[str, float]:
    """Milliseconds and CPU milliseconds of a rank's rounds, and of bare collectives of the same bytes."""
    world_size, template = dist.get_world_size(), flatten({"n": torch.zeros(1, dtype=torch.int64)}).empty()
    samples = RankSamples(
        costs=np.full(AGREED_SAMPLES, 7), lengths=np.ones((AGREED_SAMPLES, 1), np.int64),
        sizes=np.full(AGREED_SAMPLES, 8), batch_sizes=(AGREED_SAMPLES,),
    )  # fmt: skip
    contribution, lead = Contribution(samples=samples, schema=schema_number(template.schema)), None
    communicators = take_communicators(read_membership(None, None), timedelta(seconds=120))
    config = StreamConfig(loader="rounds", balance=False, options=BalanceOptions())
    if communicators.leads:
        lead = make_lead(config, template=template, nodes=["here"] * world_size)
    shared = Rounds(config, communicators, counters=Counters(), template=template, lead=lead)
    sent, received = torch.from_numpy(contribution.pack()), torch.zeros(DIRECTIVE_BYTES, dtype=torch.uint8)
    table, directives = sent.repeat(world_size, 1).unbind(), received.repeat(world_size, 1).unbind()

    def one_round() -> None:
        ticket = Ticket(0, contribution)
        shared.put(ticket)
        ticket.future.result(60)

    def bare() -> None:
        dist.gather(sent, list(table) if rank == 0 else None, 0)
        dist.scatter(received, list(directives) if rank == 0 else None, 0)

    times: dict[str, list[float]] = {"p50_ms": [], "floor_ms": []}
    cpu = dict.fromkeys(times, 0.0)
    for turn in range(TURNS + 1):  # the first to warm up
        for name, work in (("p50_ms", one_round), ("floor_ms", bare)):
            dist.barrier()
            began = time.process_time()
            taken = [_milliseconds(work) for _ in range(rounds // TURNS)]
            times[name] += taken if turn else []
            cpu[name] += (time.process_time() - began) * 1e3 if turn else 0.0
    shared.close(10)
    medians = {name: float(np.median(each)) for name, each in times.items()}
    return medians | {"cpu_ms": cpu["p50_ms"] / rounds, "bare_cpu_ms": cpu["floor_ms"] / rounds}


def measure_agreement(worlds: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """Rounds that nobody plans, by number of ranks; the median rank's times, the CPU time of those that do not lead."""
    entries = []
    for ranks in worlds:
        others = run_ranks(ranks, agree, rounds)[1:]
        entry: dict[str, Any] = {"ranks": ranks, "bytes": 24 * AGREED_SAMPLES}
        entry |= {name: float(np.median([one[name] for one in others])) for name in others[0]}
        entry |= {
            "over_floor": entry["p50_ms"] / entry["floor_ms"], "cpu_over_bare": entry["cpu_ms"] / entry["bare_cpu_ms"]
        }  # fmt: skip
        print(
            f"{ranks:5} ranks agree: p50 {entry['p50_ms']:.2f} ms, bare collectives {entry['floor_ms']:.2f}; CPU "
            f"{entry['cpu_ms']:.2f} and {entry['bare_cpu_ms']:.2f} ms",
            flush=True,
        )
        entries.append(entry)
    return entries


class _Echo(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers a call of `/echo/N` with the first N bytes of its request."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        size = int(details.method.rpartition("/")[2])

        async def answer(request: bytes, _: object) -> bytes:
            return request[:size]

        return grpc.unary_unary_rpc_method_handler(answer)


async def _serve_echo(end: Connection) -> None:
    server = grpc.aio.server(handlers=[_Echo()], options=[*_CHANNEL, ("grpc.so_reuseport", 0)])
    end.send(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    await server.wait_for_termination()


def _run_echo(end: Connection) -> None:
    asyncio.run(_serve_echo(end))


@contextmanager
def running_echo() -> Iterator[str]:
    """The address of a server in a process of its own that does nothing but gRPC: the least that any service takes."""
    ours, theirs = zygote.context.Pipe(duplex=False)
    process = zygote.process(_run_echo, theirs)
    theirs.close()  # so that `recv` raises when the process has died
    try:
        yield f"127.0.0.1:{ours.recv()}"
    finally:
        process.kill()
        process.join(10)


def _milliseconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    options = read_options(__doc__, quick="a second of each, to see that it works")
    seconds = 1.0 if options.quick else 10.0
    warm_up()
    with running_balancer("--log-level", "warning", interpreter=True) as balancer, running_echo() as echo:
        sizes = measure_sizes(balancer.address, echo, RANKS, seconds)
        jobs = asyncio.run(measure_jobs(balancer.address, echo, JOBS, seconds))
    agreement = measure_agreement(WORLDS, 40 if options.quick else 400)
    shape = {"samples_per_rank": SAMPLES, "fields": FIELDS, "ranks_of_each_job": JOB_RANKS}
    write(options.json, shape | {"sizes": sizes, "jobs": jobs, "agreement": agreement})


if __name__ == "__main__":
    main()
