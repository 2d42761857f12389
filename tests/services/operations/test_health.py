"""Health, readiness and reflection of a real balancer, from its start through its drain."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from benchmarks.harness.authorities import channel
from benchmarks.harness.balancer_process import running_balancer
from evenkeel.protocol import balancer_pb2 as pb
from tests.services.security.jobs import RunningJob

SERVICE = "evenkeel.balancer.v1.BalancerService"
SECONDS = 60.0
Status = health_pb2.HealthCheckResponse


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_balancer_says_when_it_takes_work_and_when_it_no_longer_does(tmp_path: Path) -> None:
    port_file = tmp_path / "metrics"
    drain = ("--drain-seconds", "30", "--grace-seconds", "3")
    flags = ("--metrics-port", "0", "--metrics-port-file", str(port_file), *drain)
    with running_balancer(*flags) as balancer, channel(balancer.address, None) as opened:
        url = f"http://127.0.0.1:{int(port_file.read_text())}"
        assert (status_of(f"{url}/healthz"), status_of(f"{url}/readyz")) == (200, 200)
        health = health_pb2_grpc.HealthStub(opened)
        for name in ("", SERVICE):
            assert health.Check(health_pb2.HealthCheckRequest(service=name), timeout=SECONDS).status == Status.SERVING
        with pytest.raises(grpc.RpcError) as unknown:
            health.Check(health_pb2.HealthCheckRequest(service="other"), timeout=SECONDS)
        assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
        seen: list[Any] = []
        watched = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=4 * SECONDS)

        def watch() -> None:
            with contextlib.suppress(grpc.RpcError):
                for update in watched:
                    seen.append(update.status)

        watching = threading.Thread(target=watch)
        with RunningJob(lambda: channel(balancer.address, None), job="served") as job:
            watching.start()
            wait_for(lambda: watched.is_active() and job.balanced[0] > 5)
            balancer.signal(signal.SIGTERM)
            # A stream is open: the balancer drains, is alive, and takes no more work.
            wait_for(lambda: status_of(f"{url}/readyz") == 503)
            assert status_of(f"{url}/healthz") == 200
            with pytest.raises(grpc.RpcError) as gone:  # who comes now finds another one behind the name
                health.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
            assert gone.value.code() == grpc.StatusCode.UNAVAILABLE
        assert balancer.process is not None
        assert balancer.process.wait(4 * SECONDS) == 0
        watching.join(SECONDS)
        assert seen == [Status.SERVING, Status.NOT_SERVING]


def test_reflection_tells_the_whole_definition() -> None:
    with running_balancer("--reflection", "true") as balancer, channel(balancer.address, None) as opened:
        database = ProtoReflectionDescriptorDatabase(opened)
        assert {SERVICE, "grpc.health.v1.Health"} <= set(database.get_services())
        file = database.FindFileContainingSymbol(SERVICE)
    assert file.SerializeToString() == pb.DESCRIPTOR.serialized_pb
