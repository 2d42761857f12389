"""A rank's side of the wire, for tests: a real channel and a real stream."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

import grpc

from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol import balancer_pb2_grpc as pb_grpc
from tests.services.balancer.samples import join_message, submit_message

SECONDS = 60.0  # of patience, where the machine has other work


class Rank:
    """One stream on a channel of its own."""

    def __init__(self, port: int, rank: int = 0, world_size: int = 2, *, buffer: int = 0, **join: Any) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        if buffer:  # bytes that it takes before somebody reads them
            options += [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", buffer)]
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
        self.stub: Any = pb_grpc.BalancerServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self.call: Any = None
        self._join = join_message(rank, world_size=world_size, **join)

    async def open(self) -> pb.BalanceResponse:
        """Opens a stream and joins; returns the first response."""
        self.call = self.stub.Balance()
        await self.call.write(pb.BalanceRequest(join=self._join))
        return await self.receive()

    async def submit(self, round_number: int, costs: list[float], **changes: Any) -> None:
        await self.call.write(pb.BalanceRequest(submit=submit_message(round_number, costs, **changes)))

    async def receive(self) -> Any:
        """The next response, or `grpc.aio.EOF`."""
        return await asyncio.wait_for(self.call.read(), SECONDS)

    async def answer(self) -> pb.Answer:
        response = await self.receive()
        assert response.WhichOneof("response") == "answer", response
        return response.answer

    async def round(self, round_number: int, costs: list[float], **changes: Any) -> pb.Answer:
        await self.submit(round_number, costs, **changes)
        return await self.answer()

    async def __aenter__(self) -> Rank:
        first = await self.open()
        assert first.WhichOneof("response") == "joined", first
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.call.cancel()
        await self.channel.close()
