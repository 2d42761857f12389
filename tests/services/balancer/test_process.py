"""The balancer as operators run it: a process of its own."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.harness import zygote
from benchmarks.harness.balancer_process import running_balancer
from evenkeel.protocol import balancer_pb2 as pb
from tests.services.balancer.ranks import Rank

SECONDS = 60.0


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    config = tmp_path / "balancer.yaml"
    config.write_text("max_ranks: 12\ndrain_seconds: 0.2\ngrace_seconds: 2\n")
    environment = {**os.environ, "EVENKEEL_BALANCER_CONFIG": str(config)}
    child = subprocess.Popen(
        [sys.executable, "-m", "services.balancer", "--port", "0", "--port-file", str(tmp_path / "port")],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield child
    child.kill()
    child.communicate()


def wait_for_port(process: subprocess.Popen[str], path: Path) -> int:
    deadline = time.monotonic() + SECONDS
    while not path.exists():
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(path.read_text())


async def test_it_serves_reports_health_and_stops_cleanly(process: subprocess.Popen[str], tmp_path: Path) -> None:
    port = wait_for_port(process, tmp_path / "port")
    async with Rank(port, 0) as waiting:
        health = health_pb2_grpc.HealthStub(waiting.channel)
        reply = await health.Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        info = await waiting.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=60)
        assert info.limits.max_ranks == 12
        await waiting.submit(0, [1], timeout_ms=60_000)
        statistics = pb.GetSessionStatsRequest()
        while (await waiting.stub.GetSessionStats(statistics, timeout=60)).sessions[0].joined_ranks != 1:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert (await waiting.receive()).leaving == pb.Leaving()
        assert (await waiting.answer()).decision.reason == pb.Decision.REASON_DRAINING
        assert (await waiting.receive()).error.code == pb.ERROR_CODE_DRAINING
        assert await waiting.receive() is grpc.aio.EOF
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    events = [json.loads(line)["event"] for line in errors.splitlines()]
    assert events == ["serving", "session opened", "draining", "stopped"]


async def test_ranks_are_not_blamed_for_a_time_in_which_it_was_stopped(
    process: subprocess.Popen[str], tmp_path: Path
) -> None:
    async with Rank(wait_for_port(process, tmp_path / "port"), 0) as waiting:
        await waiting.submit(0, [1], timeout_ms=1000)
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.5)  # so long is it stopped
        process.send_signal(signal.SIGCONT)
        decision = (await waiting.answer()).decision
    assert decision.reason == pb.Decision.REASON_DEADLINE
    assert decision.detail.startswith("the balancer itself did not run for ")
    assert list(decision.missing_ranks) == []


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--port", "banana"], 2, "port"),
        (["--strategy", "best", "--port", "0"], 2, "strategy is 'best'"),
        (["--help"], 0, "--partition-timeout-seconds"),
    ],
)
def test_exit_codes(arguments: list[str], code: int, said: str) -> None:
    done = zygote.run("services.balancer", *arguments, timeout=SECONDS)
    assert done.returncode == code
    assert said in done.stdout + done.stderr


def test_a_port_in_use_is_an_error(process: subprocess.Popen[str], tmp_path: Path) -> None:
    port = wait_for_port(process, tmp_path / "port")
    done = zygote.run("services.balancer", "--port", str(port), timeout=SECONDS)
    assert done.returncode == 1
    assert "choose another host or port" in done.stderr


def test_a_crash_says_where_it_was() -> None:
    with running_balancer() as balancer:
        assert balancer.process is not None
        resource.prlimit(balancer.process.pid, resource.RLIMIT_CORE, (0, 0))
        balancer.signal(signal.SIGSEGV)
        assert balancer.process.wait(30) == -signal.SIGSEGV
        assert "Segmentation fault" in balancer.log
        assert "in run_service" in balancer.log
