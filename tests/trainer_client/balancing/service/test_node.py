"""Several ranks of a node behind one stream, against a real balancer; each rank is a connection of its own."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import numpy as np
import pytest
from trainer_client.balancing.service import Connection, NodeSeat, ServiceDecision, join_request
from trainer_client.balancing.service.frames import listen
from trainer_client.balancing.service.node import NodeFollower, NodeLeader

from benchmarks.harness.balancer_process import ServiceProcess, running_balancer
from evenkeel.partitioning.rounds import RoundOptions
from evenkeel.partitioning.samples import RankSamples
from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol import balancer_pb2_grpc as pb_grpc
from trainer_client.balancing.opening import SessionName

SECONDS = 40.0


@pytest.fixture(scope="module")
def balancer() -> Iterator[ServiceProcess]:
    with running_balancer("--max-message-bytes", "8192") as process:
        yield process


@contextmanager
def node_of(balancer: ServiceProcess, world_size: int = 3, *, linger: float = 0.5) -> Iterator[list[Connection]]:
    """The ranks of one node, connected; rank 0 leads."""
    session = SessionName(
        job=uuid.uuid4().hex, group="default", loader="train", run_id="run", restart_count=0, opening=0
    )
    listener, address = listen()
    ranks = [
        Connection(
            balancer.address,
            join_request(
                session, world_size=world_size, rank=rank, node="node", options=RoundOptions(), schema_hash=b"",
                schema_fields=[],
            ),
            join_timeout=SECONDS,
            seat=NodeSeat(
                rank=rank, ranks=tuple(range(world_size)), address=address, linger=linger,
                listener=listener if rank == 0 else None,
            ),
        )
        for rank in range(world_size)
    ]  # fmt: skip
    try:
        for rank in ranks:
            rank.start()
        wait_until(lambda: all(rank.ready for rank in ranks))
        yield ranks
    finally:
        for rank in reversed(ranks):
            rank.close()


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.01)


def submit(rank: Connection, number: int, num_samples: int = 4) -> None:
    rank.submit(
        number,
        samples_of(num_samples),
        exhausted=False,
        timeout_ms=60_000,
    )


def samples_of(num_samples: int) -> RankSamples:
    return RankSamples(
        costs=np.arange(1, num_samples + 1),
        lengths=np.zeros((num_samples, 0), np.int64),
        sizes=np.ones(num_samples, np.int64),
    )


def decision(
    rank: Connection, number: int, *, seconds: float = SECONDS, num_samples: int = 4
) -> ServiceDecision | None:
    return rank.decision(number, time.monotonic() + seconds, samples_of(num_samples))


def take_round(ranks: list[Connection], number: int) -> None:
    """A round in which every rank gets the same decision."""
    for rank in ranks:
        submit(rank, number)
    decisions = [decision(rank, number) for rank in ranks]
    assert all(one is not None and one.plan for one in decisions), [rank.trouble for rank in ranks]
    assert len({one.digest for one in decisions if one is not None}) == 1
    for rank in ranks:
        rank.settle(number)


def leader_of(ranks: list[Connection]) -> NodeLeader:
    assert isinstance(ranks[0]._route, NodeLeader)
    return ranks[0]._route


def test_one_stream_speaks_for_all_ranks(balancer: ServiceProcess) -> None:
    with node_of(balancer) as ranks, grpc.insecure_channel(balancer.address) as channel:
        stub = pb_grpc.BalancerServiceStub(channel)  # type: ignore[no-untyped-call]
        for number in range(5):
            take_round(ranks, number)
        assert stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=SECONDS).streams == 1
        assert leader_of(ranks)._uplink._unsettled == {}


def test_an_older_balancer_is_told_of_each_rank_by_itself(balancer: ServiceProcess) -> None:
    with node_of(balancer) as ranks:
        uplink = leader_of(ranks)._uplink
        stream = uplink._current
        assert stream is not None
        assert stream.takes_nodes
        for number in range(6):  # also where it is replaced by a newer one, or by an older one
            stream.takes_nodes = number % 4 > 1
            sent = stream._request([pb.Submit(round=number, rank=rank) for rank in range(3)]).submits
            assert (len(sent.nodes), len(sent.submits)) == ((1, 0) if stream.takes_nodes else (0, 3))
            take_round(ranks, number)
        assert uplink.epoch == 1


def test_a_late_rank_holds_the_others_back_only_a_while(balancer: ServiceProcess) -> None:
    with node_of(balancer, linger=0.05) as ranks:
        for rank in ranks[:2]:
            submit(rank, 0)
        wait_until(lambda: leader_of(ranks)._sent == 0)  # without the third
        assert decision(ranks[0], 0, seconds=0.0) is None
        submit(ranks[2], 0)
        assert len({getattr(decision(rank, 0), "digest", rank) for rank in ranks}) == 1


def test_a_restarted_balancer_gets_everything_again(balancer: ServiceProcess) -> None:
    with node_of(balancer) as ranks:
        take_round(ranks, 0)
        submit(ranks[1], 1)  # in vain: the others are still to come
        balancer.kill()
        wait_until(lambda: not any(rank.ready for rank in ranks))
        submit(ranks[0], 1)
        balancer.start()
        submit(ranks[2], 1)
        decisions = [decision(rank, 1) for rank in ranks]
        assert len({one.instance for one in decisions if one is not None}) == 1
        assert all(one is not None and one.plan for one in decisions)
        take_round(ranks, 2)


def test_a_follower_that_missed_an_answer_makes_the_leader_join_anew(balancer: ServiceProcess) -> None:
    with node_of(balancer) as ranks:
        ranks[2].suspect()
        assert not ranks[2].ready
        wait_until(lambda: leader_of(ranks)._uplink.epoch == 2 and all(rank.ready for rank in ranks))
        route = ranks[1]._route
        assert isinstance(route, NodeFollower)
        route._thread.call(route._complain, 1)  # about the stream that is gone already
        take_round(ranks, 0)
        assert leader_of(ranks)._uplink.epoch == 2


def test_a_cut_within_the_node_loses_nothing(balancer: ServiceProcess) -> None:
    with node_of(balancer) as ranks:
        leader = leader_of(ranks)
        for number in range(3):
            for rank in ranks:
                submit(rank, number)
            leader._thread.call(lambda: [link.close() for link in list(leader._followers)])
            for rank in ranks:
                assert decision(rank, number) is not None, rank.trouble
        wait_until(lambda: all(rank.ready for rank in ranks))


def test_a_leader_that_does_not_get_to_it_is_a_missed_answer(balancer: ServiceProcess) -> None:
    with node_of(balancer) as ranks:
        leader_of(ranks)._thread.call(time.sleep, 1.0)
        for rank in ranks:
            submit(rank, 0)
        started = time.monotonic()
        assert decision(ranks[1], 0, seconds=0.2) is None
        assert time.monotonic() - started < SECONDS / 2
        for rank in ranks:
            assert decision(rank, 0) is not None


def test_large_submissions_are_split_and_too_large_ones_answered_here(balancer: ServiceProcess) -> None:
    with node_of(balancer) as ranks:
        sizes = (2000, 2000, 2400)  # 3 bytes a sample: 8192 hold one of them
        for rank, size in zip(ranks, sizes, strict=True):
            submit(rank, 0, size)
        assert all(decision(rank, 0, num_samples=n) is not None for rank, n in zip(ranks, sizes, strict=True))
        submit(ranks[2], 1, 3000)
        wait_until(lambda: "max_message_bytes" in ranks[2].trouble)
        assert decision(ranks[2], 1, num_samples=3000) is None
        for rank in ranks:
            rank.settle(1)
        take_round(ranks, 2)
        assert leader_of(ranks)._uplink.epoch == 1


def test_the_name_is_free_when_the_leader_has_left(balancer: ServiceProcess) -> None:
    with grpc.insecure_channel(balancer.address) as channel:
        stub = pb_grpc.BalancerServiceStub(channel)  # type: ignore[no-untyped-call]
        with node_of(balancer) as ranks:
            take_round(ranks, 0)
            job = ranks[0]._join.job
        request = pb.GetSessionStatsRequest(job=job)
        wait_until(lambda: not stub.GetSessionStats(request, timeout=SECONDS).sessions)


def test_strangers_are_cut_off(balancer: ServiceProcess) -> None:
    with node_of(balancer) as ranks:
        leader = leader_of(ranks)
        stranger = Connection(
            balancer.address, ranks[0]._join, join_timeout=SECONDS,
            seat=NodeSeat(rank=7, ranks=(0, 7), address=leader._seat.address, listener=None, linger=0.1),
        )  # fmt: skip
        try:
            submit(stranger, 0)
            take_round(ranks, 0)
            assert not stranger.ready
            assert sorted(leader._followers.values()) == [1, 2]
        finally:
            stranger.close()
