"""Clients that hold what they can: others still get in, and the service stops when told to."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from benchmarks.attack_wires import Wire
from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol import balancer_pb2_grpc as pb_grpc
from services.balancer.server import BalancerServer
from services.security.tokens import hash_token
from tests.services.balancer.conftest import StartServer
from tests.services.balancer.ranks import Rank
from tests.services.balancer.samples import join_message, submit_message

CALLERS = ("greedy", "modest")


def authorized(caller: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer token-of-{caller}-0123456789abcdef"),)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    """Two callers, each with jobs of its own."""
    path = tmp_path / "tokens.yml"
    hashes = {caller: hash_token(authorized(caller)[0][1].removeprefix("Bearer ")) for caller in CALLERS}
    entries = [{"name": caller, "sha256": hashes[caller], "jobs": [f"{caller}*"]} for caller in CALLERS]
    path.write_text(yaml.safe_dump({"tokens": entries}))
    return path


async def call(channel: grpc.aio.Channel, caller: str, job: str, *, timeout: float = 10.0, **changes: Any) -> pb.Answer:
    stub: Any = pb_grpc.BalancerServiceStub(channel)  # type: ignore[no-untyped-call]
    request = pb.BalanceRoundRequest(
        join=join_message(0, world_size=changes.pop("world_size", 1), job=job),
        submit=submit_message(0, [1.0], **changes),
    )
    response = await stub.BalanceRound(request, timeout=timeout, metadata=authorized(caller))
    return response.answer  # type: ignore[no-any-return]


async def test_sessions_of_one_token_shut_nobody_else_out(start_server: StartServer, token_file: Path) -> None:
    server = await start_server(max_sessions=16, token_file=token_file)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        answers = [await call(channel, "greedy", f"greedy-{n}") for n in range(16)]
        assert Counter(answer.WhichOneof("result") for answer in answers) == {"decision": 8, "error": 8}
        refused = next(answer.error for answer in answers if answer.HasField("error"))
        assert (refused.code, refused.field) == (pb.ERROR_CODE_LIMIT_EXCEEDED, "max_sessions")
        assert (await call(channel, "modest", "modest")).HasField("decision")


async def test_streams_of_one_token_shut_nobody_else_out(start_server: StartServer, token_file: Path) -> None:
    server = await start_server(max_streams=8, token_file=token_file)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub: Any = pb_grpc.BalancerServiceStub(channel)  # type: ignore[no-untyped-call]

        async def open_stream(caller: str, number: int) -> str:
            stream = stub.Balance(metadata=authorized(caller))
            await stream.write(pb.BalanceRequest(join=join_message(number, world_size=8, job=caller)))
            streams.append(stream)
            response = await asyncio.wait_for(stream.read(), 60)
            return str(response.WhichOneof("response"))

        streams: list[Any] = []
        assert Counter([await open_stream("greedy", n) for n in range(6)]) == {"joined": 4, "error": 2}
        assert await open_stream("modest", 0) == "joined"
        assert server.servicer.streams.slots.used == 5
        for stream in streams:
            stream.cancel()


async def test_calls_beyond_what_there_is_room_for_are_refused_by_name(
    start_server: StartServer, token_file: Path
) -> None:
    server = await start_server(max_calls=64, token_file=token_file)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:

        async def wait_for_nobody(number: int) -> str:
            try:
                answer = await call(channel, "greedy", "greedy", timeout_ms=1500, world_size=2, timeout=30)
            except grpc.aio.AioRpcError as error:
                clear = "calls of this caller are under way" in (error.details() or "")
                return error.code().name if clear else str(error)
            return "answered" if answer.HasField("decision") else answer.error.field

        waiting = asyncio.gather(*(wait_for_nobody(number) for number in range(300)))
        await asyncio.sleep(0.5)
        assert (await call(channel, "modest", "modest")).HasField("decision"), "others are served meanwhile"
        outcomes = Counter(await waiting)
    assert sum(outcomes.values()) == 300
    assert outcomes["RESOURCE_EXHAUSTED"] >= 300 - 2 * 32
    assert outcomes["answered"] >= 1
    assert set(outcomes) <= {"RESOURCE_EXHAUSTED", "answered", "round"}
    assert server.servicer.calls.used == 0


async def test_streams_that_end_while_tokens_are_checked_again(start_server: StartServer, token_file: Path) -> None:
    """The check lets others go on after some streams, and then comes to those that have ended meanwhile."""
    server = await start_server(token_file=token_file)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub: Any = pb_grpc.BalancerServiceStub(channel)  # type: ignore[no-untyped-call]
        stream = stub.Balance(metadata=authorized("greedy"))
        await stream.write(pb.BalanceRequest(join=join_message(0, world_size=1, job="greedy")))
        assert (await stream.read()).HasField("joined")
        (guard,) = server._access._guards
        await stream.done_writing()
        assert await stream.read() == grpc.aio.EOF
        while server._access._guards:
            await asyncio.sleep(0.01)
        for _ in range(20):  # asked for the peer of a call that has ended, gRPC's own context ends the process
            await asyncio.sleep(0.01)
            guard.recheck()
        assert guard.peer().startswith("ipv4:127.0.0.1:")
        assert (await call(channel, "modest", "modest")).HasField("decision")


async def test_thousands_of_calls_at_once_are_all_answered_by_name(start_server: StartServer, token_file: Path) -> None:
    """gRPC itself would drop some of those that wait to be looked at, of anybody, as CANCELLED without a word."""
    server = await start_server(max_calls=64, token_file=token_file)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:

        async def wait_for_nobody() -> str:
            try:
                await call(channel, "greedy", "greedy", timeout_ms=500, world_size=2, timeout=60)
            except grpc.aio.AioRpcError as error:
                clear = "calls of this caller are under way" in (error.details() or "")
                return error.code().name if clear else f"{error.code().name}: {error.details()}"
            return "answered"

        # All of them are sent in one turn of the loop, in which the server, in the same loop, takes none.
        outcomes = Counter(await asyncio.gather(*(wait_for_nobody() for _ in range(2500))))
    assert set(outcomes) == {"RESOURCE_EXHAUSTED", "answered"}, outcomes


async def test_memory_of_one_token_leaves_room_and_comes_back(start_server: StartServer, token_file: Path) -> None:
    server = await start_server(max_memory=8 << 20, token_file=token_file)
    memory = server.hub.registry.memory
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{server.port}", compression=grpc.Compression.Gzip
    ) as channel:  # zeros cost nothing to send: what counts is what they take here
        stub: Any = pb_grpc.BalancerServiceStub(channel)  # type: ignore[no-untyped-call]
        stream = stub.Balance(metadata=authorized("greedy"))
        await stream.write(pb.BalanceRequest(join=join_message(0, world_size=2, job="greedy")))
        await stream.read()
        for number in range(40):
            submit = submit_message(number, [0.0] * 20_000, timeout_ms=60_000)
            await stream.write(pb.BalanceRequest(submit=submit))
        error = (await asyncio.wait_for(stream.read(), 60)).answer.error
        assert (error.code, error.field) == (pb.ERROR_CODE_LIMIT_EXCEEDED, "max_memory")
        assert memory.used <= memory.total / 2 + (1 << 20)
        assert (await call(channel, "modest", "modest")).HasField("decision")
        stream.cancel()
        # Another incarnation of the job takes the place of the first, and with it its memory.
        again = stub.Balance(metadata=authorized("greedy"))
        await again.write(pb.BalanceRequest(join=join_message(0, world_size=2, job="greedy", restart_count=1)))
        assert (await again.read()).HasField("joined")
        assert memory.used < 1 << 20
        again.cancel()


async def stopped_within(server: BalancerServer, seconds: float) -> None:
    await asyncio.wait_for(server.stop(), seconds)
    assert server.stopped


async def test_health_watches_that_take_nothing_hold_up_nothing(start_server: StartServer) -> None:
    server = await start_server(grace_seconds=2.0)
    wires = []
    for _ in range(3):
        wire = Wire(*await asyncio.open_connection("127.0.0.1", server.port))
        wire.begin(window=0)
        for number in range(200):
            wire.call(2 * number + 1, "/grpc.health.v1.Health/Watch", b"")
        wires.append(wire)
    while server._health.watches.used < 100:
        await asyncio.sleep(0.01)
    async with Rank(server.port, 0, 1) as rank:
        assert server._health.watches.used <= 128, "there is room for watches of others"
        assert (await rank.round(0, [1])).HasField("decision")
        await stopped_within(server, 20)
    for wire in wires:
        wire.writer.transport.abort()


async def test_half_open_connections_and_untaken_answers_do_not_keep_it_from_stopping(
    start_server: StartServer,
) -> None:
    server = await start_server(grace_seconds=2.0, metrics_port=0)
    assert server.metrics_port is not None
    wires = [Wire(*await asyncio.open_connection("127.0.0.1", server.port)) for _ in range(20)]
    wires += [Wire(*await asyncio.open_connection("127.0.0.1", server.metrics_port)) for _ in range(20)]
    for wire in wires:
        wire.send(b"PRI * HTTP/2.0\r\n"[:9])
    deaf = Wire(*await asyncio.open_connection("127.0.0.1", server.port))
    deaf.begin(window=0)
    for number in range(4):
        join = pb.BalanceRequest(join=join_message(0, world_size=1, job=f"deaf-{number}")).SerializeToString()
        deaf.call(2 * number + 1, "/evenkeel.balancer.v1.BalancerService/Balance", join)
    while len(server.hub.registry.sessions) < 4:
        await asyncio.sleep(0.01)
    await stopped_within(server, 20)
    for wire in [*wires, deaf]:
        wire.writer.transport.abort()


async def test_messages_that_never_end_take_bounded_memory(start_server: StartServer, token_file: Path) -> None:
    server = await start_server(max_memory=24 << 20, token_file=token_file)
    path, size = "/evenkeel.balancer.v1.BalancerService/Balance", (4 << 20) - 64
    wires = []
    for _ in range(4):
        wire = Wire(*await asyncio.open_connection("127.0.0.1", server.port))
        wire.begin()
        reading = asyncio.create_task(wire.read_windows())
        for stream in range(1, 9, 2):
            join = pb.BalanceRequest(join=join_message(0, world_size=1, job=f"greedy-{stream}")).SerializeToString()
            wire.call(stream, path, join, **dict(authorized("greedy")))
        wires.append((wire, reading))
    while len(server.servicer.streams) < 16:
        await asyncio.sleep(0.01)
    modest = asyncio.create_task(_go_on(server.port))
    announced = b"\0" + size.to_bytes(4, "big") + bytes(size - 1000)  # the rest never comes
    pushing = asyncio.gather(*(wire.push(stream, announced, 60) for wire, _ in wires for stream in range(1, 9, 2)))

    async def until_ended() -> None:
        while any(mailbox.holder[0] == "token greedy" for mailbox in server.servicer.streams.mailboxes):
            await asyncio.sleep(0.05)

    await asyncio.wait_for(until_ended(), 60)
    pushing.cancel()
    modest.cancel()
    (outcome,) = await asyncio.gather(modest, return_exceptions=True)
    assert isinstance(outcome, asyncio.CancelledError), outcome
    for wire, reading in wires:
        reading.cancel()
        wire.writer.transport.abort()


async def _go_on(port: int) -> None:
    """A job that goes through rounds until it is cancelled."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = pb_grpc.BalancerServiceStub(channel)  # type: ignore[no-untyped-call]
        stream = stub.Balance(metadata=authorized("modest"))
        await stream.write(pb.BalanceRequest(join=join_message(0, world_size=1, job="modest")))
        assert (await stream.read()).HasField("joined")
        number = 0
        while True:
            await stream.write(pb.BalanceRequest(submit=submit_message(number, [1.0])))
            assert (await stream.read()).answer.decision.outcome == pb.Decision.OUTCOME_BALANCED
            number += 1
            await asyncio.sleep(0.05)
