"""Jobs spread over three real balancers, and one of them leaves."""

from __future__ import annotations

import contextlib
from collections import Counter

import grpc
import pytest

from benchmarks.harness.balancer_process import running_balancer
from benchmarks.spread import Jobs, instance_of, observe
from evenkeel.addresses import resolve
from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol import balancer_pb2_grpc as pb_grpc
from trainer_client import Balancer

JOBS = [f"job-{number}" for number in range(60)]  # ports are drawn: fewer jobs may miss a balancer by chance


def instance_for(address: str, job: str) -> int:
    target, options, metadata = resolve(address, job)
    with grpc.insecure_channel(target, options=[*options, ("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = pb_grpc.BalancerServiceStub(channel)
        return int(stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=30, metadata=metadata).instance)


def test_plain_addresses_stay_as_they_are() -> None:
    assert resolve("balancer:50051", "job") == ("balancer:50051", [], ())
    assert resolve("spread://balancers:50051", "job")[0] == "dns:///balancers:50051"
    assert resolve("spread://[::1]:1,[::1]:2", "job")[0] == "ipv6:[::1]:1,[::1]:2"
    Balancer.connect("spread://balancers:50051", job="job")
    with pytest.raises(ValueError, match="give host:port"):
        Balancer.connect("spread://balancers", job="job")


@pytest.mark.timeout(400)
def test_only_the_jobs_of_a_balancer_that_leaves_move_and_the_others_miss_no_round() -> None:
    with contextlib.ExitStack() as stack:
        balancers = [stack.enter_context(running_balancer()) for _ in range(3)]
        address = "spread://" + ",".join(balancer.address for balancer in balancers)
        home = {job: instance_for(address, job) for job in JOBS}
        assert {job: instance_for(address, job) for job in JOBS} == home  # every rank comes to the same one
        assert len(set(home.values())) == 3
        assert max(Counter(home.values()).values()) <= 0.7 * len(JOBS)
        # Rounds of two ranks, with more time than any of them takes on a busy machine.
        jobs = stack.enter_context(Jobs(address, 12, 0.2, timeout=30.0))
        assert jobs.homes() == {job.name: home[job.name] for job in jobs.all}
        killed, drained = (next(one for one in balancers if instance_of(one) == home[job]) for job in two_apart(home))
        lost = instance_of(killed)
        event = observe(jobs, "killed", killed.kill, lost, seconds=0.0)
        assert event["its_jobs"] > 0
        assert event["others_rounds_missed"] == event["others_moved"] == 0
        moved = {job: instance_for(address, job) for job in JOBS}
        assert all((moved[job] == home[job]) == (home[job] != lost) for job in JOBS)
        assert jobs.homes() == {job.name: moved[job.name] for job in jobs.all}
        event = observe(jobs, "replaced", killed.start, seconds=0.0)
        assert event["others_rounds_missed"] == event["others_moved"] == 0
        instance_of_drained = instance_of(drained)
        event = observe(jobs, "drained", drained.stop, instance_of_drained, seconds=0.0)
        assert event["its_jobs"] > 0
        assert event["its_rounds_missed"] == 0, "rounds go on until all ranks of a job have joined another balancer"
        assert lost_by(jobs, instance_of_drained), "and then they are that one's"
        assert event["others_rounds_missed"] == event["others_moved"] == 0
        assert drained.running.poll() == 0


def lost_by(jobs: Jobs, instance: int) -> bool:
    """Whether no job has a balancer of this incarnation any more."""
    return instance not in jobs.homes().values()


def two_apart(home: dict[str, int]) -> tuple[str, str]:
    """Two of the first jobs, on balancers of their own."""
    first = JOBS[0]
    return first, next(job for job in JOBS[1:12] if home[job] != home[first])
