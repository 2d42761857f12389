"""Answers leave in messages that the service's limit allows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.harness.plans import make_plan
from evenkeel.protocol import balancer_pb2 as pb
from services.balancer import mailboxes
from services.balancer.decisions import Decision, balanced
from services.balancer.effects import Answer, PlanInput
from services.balancer.mailboxes import StreamMailbox
from services.balancer.node_answers import node_bytes
from tests.services.balancer.conftest import StartServer
from tests.services.balancer.ranks import Rank
from tests.services.balancer.samples import node, options
from trainer_client.balancing.service.joining import split_answer

LIMIT = 10_000


def decision(ranks: int, samples: int) -> Decision:
    said = node(*range(ranks), costs=range(samples))
    return balanced(make_plan(PlanInput(parts=(said.samples,), options=options(), nodes=("",) * ranks)))


def taken(mailbox: StreamMailbox) -> list[pb.AnswerGroup]:
    messages = []
    while mailbox.backlog:
        data = mailbox.take()
        assert len(data) <= LIMIT
        messages.append(pb.BalanceResponse.FromString(data).answers)
    return messages


@pytest.mark.parametrize("by_node", [False, True])
async def test_answers_leave_together_as_far_as_a_message_may_hold_them(*, by_node: bool) -> None:
    mailbox = StreamMailbox(7, LIMIT)
    mailbox.group()
    mailbox.by_node = by_node
    ranks = tuple(range(8))
    for number, samples in enumerate((10, 10, 1200, 10)):  # the third takes more than a message of its own
        mailbox.deliver(Answer(mailbox, number, ranks, decision(8, samples)))
    messages = taken(mailbox)
    assert 2 < len(messages) < 12
    told = [one for group in messages for each in group.nodes for one in split_answer(each)]
    told += [one for group in messages for one in group.answers]
    assert [(one.round, one.rank) for one in told] == [(number, rank) for number in range(4) for rank in ranks]
    assert all(one.HasField("decision") for one in told)


async def test_an_answer_that_waits_for_the_next_message_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []

    def counting(instance: int, round_number: int, ranks: Sequence[int], result: Decision) -> bytes:
        written.append(round_number)
        return node_bytes(instance, round_number, ranks, result)

    monkeypatch.setattr(mailboxes, "node_bytes", counting)
    mailbox = StreamMailbox(7, LIMIT)
    mailbox.group()
    mailbox.by_node = True
    for number in range(4):  # each takes more than half a message
        mailbox.deliver(Answer(mailbox, number, (0, 1), decision(2, 3000)))
    messages = taken(mailbox)
    assert [one.round for group in messages for one in group.nodes] == [0, 1, 2, 3]
    assert len(messages) == 4
    assert written == [0, 1, 2, 3]


@pytest.mark.parametrize("by_node", [None, False, True])
async def test_an_answer_that_no_message_may_hold_is_refused(*, by_node: bool | None) -> None:
    mailbox = StreamMailbox(7, LIMIT)
    if by_node is not None:
        mailbox.group()
        mailbox.by_node = by_node
    mailbox.deliver(Answer(mailbox, 3, (1,), decision(2, 20_000)))
    response = pb.BalanceResponse.FromString(mailbox.take())
    (told,) = response.answers.answers if by_node is not None else (response.answer,)
    assert (told.round, told.rank, told.error.field) == (3, 1, "max_message_bytes")
    assert not told.error.fatal


async def test_a_rank_whose_answer_is_too_large_goes_on(start_server: StartServer) -> None:
    server = await start_server(max_message_bytes=3000)
    fields = [pb.Field(path="f", kind=pb.Field.KIND_JAGGED)] * 100
    ranks = [Rank(server.port, rank, 5, schema=pb.Schema(hash=b"s", fields=fields)) for rank in range(5)]
    for rank in ranks:
        await rank.open()
    for number, each in enumerate((5, 1)):  # one of five samples from each of four ranks, or one from one
        counts = [0, each, each, each, each]
        found = await asyncio.gather(
            *(
                rank.round(number, [1] * count, lengths=np.ones((count, 100), "<u4").tobytes())
                for rank, count in zip(ranks, counts, strict=True)
            )
        )
        assert [one.error.field for one in found] == ["max_message_bytes" if number == 0 else "", "", "", "", ""]
    for rank in ranks:
        await rank.channel.close()
