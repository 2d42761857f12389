"""What a balancer answers: plans that the lead would make itself, and one clear status for each mistake."""

from collections.abc import Iterator
from dataclasses import replace

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from hypothesis import given, settings

from benchmarks.harness.authorities import channel
from benchmarks.harness.balancer_process import ServiceProcess
from evenkeel.partitioning import PartitionError
from evenkeel.partitioning.refinements import plan_round
from tests.evenkeel.protocol.rounds import Round, make_round, rounds
from tests.services.balancer.calls import SECONDS, SERVICE, Lead, lead_of, refused, request_of, wait_for_workers


@pytest.fixture(scope="module")
def lead(balancer: ServiceProcess) -> Iterator[Lead]:
    with lead_of(balancer.address) as opened:
        yield opened


@given(rounds())
@settings(max_examples=60)
def test_served_and_local_plans_are_the_same(lead: Lead, one: Round) -> None:
    try:
        local = plan_round(one.samples, one.options)
    except PartitionError:
        with refused("FAILED_PRECONDITION", "memory"):
            lead.plan(one)
        return
    served = lead.plan(one)
    np.testing.assert_array_equal(served.destinations, local.destinations)
    np.testing.assert_array_equal(served.loads_after, local.loads_after)
    assert served.batches == local.batches
    assert (served.steps is None) == (local.steps is None)
    assert local.steps is None or (served.steps == local.steps).all()


def test_large_rounds(lead: Lead) -> None:
    one = make_round(1024, 128)
    assert (lead.plan(one).destinations == plan_round(one.samples, one.options).destinations).all()


def test_wrong_calls(balancer: ServiceProcess, lead: Lead) -> None:
    """Each mistake has its status and a remedy, no worker is lost, and the next call is served."""
    good = make_round(2, 4)
    data, before = request_of(good), wait_for_workers(balancer)
    with refused("INVALID_ARGUMENT", "6 bytes that are no PlanRoundRequest"):
        lead.send(b"\xffbytes")
    with refused("INVALID_ARGUMENT", "job is empty; name the training job"):
        lead.send(b"")
    with refused("INVALID_ARGUMENT", "evenkeel-job", "name the training job"):
        lead.send(data, job=None)
    with refused("PERMISSION_DENIED", "job is 'job'", "'other'"):
        lead.send(data, job="other")
    with refused("INVALID_ARGUMENT", "no deadline; set one"):
        lead.send(data, timeout=None)
    with refused("INVALID_ARGUMENT", "no deadline; set one"):
        lead.info(timeout=None)
    with refused("DEADLINE_EXCEEDED"):
        lead.plan(make_round(strategy="slow"), timeout=0.1)
    with refused("INVALID_ARGUMENT", "costs_f64[0] is nan; use numbers"):
        lead.plan(replace(good, samples=replace(good.samples, costs=np.full(8, np.nan))))
    with refused("INVALID_ARGUMENT", "strategy is 'best'", "lpt"):
        lead.plan(make_round(strategy="best"))
    with refused("INTERNAL", "the balancer's log says where"):
        lead.plan(make_round(strategy="fail"))
    with refused("RESOURCE_EXHAUSTED", "ranks is 1025; use at most 1024", "max_ranks"):
        lead.plan(make_round(1025, 1))
    with refused("RESOURCE_EXHAUSTED", "131073 samples; use at most 131072", "max_samples"):
        lead.plan(make_round(1, 131073))
    with refused("RESOURCE_EXHAUSTED", "batches is 5; use at most 4", "max_batches"):
        lead.plan(make_round(2, 1, batches=5))
    with refused("RESOURCE_EXHAUSTED", "2000000"):
        lead.send(bytes(2_000_001))
    lead.plan(good)
    assert wait_for_workers(balancer) == before


def test_calls_at_once_are_bounded(balancer: ServiceProcess) -> None:
    with lead_of(balancer.address) as lead:
        calls = [lead.future(make_round(strategy="slow")) for _ in range(20)]
        codes = [call.code() for call in calls]
    assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert codes.count(grpc.StatusCode.OK) >= 8
    assert any("8 calls of 127.0.0.1 are under way" in (call.details() or "") for call in calls)


def test_an_old_client_is_told_what_to_install(balancer: ServiceProcess) -> None:
    old = "/evenkeel.balancer.v1.BalancerService"
    with channel(balancer.address, None) as opened:
        for call in (
            lambda: opened.unary_unary(f"{old}/GetServerInfo")(b"", timeout=SECONDS),
            lambda: list(opened.stream_stream(f"{old}/Balance")(iter([b"join"]), timeout=SECONDS)),
        ):
            with refused("FAILED_PRECONDITION", "install evenkeel"):
                call()
        with refused("UNIMPLEMENTED"):
            opened.unary_unary(f"/{SERVICE}/Other")(b"", timeout=SECONDS)


def test_what_a_balancer_tells_of_itself(balancer: ServiceProcess, lead: Lead) -> None:
    info = lead.info()
    assert info.instance == lead.info().instance != 0
    assert not info.draining
    assert (info.limits.max_ranks, info.limits.max_samples, info.limits.max_calls) == (1024, 131072, 8)
    assert {"minimal_move", "lpt", "slow"} <= set(info.strategies)
    with channel(balancer.address, None) as opened:
        health = health_pb2_grpc.HealthStub(opened)
        for name in ("", SERVICE):
            status = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=SECONDS).status
            assert status == health_pb2.HealthCheckResponse.SERVING
        assert {SERVICE, "grpc.health.v1.Health"} <= set(ProtoReflectionDescriptorDatabase(opened).get_services())
