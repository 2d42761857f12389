"""Attacks by number: more sessions, streams, calls and answers than one should have."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
import numpy as np

from benchmarks.attack_client import (
    AUTHORIZED,
    Attacker,
    body,
    drain,
    group,
    join,
    quietly,
    submit,
)
from benchmarks.rendezvous_load import METHOD
from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol import balancer_pb2_grpc as pb_grpc


async def wide_joins(attacker: Attacker) -> None:
    """Streams for 4,096 ranks with 4,096 fields."""
    message = join("", 4096, fields=4096)
    channel = attacker.channel()
    while attacker.goes_on:
        message.job = attacker.job()
        call = await attacker.stream(message, channel)
        await asyncio.sleep(0.3)
        call.cancel()


async def sessions_by_calls(attacker: Attacker) -> None:
    """1,024 sessions by unary calls."""
    stub = pb_grpc.BalancerServiceStub(attacker.channel())  # type: ignore[no-untyped-call]
    for _ in range(64):
        requests = [
            pb.BalanceRoundRequest(join=join(attacker.job(), 2, alone=True), submit=pb.Submit(timeout_ms=100))
            for _ in range(16)
        ]
        await asyncio.gather(
            *(quietly(stub.BalanceRound(request, timeout=5, metadata=AUTHORIZED)) for request in requests)
        )


async def many_streams(attacker: Attacker) -> None:
    """2,000 streams that join and stay."""
    channels = [attacker.channel() for _ in range(8)]
    message = join(attacker.job(), 2000, alone=True)
    for number in range(2000):
        message.rank = number
        await attacker.stream(message, channels[number % 8])
        await asyncio.sleep(0.002)
        if not attacker.goes_on:
            break


async def refused_joins(attacker: Attacker) -> None:
    """Joins that are refused, with long names: lines for the log."""
    channel = attacker.channel()
    message = join("hostile-" + "x" * 240, alone=True, group="y" * 256, loader="z" * 256)
    await attacker.stream(message, channel)
    message.run_id = "r" * 256
    while attacker.goes_on:
        calls = [attacker.stream(message, channel) for _ in range(8)]
        for call in await asyncio.gather(*calls):
            call.cancel()
        await asyncio.sleep(0.05)


async def five_thousand_calls(attacker: Attacker) -> None:
    """5,000 unary calls at a time, which wait for another rank."""
    stub = pb_grpc.BalancerServiceStub(attacker.channel())  # type: ignore[no-untyped-call]
    job = attacker.job()
    outcomes: dict[str, int] = {}

    async def call(number: int) -> None:
        request = pb.BalanceRoundRequest(
            join=join(job, 2, alone=True), submit=pb.Submit(round=number % 64, timeout_ms=3000)
        )
        try:
            await stub.BalanceRound(request, timeout=20, metadata=AUTHORIZED)
            said = "answered"
        except grpc.RpcError as error:
            name = error.code().name
            said = name if (error.details() or name) != name else f"{name} without a reason"
        outcomes[said] = outcomes.get(said, 0) + 1

    await asyncio.gather(*(call(number) for number in range(5000)))
    attacker.outcomes |= outcomes


async def names_of_jobs(attacker: Attacker) -> None:
    """300 jobs with a decided round each: labels for the metrics."""
    channel = attacker.channel()
    for _ in range(300):
        call = await attacker.stream(join(attacker.job(), 1, alone=True), channel)
        await quietly(call.write(submit(0, body(np.ones(1, "<i8")))))
        await quietly(call.read())
        await quietly(call.done_writing())
        await asyncio.sleep(0.01)


async def untaken_answers(attacker: Attacker) -> None:
    """Streams that never take their answers while they go on asking."""
    one = body(np.ones(4096, "<i8"), 4)
    calls = [await attacker.stream(join(attacker.job(), 1, alone=True, fields=4)) for _ in range(16)]

    async def ask(call: Any) -> None:
        for number in range(1000):
            await quietly(call.write(submit(number, one)), 1)
            await asyncio.sleep(0.05)
            if not attacker.goes_on:
                return

    await asyncio.gather(*(ask(call) for call in calls))


async def the_same_on_many_streams(attacker: Attacker) -> None:
    """300 streams of one rank, all of which wait for the same rounds."""
    message, channel = join(attacker.job(), 2, alone=True), attacker.channel()
    calls = [await attacker.stream(message, channel) for _ in range(300)]
    one = body(np.ones(8, "<i8"), timeout_ms=3000)
    for number in range(20):
        await asyncio.gather(*(quietly(call.write(submit(number, one))) for call in calls))
        await asyncio.sleep(0.1)
        if not attacker.goes_on:
            break


async def statistics_of_all(attacker: Attacker) -> None:
    """Statistics of sessions with thousands of ranks."""
    channel = attacker.channel()
    stub = pb_grpc.BalancerServiceStub(channel)  # type: ignore[no-untyped-call]
    submits = b"".join(
        b"\x0a" + bytes([len(p)]) + p for rank in range(4096) for p in [pb.Submit(rank=rank).SerializeToString()]
    )
    for _ in range(8):
        call = await attacker.stream(join(attacker.job(), 4096), channel)
        await quietly(call.write(group(submits)))
        await quietly(call.read(), 5)
    while attacker.goes_on:
        await quietly(stub.GetSessionStats(pb.GetSessionStatsRequest(), timeout=5, metadata=AUTHORIZED))
        await asyncio.sleep(0.1)


async def ending_streams(attacker: Attacker) -> None:
    """400 streams of which some end all the time, also while the service looks at their tokens again."""
    message, channel = join(attacker.job(), 2, alone=True), attacker.channel()
    calls = [await attacker.stream(message, channel) for _ in range(400)]
    while attacker.goes_on:
        for ending in calls[:20]:
            ending.cancel()
        calls = calls[20:] + [await attacker.stream(message, channel) for _ in range(20)]


async def flood_of_messages(attacker: Attacker) -> None:
    """Eight streams that send small rounds as fast as their rates allow."""

    async def flood() -> None:
        call = await attacker.stream(join(attacker.job(), 1, alone=True))
        reader, one = asyncio.create_task(drain(call)), body(np.ones(16, "<i8"))
        number = 0
        while attacker.goes_on:
            await quietly(call.write(submit(number, one)))
            number += 1
            await asyncio.sleep(0.008)
        reader.cancel()

    await asyncio.gather(*(flood() for _ in range(8)))


async def reset_streams(attacker: Attacker) -> None:
    """Streams that are opened and reset at once."""
    channel = attacker.channel()
    while attacker.goes_on:
        for _ in range(16):
            channel.stream_stream(METHOD)(metadata=AUTHORIZED).cancel()
        await asyncio.sleep(0.05)


def attacks() -> Iterator[Callable[[Attacker], Awaitable[None]]]:
    """All of them."""
    yield from (
        wide_joins,
        sessions_by_calls,
        many_streams,
        refused_joins,
        five_thousand_calls,
        names_of_jobs,
        untaken_answers,
        the_same_on_many_streams,
        statistics_of_all,
        ending_streams,
        flood_of_messages,
        reset_streams,
    )
