"""A balancer that is stopped goes on with rounds until the ranks are elsewhere."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from evenkeel.protocol import balancer_pb2 as pb
from services.balancer.server import SERVICE
from tests.services.balancer.conftest import StartServer
from tests.services.balancer.ranks import Rank

_OWN = [("grpc.use_local_subchannel_pool", 1)]


async def test_who_does_not_go_elsewhere_is_answered_when_the_drain_is_over(start_server: StartServer) -> None:
    server = await start_server(drain_seconds=1.0, grace_seconds=20.0)
    async with Rank(server.port, 0) as waiting:
        health = health_pb2_grpc.HealthStub(waiting.channel)
        for service in ("", SERVICE):
            reply = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=30)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        await waiting.submit(0, [1], timeout_ms=60_000)
        while not next(iter(server.hub.registry)).open_rounds:
            await asyncio.sleep(0.01)
        stopping = asyncio.create_task(server.stop())
        assert (await waiting.receive()).leaving == pb.Leaving()
        late = Rank(server.port, 1)
        with pytest.raises(grpc.RpcError) as refused:
            await late.open()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE, "nobody listens any more"
        await late.channel.close()
        assert (await waiting.answer()).decision.reason == pb.Decision.REASON_DRAINING
        last = await waiting.receive()
        assert last.error.code == pb.ERROR_CODE_DRAINING
        assert await waiting.receive() is grpc.aio.EOF
        await asyncio.wait_for(stopping, 60)


async def test_rounds_go_on_until_all_ranks_of_a_session_are_elsewhere(start_server: StartServer) -> None:
    server = await start_server(drain_seconds=60.0, grace_seconds=200.0)
    elsewhere = pb.BalanceRequest(elsewhere=pb.Elsewhere())
    async with Rank(server.port, 0) as one, Rank(server.port, 1) as other:
        await one.call.write(elsewhere)  # nobody has asked: it says nothing
        for number in range(2):
            await one.submit(number, [1])
            assert (await other.round(number, [2])).decision.outcome == pb.Decision.OUTCOME_BALANCED
            await one.answer()
        stopping = asyncio.create_task(server.stop())
        for rank in (one, other):
            assert (await rank.receive()).leaving == pb.Leaving()
        await one.submit(2, [1])
        assert (await other.round(2, [2])).decision.outcome == pb.Decision.OUTCOME_BALANCED, "rounds go on"
        await one.answer()
        await one.call.write(elsewhere)
        await one.submit(3, [1], timeout_ms=60_000)
        while 3 not in next(iter(server.hub.registry)).open_rounds:
            await asyncio.sleep(0.01)
        await other.call.write(elsewhere)  # while one of them has begun round 3
        for rank in (one, other):
            assert (await rank.receive()).leaving == pb.Leaving(from_round=4)
        assert (await one.round(4, [1])).decision.reason == pb.Decision.REASON_DRAINING, "it had not read that yet"
        assert not stopping.done()
        assert (await other.round(3, [2])).decision.outcome == pb.Decision.OUTCOME_BALANCED
        assert (await one.answer()).decision.outcome == pb.Decision.OUTCOME_BALANCED
        for rank in (one, other):
            assert (await rank.receive()).error.code == pb.ERROR_CODE_DRAINING
        await asyncio.wait_for(stopping, 40)  # not the drain's 60 s
