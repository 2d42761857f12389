"""Attacks by calls: messages that are accepted, and ask for more than they should."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
import numpy as np

from benchmarks.rendezvous_load import METHOD, request_bytes
from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol import balancer_pb2_grpc as pb_grpc

TOKEN = "token-of-the-hostile-job-0123456789abcdef"
_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_receive_message_length", 64 << 20),
]
_AUTHORIZED = (("authorization", f"Bearer {TOKEN}"),)


class Attacker:
    """What an attack has at hand.

    Attributes:
        port: of the balancer.
        seconds: how long to go on.
        outcomes: what it counted.
    """

    def __init__(self, port: int, seconds: float) -> None:
        self.port = port
        self.seconds = seconds
        self.until = asyncio.get_running_loop().time() + seconds
        self._channels: list[grpc.aio.Channel] = []
        self._names = iter(range(1 << 60))
        self.outcomes: dict[str, int] = {}

    @property
    def goes_on(self) -> bool:
        """Whether there is time left."""
        return asyncio.get_running_loop().time() < self.until

    def channel(self, **options: Any) -> grpc.aio.Channel:
        """A connection of its own."""
        opened = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=_OPTIONS, **options)
        self._channels.append(opened)
        return opened

    def job(self) -> str:
        """A new name."""
        return f"hostile-{random.getrandbits(32):x}-{next(self._names)}"

    async def stream(self, join: pb.Join, channel: grpc.aio.Channel | None = None) -> Any:
        """A stream that has joined, or was refused."""
        call = (channel or self.channel()).stream_stream(METHOD)(metadata=_AUTHORIZED)
        await call.write(pb.BalanceRequest(join=join).SerializeToString())
        with contextlib.suppress(grpc.RpcError):
            await asyncio.wait_for(call.read(), 20)
        return call

    async def close(self) -> None:
        """Ends all connections."""
        await asyncio.gather(*(channel.close(0) for channel in self._channels))


def join(job: str, world: int = 1, *, alone: bool = False, fields: int = 1, window: int = 1, **more: Any) -> pb.Join:
    """A stream for all ranks of a job, or for rank 0 alone."""
    kinds = [
        pb.Field(path=f"a-long-name-of-a-field-{i}", dtype="int64", kind=pb.Field.KIND_JAGGED) for i in range(fields)
    ]
    return pb.Join(
        protocol_versions=[1], job=job, run_id="run", world_size=world, ranks=() if alone else range(world),
        window=window, schema=pb.Schema(hash=b"hash", fields=kinds), **more,
    )  # fmt: skip


def body(
    costs: np.ndarray[Any, Any], fields: int = 1, *, rank: int = 0, timeout_ms: int = 60_000, **more: Any
) -> bytes:
    """A submission without its round."""
    kind = "costs_f64" if costs.dtype == np.float64 else "costs_i64"
    arrays: dict[str, Any] = {kind: costs.tobytes(), "lengths": np.ones((len(costs), fields), "<u4").tobytes()}
    return pb.Submit(num_samples=len(costs), timeout_ms=timeout_ms, rank=rank, **arrays, **more).SerializeToString()


def submit(round_number: int, one: bytes) -> bytes:
    """A request with one submission."""
    return request_bytes([one], round_number, grouped=False)


async def quietly(work: Awaitable[Any], seconds: float = 20.0) -> Any:
    """What comes of it, or None if it was refused or takes too long."""
    try:
        return await asyncio.wait_for(work, seconds)
    except (grpc.RpcError, TimeoutError, asyncio.InvalidStateError):
        return None


async def drain(call: Any) -> None:
    """Reads a stream to its end."""
    with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
        while await call.read() is not grpc.aio.EOF:
            pass


# ------------------------------------------------------------------ those of the report


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
    message = b"".join(b"\x0a" + bytes([len(part)]) + part for n in range(30_000) for part in [_round(n) + one])
    while attacker.goes_on:
        call = await attacker.stream(join(attacker.job(), 2))
        await quietly(call.write(_group(message)))
        reader = asyncio.create_task(drain(call))
        await asyncio.sleep(1.0)
        call.cancel()
        reader.cancel()


async def empty_submits(attacker: Attacker) -> None:
    """300,000 submissions of two bytes in one message."""
    while attacker.goes_on:
        call = await attacker.stream(join(attacker.job(), 2))
        reader = asyncio.create_task(drain(call))
        await quietly(call.write(_group(b"\x0a\x00" * 300_000)))
        await asyncio.sleep(1.0)
        call.cancel()
        reader.cancel()


async def wide_joins(attacker: Attacker) -> None:
    """Streams for 4,096 ranks with 4,096 fields."""
    message = join("", 4096, fields=4096)
    channel = attacker.channel()
    while attacker.goes_on:
        message.job = attacker.job()
        call = await attacker.stream(message, channel)
        await asyncio.sleep(0.3)
        call.cancel()


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


async def sessions_by_calls(attacker: Attacker) -> None:
    """1,024 sessions by unary calls."""
    stub = pb_grpc.BalancerServiceStub(attacker.channel())  # type: ignore[no-untyped-call]
    for _ in range(64):
        requests = [
            pb.BalanceRoundRequest(join=join(attacker.job(), 2, alone=True), submit=pb.Submit(timeout_ms=100))
            for _ in range(16)
        ]
        await asyncio.gather(
            *(quietly(stub.BalanceRound(request, timeout=5, metadata=_AUTHORIZED)) for request in requests)
        )


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
            await stub.BalanceRound(request, timeout=20, metadata=_AUTHORIZED)
            said = "answered"
        except grpc.RpcError as error:
            said = error.code().name
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


async def overflowing_costs(attacker: Attacker) -> None:
    """Integer costs at the edge of what 64 bits hold."""
    for value in (2**61, 2**62, 2**63 - 1, 2**52):
        call = await attacker.stream(join(attacker.job(), 2))
        for number in range(20):
            bodies = [body(np.array([value // 2, value // 2], "<i8"), rank=rank) for rank in range(2)]
            await quietly(call.write(request_bytes(bodies, number, grouped=True)))
            await quietly(call.read(), 3)


# ------------------------------------------------------------------ more


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
        await quietly(call.write(_group(submits)))
        await quietly(call.read(), 5)
    while attacker.goes_on:
        await quietly(stub.GetSessionStats(pb.GetSessionStatsRequest(), timeout=5, metadata=_AUTHORIZED))
        await asyncio.sleep(0.1)


async def fields_of_two_bytes(attacker: Attacker) -> None:
    """Submissions and Joins that consist of tiny fields by the million."""
    for tiny in (b"\x5a\x00" * 1_900_000, b"\x40\x01" * 1_900_000, b"\xfa\x07\x00" * 1_300_000):
        call = await attacker.stream(join(attacker.job(), 1, alone=True))
        await quietly(call.write(b"\x12" + _varint(len(tiny)) + tiny))
        await quietly(call.read(), 5)
        call = attacker.channel().stream_stream(METHOD)(metadata=_AUTHORIZED)
        await quietly(call.write(b"\x0a" + _varint(len(tiny)) + tiny))
        await quietly(call.read(), 5)
        await asyncio.sleep(0.3)


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
            channel.stream_stream(METHOD)(metadata=_AUTHORIZED).cancel()
        await asyncio.sleep(0.05)


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


def _round(number: int) -> bytes:
    return b"\x08" + _varint(number)


def _group(content: bytes) -> bytes:
    return b"\x1a" + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def attacks() -> Iterator[Callable[[Attacker], Awaitable[None]]]:
    """All of them."""
    yield from (
        options_that_crash, distinct_rounds, empty_submits, wide_joins, large_windows, many_windows, sessions_by_calls,
        undecided_rounds, remembered_plans, many_streams, refused_joins, five_thousand_calls, names_of_jobs,
        overflowing_costs, untaken_answers, sinking_deadlines, the_same_on_many_streams, statistics_of_all,
        fields_of_two_bytes, flood_of_messages, reset_streams, lies_about_lengths, large_messages,
    )  # fmt: skip
