"""Health, metrics and probes over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry

from services.operations import probe
from services.operations.http import OperationsServer
from services.operations.process import EventLoopLag, add_process_metrics


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


def get(server: OperationsServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_scrapers_that_trickle_keep_nobody_out_and_take_few_threads(server: OperationsServer) -> None:
    before = threading.active_count()
    trickling = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(200)]
    for number, raw in enumerate(trickling):
        with contextlib.suppress(OSError):
            raw.sendall(b"GET /metrics HTTP/1.1"[: 1 + number % 20])
    assert get(server, "/healthz") == (200, "ok\n")
    deadline = time.monotonic() + 30
    while threading.active_count() - before > 65:
        assert time.monotonic() < deadline, threading.active_count()
        time.sleep(0.01)
    for raw in trickling:
        raw.close()


def test_paths(server: OperationsServer, state: State) -> None:
    assert get(server, "/healthz") == (200, "ok\n")
    assert get(server, "/readyz") == (200, "ready\n")
    state.ready = False
    assert get(server, "/readyz") == (503, "not ready\n")
    assert get(server, "/healthz")[0] == 200
    assert get(server, "/")[0] == 404
    status, text = get(server, "/metrics")
    assert status == 200
    assert 'evenkeel_build_info{python="' in text
    assert 'version="1.2.3"' in text
    assert "process_resident_memory_bytes" in text


def test_probe(server: OperationsServer, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{server.port}/readyz"
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    command = [sys.executable, "-m", "services.operations.probe", url]
    assert subprocess.run(command, timeout=30).returncode == 0
    state.ready = False
    assert probe.main([url]) == 1
    server.close()
    assert probe.main([url]) == 1
    assert probe.main([]) == 2


def test_taken_port_is_named(server: OperationsServer) -> None:
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{server.port} for metrics"):
        OperationsServer(CollectorRegistry(), "127.0.0.1", server.port, ready=lambda: True)


def test_idle_connections_stop_nobody(server: OperationsServer) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
    try:
        assert get(server, "/healthz")[0] == 200
    finally:
        for connection in idle:
            connection.close()


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
