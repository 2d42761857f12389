"""Attacks by content: messages that are accepted, and ask for more than they should."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

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
    round_field,
    submit,
    varint,
)
from benchmarks.rendezvous_load import METHOD, request_bytes
from evenkeel.protocol import balancer_pb2 as pb


async def options_that_crash(attacker: Attacker) -> None:
    """A tolerance of 1e12, extreme speeds, float costs and a window: memory errors in the kernels."""
    rng = np.random.default_rng(0)
    for tolerance in (1e12, 1e300, 1e3):
        speeds = np.exp(rng.uniform(np.log(2.7e-6), np.log(9e4), 8))
        options = pb.PartitionOptions(tolerance=tolerance, speeds=speeds.tobytes())
        call = await attacker.stream(join(attacker.job(), 8, window=4, options=options))
        for number in range(10):
            bodies = [
                body(rng.lognormal(5, 2, 16), rank=rank, batch_sizes=[4] * 4, timeout_ms=2000) for rank in range(8)
            ]
            if await quietly(call.write(request_bytes(bodies, number, grouped=True))) is None:
                break
            await quietly(call.read(), 3)
            await asyncio.sleep(0.05)


async def distinct_rounds(attacker: Attacker) -> None:
    """30,000 rounds in one message, and then the stream ends."""
    one = body(np.zeros(0, "<i8"))
    message = b"".join(b"\x0a" + bytes([len(part)]) + part for n in range(30_000) for part in [round_field(n) + one])
    while attacker.goes_on:
        call = await attacker.stream(join(attacker.job(), 2))
        await quietly(call.write(group(message)))
        reader = asyncio.create_task(drain(call))
        await asyncio.sleep(1.0)
        call.cancel()
        reader.cancel()


async def empty_submits(attacker: Attacker) -> None:
    """300,000 submissions of two bytes in one message."""
    while attacker.goes_on:
        call = await attacker.stream(join(attacker.job(), 2))
        reader = asyncio.create_task(drain(call))
        await quietly(call.write(group(b"\x0a\x00" * 300_000)))
        await asyncio.sleep(1.0)
        call.cancel()
        reader.cancel()


async def large_windows(attacker: Attacker) -> None:
    """Windows of 64 batches: 1,024 ranks with 256 samples each, again and again."""
    call = await attacker.stream(join(attacker.job(), 1024, window=64))
    rng = np.random.default_rng(0)
    bodies = [
        body(rng.integers(1, 1 << 20, 256).astype("<i8"), rank=rank, batch_sizes=[4] * 64, timeout_ms=10_000)
        for rank in range(1024)
    ]
    reader, number = asyncio.create_task(drain(call)), 0
    while attacker.goes_on:
        for begin in range(0, 1024, 256):
            await quietly(call.write(request_bytes(bodies[begin : begin + 256], number, grouped=True)))
        number += 1
        await asyncio.sleep(0.5)
    reader.cancel()


async def many_windows(attacker: Attacker) -> None:
    """60 rounds of 64 ranks and 128 samples in windows of 64, at once."""
    rng = np.random.default_rng(0)
    while attacker.goes_on:
        call = await attacker.stream(join(attacker.job(), 64, window=64))
        bodies = [
            body(rng.integers(1, 1 << 20, 128).astype("<i8"), rank=rank, batch_sizes=[2] * 64, timeout_ms=5000)
            for rank in range(64)
        ]
        reader = asyncio.create_task(drain(call))
        for number in range(60):
            await quietly(call.write(request_bytes(bodies, number, grouped=True)))
        await asyncio.sleep(2.0)
        reader.cancel()


async def undecided_rounds(attacker: Attacker) -> None:
    """Rounds of large submissions that wait for another rank, compressed: zeros cost nothing to send."""
    one = body(np.zeros(65_536, "<i8"), 8)
    for _ in range(4):
        call = await attacker.stream(
            join(attacker.job(), 2, alone=True, fields=8), attacker.channel(compression=grpc.Compression.Gzip)
        )
        reader = asyncio.create_task(drain(call))
        for number in range(64):
            await quietly(call.write(submit(number, one)))
            await asyncio.sleep(0.02)
            if not attacker.goes_on:
                break
        reader.cancel()


async def remembered_plans(attacker: Attacker) -> None:
    """Plans that are large and remembered."""
    one = body(np.ones(65_536, "<i8"), 4)
    for _ in range(3):
        call = await attacker.stream(join(attacker.job(), 1, alone=True, fields=4))
        for number in range(64):
            await quietly(call.write(submit(number, one)))
            await quietly(call.read())
            await asyncio.sleep(0.02)
            if not attacker.goes_on:
                return


async def overflowing_costs(attacker: Attacker) -> None:
    """Integer costs at the edge of what 64 bits hold."""
    for value in (2**61, 2**62, 2**63 - 1, 2**52):
        call = await attacker.stream(join(attacker.job(), 2))
        for number in range(20):
            bodies = [body(np.array([value // 2, value // 2], "<i8"), rank=rank) for rank in range(2)]
            await quietly(call.write(request_bytes(bodies, number, grouped=True)))
            await quietly(call.read(), 3)


async def sinking_deadlines(attacker: Attacker) -> None:
    """The same submission again and again, each with an earlier deadline."""
    call = await attacker.stream(join(attacker.job(), 2, alone=True))
    reader, empty = asyncio.create_task(drain(call)), np.zeros(0, "<i8")
    for timeout in range(60_000, 30_000, -10):
        await quietly(call.write(submit(timeout % 64, body(empty, timeout_ms=timeout))))
        await asyncio.sleep(0.002)
        if not attacker.goes_on:
            break
    reader.cancel()


async def fields_of_two_bytes(attacker: Attacker) -> None:
    """Submissions and Joins that consist of tiny fields by the million."""
    for tiny in (b"\x5a\x00" * 1_900_000, b"\x40\x01" * 1_900_000, b"\xfa\x07\x00" * 1_300_000):
        call = await attacker.stream(join(attacker.job(), 1, alone=True))
        await quietly(call.write(b"\x12" + varint(len(tiny)) + tiny))
        await quietly(call.read(), 5)
        call = attacker.channel().stream_stream(METHOD)(metadata=AUTHORIZED)
        await quietly(call.write(b"\x0a" + varint(len(tiny)) + tiny))
        await quietly(call.read(), 5)
        await asyncio.sleep(0.3)


async def lies_about_lengths(attacker: Attacker) -> None:
    """Arrays that are longer or shorter than what the message says."""
    call = await attacker.stream(join(attacker.job(), 1, alone=True, fields=3))
    reader, number = asyncio.create_task(drain(call)), 0
    rng = np.random.default_rng(0)
    while attacker.goes_on:
        message = pb.Submit(
            round=number, num_samples=int(rng.integers(0, 1 << 32)), costs_i64=rng.bytes(int(rng.integers(0, 4096))),
            lengths=rng.bytes(int(rng.integers(0, 1 << 16))), sizes=rng.bytes(64), timeout_ms=1000,
        )  # fmt: skip
        await quietly(call.write(pb.BalanceRequest(submit=message).SerializeToString()))
        number += 1
        await asyncio.sleep(0.01)
    reader.cancel()


async def large_messages(attacker: Attacker) -> None:
    """Messages of the largest size that is taken, one after another."""
    call = await attacker.stream(join(attacker.job(), 1, alone=True, fields=15))
    reader, number = asyncio.create_task(drain(call)), 0
    one = body(np.ones(60_000, "<i8"), 15)
    while attacker.goes_on:
        await quietly(call.write(submit(number, one)))
        number += 1
        await asyncio.sleep(0.25)
    reader.cancel()


def attacks() -> Iterator[Callable[[Attacker], Awaitable[None]]]:
    """All of them."""
    yield from (
        options_that_crash,
        distinct_rounds,
        empty_submits,
        large_windows,
        many_windows,
        undecided_rounds,
        remembered_plans,
        overflowing_costs,
        sinking_deadlines,
        fields_of_two_bytes,
        lies_about_lengths,
        large_messages,
    )
