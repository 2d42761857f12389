"""A real server, real channels."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import numpy as np
import pytest
from structlog.testing import capture_logs

from evenkeel.protocol import balancer_pb2 as pb
from services.balancer.server import SERVICE
from tests.services.balancer.conftest import StartServer
from tests.services.balancer.ranks import Rank
from tests.services.balancer.samples import join_message, submit_message

_OWN = [("grpc.use_local_subchannel_pool", 1)]


def i32(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


async def test_rounds_are_decided_alike_and_fit_together(start_server: StartServer) -> None:
    server = await start_server()
    async with AsyncExitStack() as stack:
        ranks = [await stack.enter_async_context(Rank(server.port, rank, 4)) for rank in range(4)]
        for number, sizes in enumerate([(4, 4, 4, 4), (0, 5, 1, 2), (0, 0, 0, 0)]):
            costs = [[float(7 * rank + i + 1) for i in range(n)] for rank, n in enumerate(sizes)]
            answers = await asyncio.gather(*(r.round(number, c) for r, c in zip(ranks, costs, strict=True)))
            decisions = [answer.decision for answer in answers]
            assert [answer.round for answer in answers] == [number] * 4
            assert {d.outcome for d in decisions} == {pb.Decision.OUTCOME_BALANCED}
            assert {d.instance for d in decisions} == {server.instance}
            assert len({d.digest for d in decisions}) == 1
            sent = [[i32(d.destinations).count(to) for to in range(4)] for d in decisions]
            for to, decision in enumerate(decisions):
                received = dict(zip(i32(decision.sources), i32(decision.source_counts), strict=True))
                assert received == {home: sent[home][to] for home in range(4) if sent[home][to]}
                totals = np.frombuffer(decision.source_totals, "<i8")
                expected = [
                    sum(i + 1 for i, rank in enumerate(i32(decisions[home].destinations)) if rank == to)
                    for home in i32(decision.sources)
                ]
                assert totals.tolist() == expected
            loads = [d.balance.own_load_after for d in decisions]
            assert sum(loads) == sum(map(sum, costs))
            assert max(loads) == decisions[0].balance.max_load_after


async def test_a_missing_rank_makes_the_round_identity_for_all_also_later(start_server: StartServer) -> None:
    server = await start_server()
    async with Rank(server.port, 0) as first, Rank(server.port, 1) as second:
        early = (await first.round(3, [1, 2], timeout_ms=50)).decision
        late = (await second.round(3, [1])).decision
        for decision in (early, late):
            assert decision.outcome == pb.Decision.OUTCOME_IDENTITY
            assert decision.reason == pb.Decision.REASON_DEADLINE
            assert list(decision.missing_ranks) == [1]
            assert decision.destinations == b""
        assert early.digest == late.digest
        assert "rank(s) 1" in early.detail


async def test_bad_input_is_answered_and_harms_nobody(start_server: StartServer) -> None:
    server = await start_server()
    async with Rank(server.port, 0) as good, Rank(server.port, 1) as bad:
        await good.submit(0, [1, 2])
        refused = await bad.round(0, [1], costs_f64=np.array([np.nan]).tobytes())
        assert refused.round == 0
        assert refused.error.code == pb.ERROR_CODE_INVALID_ARGUMENT
        assert refused.error.field == "costs_f64[0]"
        assert refused.error.value == "nan"
        assert refused.error.remedy
        assert not refused.error.fatal
        mended = await bad.round(0, [5])
        assert mended.decision.outcome == pb.Decision.OUTCOME_BALANCED
        assert (await good.answer()).decision.digest == mended.decision.digest
        conflict = await bad.round(0, [6])
        assert conflict.error.code == pb.ERROR_CODE_CONFLICTING_SUBMIT


async def test_a_rank_that_reconnects_gets_the_same_decision(start_server: StartServer) -> None:
    server = await start_server()
    async with Rank(server.port, 0) as first:
        async with Rank(server.port, 1) as before:
            await before.submit(0, [3, 4])
        decision = (await first.round(0, [9])).decision
        async with Rank(server.port, 1) as after:
            assert (await after.round(0, [3, 4])).decision.digest == decision.digest
            await asyncio.gather(first.round(1, [1]), after.round(1, [1]))


@pytest.mark.parametrize(
    ("join", "code", "field"),
    [
        ({"protocol_versions": [9]}, pb.ERROR_CODE_VERSION, "protocol_versions"),
        ({"world_size": 3}, pb.ERROR_CODE_RANKS_DIFFER, "world_size"),
        ({"run_id": "other"}, pb.ERROR_CODE_JOB_NAME_TAKEN, "job"),
        ({"window": 4}, pb.ERROR_CODE_RANKS_DIFFER, "window"),
    ],
)
async def test_a_refused_join_ends_its_stream_only(
    start_server: StartServer, join: dict[str, object], code: int, field: str
) -> None:
    server = await start_server()
    async with Rank(server.port, 0) as first, Rank(server.port, 1) as second:
        refused = Rank(server.port, 1, **join)  # type: ignore[arg-type]
        response = await refused.open()
        assert response.error.code == code
        assert response.error.field == field
        assert response.error.fatal
        assert await refused.receive() is grpc.aio.EOF
        await refused.channel.close()
        answers = await asyncio.gather(first.round(0, [1]), second.round(0, [1]))
        assert answers[0].decision.outcome == pb.Decision.OUTCOME_BALANCED


async def test_a_restart_takes_over_and_the_old_streams_end(start_server: StartServer) -> None:
    server = await start_server()
    async with Rank(server.port, 0) as old:
        await old.submit(0, [1])
        async with Rank(server.port, 0, 1, restart_count=1) as new:
            assert (await old.answer()).error.code == pb.ERROR_CODE_SUPERSEDED
            last = await old.receive()
            assert last.error.code == pb.ERROR_CODE_SUPERSEDED
            assert last.error.fatal
            assert await old.receive() is grpc.aio.EOF
            assert (await new.round(0, [1])).decision.outcome == pb.Decision.OUTCOME_BALANCED


async def test_a_stream_must_begin_with_join_and_hold_only_one(start_server: StartServer) -> None:
    server = await start_server(join_timeout_seconds=0.2)
    impatient = Rank(server.port)
    impatient.call = impatient.stub.Balance()
    await impatient.submit(0, [1])
    assert (await impatient.receive()).error.code == pb.ERROR_CODE_NOT_JOINED
    await impatient.channel.close()
    silent = Rank(server.port)
    silent.call = silent.stub.Balance()
    await silent.call.wait_for_connection()
    assert (await silent.receive()).error.code == pb.ERROR_CODE_NOT_JOINED
    await silent.channel.close()
    patient = await start_server()
    async with Rank(patient.port, 0, 1) as twice:
        await twice.call.write(pb.BalanceRequest(join=join_message(0, world_size=1)))
        assert (await twice.receive()).error.fatal


async def test_a_session_that_expired_comes_back_when_its_stream_speaks(start_server: StartServer) -> None:
    server = await start_server(session_expiry_seconds=0.1)
    async with Rank(server.port, 0, 1) as rank:
        await rank.round(7, [1])
        while server.hub.registry.sessions:
            await asyncio.sleep(0.05)
        assert (await rank.round(8, [1])).decision.outcome == pb.Decision.OUTCOME_BALANCED


async def test_requests_that_end_are_still_answered(start_server: StartServer) -> None:
    server = await start_server()
    async with Rank(server.port, 0) as first, Rank(server.port, 1) as second:
        await first.submit(0, [1])
        await first.call.done_writing()
        await second.round(0, [2])
        assert (await first.answer()).decision.outcome == pb.Decision.OUTCOME_BALANCED
        assert await first.receive() is grpc.aio.EOF


@pytest.mark.usefixtures("hostile_strategies")
async def test_a_stuck_partition_is_identity_and_later_rounds_go_on(start_server: StartServer) -> None:
    server = await start_server(partition_timeout_seconds=0.2)
    hanging = pb.PartitionOptions(strategy="hang")
    job = {"world_size": 2, "job": "hanging", "options": hanging}
    async with Rank(server.port, 0, **job) as first, Rank(server.port, 1, **job) as second:  # type: ignore[arg-type]
        answers = await asyncio.gather(first.round(0, [1]), second.round(0, [1]))
        assert {answer.decision.reason for answer in answers} == {pb.Decision.REASON_WORKER_STUCK}
        assert "killed" in answers[0].decision.detail
    async with Rank(server.port, 0, 1) as rank:
        for number in range(20):  # a starved machine may need more than 0.2 s for a plan
            if (await rank.round(number, [1])).decision.outcome == pb.Decision.OUTCOME_BALANCED:
                break
            await asyncio.sleep(0.5 * number)  # it is kept out for a while then
        else:
            pytest.fail("no later round got a plan")


async def test_too_many_waiting_partitions_are_identity(start_server: StartServer, hostile_strategies: Path) -> None:
    server = await start_server(queue_size=1, partition_timeout_seconds=30)
    holding = pb.PartitionOptions(strategy="hold")
    async with Rank(server.port, 0, 2, options=holding) as first, Rank(server.port, 1, 2, options=holding) as second:
        for number in range(3):
            for rank in (first, second):
                await rank.submit(number, [1])
        answer = await first.answer()
        assert answer.decision.reason == pb.Decision.REASON_OVERLOADED
        (hostile_strategies / "release").touch()
        others = [await first.answer(), await first.answer()]
        assert {a.round for a in (answer, *others)} == {0, 1, 2}
        assert {a.decision.outcome for a in others} == {pb.Decision.OUTCOME_BALANCED}


@pytest.mark.usefixtures("hostile_strategies")
async def test_a_partition_that_fails_is_identity(start_server: StartServer) -> None:
    server = await start_server()
    failing = pb.PartitionOptions(strategy="fail")
    async with Rank(server.port, 0, 2, options=failing) as first, Rank(server.port, 1, 2, options=failing) as second:
        for answer in await asyncio.gather(first.round(0, [1]), second.round(0, [1])):
            assert answer.decision.reason == pb.Decision.REASON_PARTITION_FAILED
            assert "injected" in answer.decision.detail


async def test_a_round_by_unary_calls(start_server: StartServer) -> None:
    server = await start_server()
    ranks = [Rank(server.port, rank) for rank in range(2)]
    calls = [
        rank.stub.BalanceRound(
            pb.BalanceRoundRequest(join=join_message(number), submit=submit_message(4, [1, 2])), timeout=60
        )
        for number, rank in enumerate(ranks)
    ]
    responses = await asyncio.gather(*calls)
    assert {r.answer.decision.outcome for r in responses} == {pb.Decision.OUTCOME_BALANCED}
    assert {r.answer.round for r in responses} == {4}
    assert {r.joined.instance for r in responses} == {server.instance}
    refused = await ranks[0].stub.BalanceRound(
        pb.BalanceRoundRequest(join=join_message(5), submit=submit_message(5, [1])), timeout=60
    )
    assert refused.answer.error.field == "rank"
    for rank in ranks:
        await rank.channel.close()


async def test_unary_calls_require_a_deadline(start_server: StartServer) -> None:
    server = await start_server()
    rank = Rank(server.port)
    requests = [
        (rank.stub.GetServerInfo, pb.GetServerInfoRequest()),
        (rank.stub.GetSessionStats, pb.GetSessionStatsRequest()),
        (rank.stub.BalanceRound, pb.BalanceRoundRequest()),
    ]
    for method, request in requests:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await method(request)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "deadline" in (error.value.details() or "")
    await rank.channel.close()


async def test_information_and_statistics(start_server: StartServer) -> None:
    server = await start_server(max_ranks=17)
    async with Rank(server.port, 0, 1) as rank, Rank(server.port, 0, 1, job="other"):
        await rank.round(0, [1, 2])
        await rank.round(1, [1, 2])
        info = await rank.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=60)
        assert list(info.protocol_versions) == [1]
        assert info.limits.max_ranks == 17
        assert (info.sessions, info.streams, info.draining) == (2, 2, False)
        assert "minimal_move" in info.strategies
        every = await rank.stub.GetSessionStats(pb.GetSessionStatsRequest(), timeout=60)
        assert {s.job for s in every.sessions} == {"job", "other"}
        (own,) = (await rank.stub.GetSessionStats(pb.GetSessionStatsRequest(job="job"), timeout=60)).sessions
        assert (own.rounds_balanced, own.last_round, own.joined_ranks, own.world_size) == (2, 1, 1, 1)
        assert np.frombuffer(own.last_loads_after, "<f8").tolist() == [3.0]


async def test_streams_are_limited(start_server: StartServer) -> None:
    server = await start_server(max_streams=1)
    async with Rank(server.port, 0):
        # A channel of its own: the limit on a connection's streams must not hide that on all of them.
        second = Rank(server.port, 1)
        response = await second.open()
        assert response.error.code == pb.ERROR_CODE_LIMIT_EXCEEDED
        assert response.error.field == "max_streams"
        await second.channel.close()


async def test_garbage_and_oversized_messages_end_their_stream_only(start_server: StartServer) -> None:
    server = await start_server(max_message_bytes=10_000)
    async with Rank(server.port, 0, 1) as good:
        garbled = Rank(server.port)
        raw = garbled.channel.stream_stream(f"/{SERVICE}/Balance", response_deserializer=pb.BalanceResponse.FromString)
        garbled.call = raw()
        await garbled.call.write(b"\xff" * 20)
        assert (await garbled.receive()).error.field == "request"
        garbled.call = raw()
        await garbled.call.write(b"\0" * 20_000)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await garbled.receive()
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await garbled.channel.close()
        assert (await good.round(0, [1])).decision.outcome == pb.Decision.OUTCOME_BALANCED


async def test_a_client_that_takes_no_answers_is_no_longer_read(start_server: StartServer) -> None:
    server = await start_server()
    async with Rank(server.port, 0, 1) as greedy, Rank(server.port, 0, 1, job="other") as modest:
        bad = submit_message(0, [1], costs_f64=b"x" * 3000)

        async def flood() -> None:
            while True:
                await greedy.call.write(pb.BalanceRequest(submit=bad))

        flooding = asyncio.create_task(flood())
        for number in range(20):
            assert (await modest.round(number, [1])).decision.outcome == pb.Decision.OUTCOME_BALANCED
            assert max(mailbox.backlog for mailbox in server.servicer.streams.mailboxes) <= 64
        flooding.cancel()


async def test_reflection_is_off_unless_set(start_server: StartServer) -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    async def services(port: int) -> list[str]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            reply = await asyncio.wait_for(call.read(), 60)
            return [service.name for service in reply.list_services_response.service]

    assert SERVICE in await services((await start_server(reflection=True)).port)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await services((await start_server()).port)
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_idle_and_hostile_connections_do_not_disturb_a_job(start_server: StartServer) -> None:
    server = await start_server()
    async with Rank(server.port, 0) as first, Rank(server.port, 1) as second:
        idle = [grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=_OWN) for _ in range(50)]
        await asyncio.gather(*(channel.channel_ready() for channel in idle))
        hostile = [Rank(server.port, n % 2, run_id=f"hostile-{n}") for n in range(20)]
        refused = await asyncio.gather(*(rank.open() for rank in hostile))
        assert {response.error.code for response in refused} == {pb.ERROR_CODE_JOB_NAME_TAKEN}
        for number in range(20):
            answers = await asyncio.gather(first.round(number, [1, 2, 3]), second.round(number, [4]))
            assert {answer.decision.outcome for answer in answers} == {pb.Decision.OUTCOME_BALANCED}
        assert len(server.servicer.streams) == 2
        await asyncio.gather(*(channel.close() for channel in [*idle, *(rank.channel for rank in hostile)]))


async def test_a_start_that_takes_long_says_what_it_waits_for(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.balancer.server._QUIET_SECONDS", 0.0)
    with capture_logs() as logs:
        await start_server()
    events = [line["event"] for line in logs]
    assert events[0] == "still_starting"
    assert events[-1] == "serving"
    with capture_logs() as logs:
        monkeypatch.undo()
        await start_server()
    assert "still_starting" not in [line["event"] for line in logs]
