"""What attacks by calls have at hand: connections with the attacker's token, and messages piece by piece."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable
from typing import Any

import grpc
import numpy as np

from benchmarks.rendezvous_load import METHOD, request_bytes
from evenkeel.protocol import balancer_pb2 as pb

TOKEN = "token-of-the-hostile-job-0123456789abcdef"
_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_receive_message_length", 64 << 20),
]
AUTHORIZED = (("authorization", f"Bearer {TOKEN}"),)


class Attacker:
    """What an attack has at hand.

    Attributes:
        port: Of the balancer.
        seconds: How long to go on.
        outcomes: What it counted.
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
        call = (channel or self.channel()).stream_stream(METHOD)(metadata=AUTHORIZED)
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


def round_field(number: int) -> bytes:
    """The number of a submission's round, to be put before it."""
    return b"\x08" + varint(number)


def group(content: bytes) -> bytes:
    """A request with submissions in one message."""
    return b"\x1a" + varint(len(content)) + content


def varint(value: int) -> bytes:
    """An integer of Protocol Buffers."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])
