"""Health and readiness of a real balancer, from its start through its drain."""

from __future__ import annotations

import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.harness.authorities import channel
from benchmarks.harness.balancer_process import running_balancer

SERVICE = "evenkeel.balancer.v2.BalancerService"
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
    flags = ("--metrics-port", "0", "--metrics-port-file", str(port_file), "--grace-seconds", "2")
    with running_balancer(*flags) as balancer, channel(balancer.address, None) as opened:
        url = f"http://127.0.0.1:{int(port_file.read_text())}"
        assert (status_of(f"{url}/healthz"), status_of(f"{url}/readyz")) == (200, 200)
        health = health_pb2_grpc.HealthStub(opened)  # type: ignore[no-untyped-call]
        watched = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=4 * SECONDS)
        assert next(watched).status == Status.SERVING
        balancer.signal(signal.SIGTERM)  # a call is open: the balancer drains, is alive, and takes no more work
        assert next(watched).status == Status.NOT_SERVING
        wait_for(lambda: status_of(f"{url}/readyz") == 503)
        assert status_of(f"{url}/healthz") == 200
        assert balancer.running.wait(4 * SECONDS) == 0
        assert watched.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
