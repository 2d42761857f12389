"""Streams that speak for all ranks of a node."""

import asyncio
import time

import numpy as np
import pytest

from evenkeel.protocol import balancer_pb2 as pb
from tests.services.balancer.conftest import StartServer
from tests.services.balancer.ranks import SECONDS, Rank
from tests.services.balancer.samples import join_message, submit_message
from trainer_client.balancing.service.joining import join_submits, split_answer


async def test_a_stream_may_speak_for_all_ranks_of_a_node(start_server: StartServer) -> None:
    server = await start_server()
    async with Rank(server.port, 1, 4) as alone, Rank(server.port, 0, 4, ranks=[0, 2, 3]) as node:
        for number in range(3):
            submits = [submit_message(number, [rank + 1.0, 2], rank=rank) for rank in (0, 2, 3)]
            await node.call.write(pb.BalanceRequest(submits=pb.SubmitGroup(submits=submits)))
            mine = (await alone.round(number, [9, 1])).decision
            group: list[pb.Answer] = []
            while len(group) < 3:
                group += (await node.receive()).answers.answers
            assert sorted(answer.rank for answer in group) == [0, 2, 3]
            assert {answer.round for answer in group} == {number}
            assert {answer.decision.digest for answer in group} == {mine.digest}
            received = {1: mine, **{answer.rank: answer.decision for answer in group}}
            assert sum(np.frombuffer(decision.source_counts, "<i4").sum() for decision in received.values()) == 8
        await node.call.write(pb.BalanceRequest(submit=submit_message(3, [1], rank=1)))
        (refused,) = (await node.receive()).answers.answers
        assert (refused.error.field, refused.rank, refused.round) == ("rank", 1, 3)
        statistics = await alone.stub.GetSessionStats(pb.GetSessionStatsRequest(), timeout=60)
        assert statistics.sessions[0].joined_ranks == 4


async def test_ranks_of_a_node_may_submit_arrays(start_server: StartServer) -> None:
    server = await start_server()
    async with Rank(server.port, 1, 4) as alone, Rank(server.port, 0, 4, ranks=[0, 2, 3]) as node:
        join = join_message(0, world_size=4, ranks=[0, 2, 3])
        for number in range(3):
            submits = [submit_message(number, [rank + 1.0, 2], rank=rank) for rank in (0, 2, 3)]
            late = submits[1:2] if number == 1 else []
            nodes, _ = join_submits([one for one in submits if one not in late], join)
            await node.call.write(pb.BalanceRequest(submits=pb.SubmitGroup(nodes=nodes)))
            for one in late:
                nodes, _ = join_submits([one], join)
                await node.call.write(pb.BalanceRequest(submits=pb.SubmitGroup(nodes=nodes)))
            mine = (await alone.round(number, [9, 1])).decision
            (told,) = (await node.receive()).answers.nodes
            group = split_answer(told)
            assert sorted(answer.rank for answer in group) == [0, 2, 3]
            assert {answer.round for answer in group} == {number}
            assert {answer.decision.digest for answer in group} == {mine.digest}
            received = [mine, *(answer.decision for answer in group)]
            assert sum(np.frombuffer(decision.source_counts, "<i4").sum() for decision in received) == 8
        submits = [submit_message(3, [rank - 2.0], rank=rank) for rank in (0, 2, 3)]
        nodes, _ = join_submits(submits, join)
        await node.call.write(pb.BalanceRequest(submits=pb.SubmitGroup(nodes=nodes)))
        (refused,) = (await node.receive()).answers.answers
        assert (refused.error.field, refused.rank, refused.round) == ("costs_int[0]", 0, 3)
        assert "-2 on rank 0" in refused.error.value
        (again,), _ = join_submits([submit_message(3, [1.0], rank=0)], join)
        await node.call.write(pb.BalanceRequest(submits=pb.SubmitGroup(nodes=[again])))
        assert (await alone.round(3, [9, 1])).decision.outcome == pb.Decision.OUTCOME_BALANCED
        assert len(split_answer((await node.receive()).answers.nodes[0])) == 3


@pytest.mark.parametrize("ranks", [[1, 2], [0, 0], [0, 9]])
async def test_the_ranks_of_a_stream_must_make_sense(start_server: StartServer, ranks: list[int]) -> None:
    server = await start_server()
    wrong = Rank(server.port, 0, 4, ranks=ranks)
    assert (await wrong.open()).error.field.startswith("ranks")
    await wrong.channel.close()


async def test_a_message_with_more_submissions_than_may_be_undecided_ends_its_stream(
    start_server: StartServer,
) -> None:
    server = await start_server(max_rounds_ahead=2)
    async with Rank(server.port, 0, 4, ranks=[0, 2]) as node:
        fitting = [submit_message(0, [1.0], rank=rank) for rank in (0, 2)] * 4
        await node.call.write(pb.BalanceRequest(submits=pb.SubmitGroup(submits=fitting)))
        join = join_message(0, world_size=4, ranks=[0, 2])
        of_one = [join_submits([one], join)[0][0] for one in fitting]  # each counts for the rank that it names
        await node.call.write(pb.BalanceRequest(submits=pb.SubmitGroup(nodes=of_one)))
        await node.submit(0, [1.0], rank=1)
        assert (await node.receive()).answers.answers[0].error.field == "rank"
        await node.call.write(pb.BalanceRequest(submits=pb.SubmitGroup(submits=[*fitting, fitting[0]])))
        error = (await node.receive()).error
        assert (error.code, error.field, error.fatal) == (pb.ERROR_CODE_LIMIT_EXCEEDED, "submits", True)
        assert "8" in error.value


async def test_a_stream_that_breaks_while_its_answers_wait_has_not_used_the_loop_meanwhile(
    start_server: StartServer,
) -> None:
    server = await start_server()
    node = Rank(server.port, 0, 64, buffer=1 << 16, ranks=list(range(64)))
    await node.open()
    strangers = [submit_message(number, [1.0], rank=99) for number in range(8000)]  # whose refusals take 2 MB
    await node.call.write(pb.BalanceRequest(submits=pb.SubmitGroup(submits=strangers)))
    (mailbox,) = server.servicer.streams.mailboxes
    since, patience = time.monotonic(), time.monotonic() + SECONDS
    while mailbox.backlog < 128 and time.monotonic() < patience:
        since = time.monotonic()
        await asyncio.sleep(0.02)
    await asyncio.sleep(4.0)
    assert mailbox.backlog >= 128
    node.call.cancel()
    while len(server.servicer.streams) and time.monotonic() < patience:
        await asyncio.sleep(0.02)
    assert server.servicer.turns.longest < (time.monotonic() - since) / 2
    await node.channel.close()
