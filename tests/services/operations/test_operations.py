"""Starts, health, metrics, probes and drains of services."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from benchmarks.harness.authorities import channel
from benchmarks.harness.balancer_process import fork, running_balancer
from services.operations import probe
from services.operations.http import OperationsServer
from services.operations.launch import running_service
from services.operations.process import EventLoopLag, add_process_metrics
from tests import asking
from tests.waiting import until

SECONDS = 60.0
Status = health_pb2.HealthCheckResponse


@dataclass
class State:
    ready: bool = True


@pytest.fixture
def state() -> State:
    return State()


@pytest.fixture
def server(state: State) -> Iterator[OperationsServer]:
    registry = CollectorRegistry()
    add_process_metrics(registry, service="balancer", version="1.2.3")
    serving = OperationsServer(registry, "127.0.0.1", 0, ready=lambda: state.ready)
    yield serving
    serving.close()


def get(port: int, path: str) -> tuple[int, str]:
    return asking.get(f"http://127.0.0.1:{port}{path}")


def test_scrapers_that_trickle_keep_nobody_out_and_take_few_threads(server: OperationsServer) -> None:
    before = threading.active_count()
    trickling = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(200)]
    for number, raw in enumerate(trickling):
        with contextlib.suppress(OSError):
            raw.sendall(b"GET /metrics HTTP/1.1"[: number % 20])
    assert get(server.port, "/healthz") == (200, "ok\n")
    until(lambda: threading.active_count() - before <= 65, 30)
    for raw in trickling:
        raw.close()


def test_paths_and_probes(server: OperationsServer, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{server.port}/readyz"
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert get(server.port, "/healthz") == (200, "ok\n")
    assert get(server.port, "/readyz") == (200, "ready\n")
    assert subprocess.run([sys.executable, "-m", "services.operations.probe", url], timeout=30).returncode == 0
    state.ready = False
    assert get(server.port, "/readyz") == (503, "not ready\n")
    assert (get(server.port, "/healthz")[0], get(server.port, "/")[0]) == (200, 404)
    status, text = get(server.port, "/metrics")
    assert status == 200
    assert 'version="1.2.3"' in text
    assert "process_resident_memory_bytes" in text
    assert probe.main([url]) == 1
    server.close()
    assert probe.main([url]) == 1
    assert probe.main([]) == 2


async def test_lag_of_a_blocked_loop_is_seen() -> None:
    registry = CollectorRegistry()
    lag = EventLoopLag(registry, service="balancer")
    lag.start()
    for _ in range(3):
        await asyncio.sleep(0.1)
        time.sleep(0.4)
    await asyncio.sleep(0.3)
    lag.stop()
    name = "evenkeel_balancer_event_loop_lag_seconds"
    assert registry.get_sample_value(f"{name}_sum") > 0.3
    assert registry.get_sample_value(f"{name}_bucket", {"le": "0.1"}) < registry.get_sample_value(f"{name}_count")


def test_a_balancer_says_when_it_takes_work_and_when_it_no_longer_does(tmp_path: Path) -> None:
    port_file = tmp_path / "metrics"
    flags = ("--metrics-port", "0", "--metrics-port-file", str(port_file), "--grace-seconds", "2")
    with running_balancer(*flags) as balancer, channel(balancer.address, None) as opened:
        port = int(port_file.read_text())
        assert (get(port, "/healthz")[0], get(port, "/readyz")[0]) == (200, 200)
        health = health_pb2_grpc.HealthStub(opened)
        request = health_pb2.HealthCheckRequest(service="evenkeel.balancer.v2.BalancerService")
        watched = health.Watch(request, timeout=4 * SECONDS)
        assert next(watched).status == Status.SERVING
        balancer.signal(signal.SIGTERM)  # a call is open: the balancer drains, is alive, and takes no more work
        assert next(watched).status == Status.NOT_SERVING
        until(lambda: get(port, "/readyz")[0] == 503)
        assert get(port, "/healthz")[0] == 200
        assert balancer.running.wait(4 * SECONDS) == 0
        assert watched.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


def test_a_service_comes_back_at_its_port_and_ends_with_the_block(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("of an earlier run\n")
    with running_service("services.planner", "--log-format", "json", log_file=log, spawn=fork) as planner:
        port = planner.port
        assert get(port, "/readyz")[0] == 200
        assert planner.stop() == 0
        planner.start()
        assert planner.port == port
        assert get(port, "/readyz")[0] == 200
        assert planner.log.count("planner_ready") == 2
        assert "earlier" not in planner.log
        planner.signal(signal.SIGSTOP)  # also one that stands still is ended
    assert planner.running.poll() is not None
    with (
        pytest.raises(RuntimeError, match=r"services\.planner did not start:\n.*--workers is '0'"),
        running_service("services.planner", "--workers", "0", spawn=fork),
    ):
        raise AssertionError("it has started")
