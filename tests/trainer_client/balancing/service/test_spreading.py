"""Jobs spread over three real balancers, and one of them leaves."""

from __future__ import annotations

import contextlib
import time
from collections import Counter

import grpc
import pytest

from benchmarks.harness.balancer_process import running_balancer
from evenkeel.addresses import resolve
from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol import balancer_pb2_grpc as pb_grpc
from tests.services.security.jobs import join
from trainer_client import Balancer
from trainer_client.balancing.service import Connection

JOBS = [f"job-{number}" for number in range(60)]  # ports are drawn: fewer jobs may miss a balancer by chance


def instance_for(address: str, job: str) -> int:
    target, options, metadata = resolve(address, job)
    with grpc.insecure_channel(target, options=[*options, ("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = pb_grpc.BalancerServiceStub(channel)
        return int(stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=30, metadata=metadata).instance)


def sessions(address: str) -> set[str]:
    with grpc.insecure_channel(address) as channel:
        found = pb_grpc.BalancerServiceStub(channel).GetSessionStats(pb.GetSessionStatsRequest(), timeout=30).sessions
        return {session.job for session in found if session.joined_ranks == 2}


def test_plain_addresses_stay_as_they_are() -> None:
    assert resolve("balancer:50051", "job") == ("balancer:50051", [], ())
    assert resolve("spread://balancers:50051", "job")[0] == "dns:///balancers:50051"
    assert resolve("spread://[::1]:1,[::1]:2", "job")[0] == "ipv6:[::1]:1,[::1]:2"
    Balancer.connect("spread://balancers:50051", job="job")
    with pytest.raises(ValueError, match="give host:port"):
        Balancer.connect("spread://balancers", job="job")


@pytest.mark.timeout(400)
def test_jobs_spread_and_only_those_of_a_leaving_balancer_move() -> None:
    with contextlib.ExitStack() as stack:
        balancers = [stack.enter_context(running_balancer()) for _ in range(3)]
        address = "spread://" + ",".join(balancer.address for balancer in balancers)
        home = {job: instance_for(address, job) for job in JOBS}
        assert {job: instance_for(address, job) for job in JOBS} == home  # every rank comes to the same one
        assert len(set(home.values())) == 3
        assert max(Counter(home.values()).values()) <= 0.7 * len(JOBS)
        # Two ranks of one job meet on one balancer, and meet again on another when that one leaves.
        ranks = [Connection(address, join("job-0", rank, 2), join_timeout=30) for rank in range(2)]
        for rank in ranks:
            rank.start()
            stack.callback(rank.close)

        def together() -> list[str]:
            deadline = time.monotonic() + 90
            while not (found := [each.address for each in left if "job-0" in sessions(each.address)]):
                assert time.monotonic() < deadline, [rank.trouble for rank in ranks]
                time.sleep(0.1)
            return found

        left = list(balancers)
        (first,) = together()
        leaving = next(balancer for balancer in balancers if balancer.address == first)
        assert leaving.stop() == 0
        left.remove(leaving)
        (second,) = together()
        assert second != first
        moved = {job: instance_for(address, job) for job in JOBS}
        lost = home["job-0"]
        assert all(moved[job] == home[job] for job in JOBS if home[job] != lost)
        assert all(moved[job] != lost for job in JOBS)
