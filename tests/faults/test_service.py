"""What else may befall the service, beside a job that goes on."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from benchmarks.harness.balancer_process import ServiceProcess, running_balancer
from benchmarks.harness.crew import STARVED_SLACK, Crew
from benchmarks.harness.proxy import TcpProxy
from benchmarks.harness.relay import Relay
from benchmarks.harness.steps import Steps
from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol import balancer_pb2_grpc as pb_grpc


def test_a_message_larger_than_the_service_takes(crew: Crew) -> None:
    with running_balancer("--max-message-bytes", "3000") as strict:
        steps = Steps(address=strict.address, name="large", timeout=3.0, big=frozenset({(1, 4)}), batch_size=8)
        with crew.run(steps) as run:
            run.until(reason="no_decision")
            run.until(mode="service", times=3)
        assert run.results[0]["records"][4]["ranks"] == (1,)
        assert "max_message_bytes" in " ".join(run.results[1]["warnings"])


def test_a_client_that_is_cancelled_inside_the_barrier_comes_again(crew: Crew, relay: Relay) -> None:
    def submits(rank: int, submit: pb.Submit) -> list[pb.Submit]:
        if submit.round == 5 and rank == 0:
            with relay.lock:
                relay.seen["submitted"] += 1
                if relay.seen["submitted"] == 1:
                    relay.cancel(0)
        elif submit.round == 5:
            deadline = time.monotonic() + 5
            while relay.seen["submitted"] < 2 and time.monotonic() < deadline:
                time.sleep(0.005)
        return [submit]

    relay.submits = submits
    with crew.run(Steps(address=relay.address, name="cancelled", timeout=10.0)) as run:
        run.until(mode="service", times=10)
    assert relay.seen["submitted"] == 2
    assert set(run.modes) == {"service"}


@pytest.fixture
def jumping_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceProcess]:
    """A balancer whose wall clock jumps by up to a day, both ways, whenever it is read."""
    (tmp_path / "sitecustomize.py").write_text(
        "import random, time\nreal = time.time\n"
        "def jump():\n"
        f"    open({str(tmp_path / 'jumps')!r}, 'a').write('x')\n"
        "    return real() + random.uniform(-86400, 86400)\n"
        "time.time, time.time_ns = jump, lambda: int(jump() * 1e9)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with running_balancer("--log-format", "json", "--log-level", "debug", interpreter=True) as process:
        yield process


def test_a_clock_that_jumps_on_the_server(crew: Crew, jumping_clock: ServiceProcess, tmp_path: Path) -> None:
    with crew.run(Steps(address=jumping_clock.address, name="clock", timeout=10.0)) as run:
        run.until(mode="service", times=15)
    assert set(run.modes) == {"service"}
    assert (tmp_path / "jumps").stat().st_size > 0


def test_a_clock_that_jumps_on_the_ranks(crew: Crew, relay: Relay) -> None:
    """Also while an answer does not come: how long the ranks wait for it goes by no wall clock."""

    def answers(rank: int, answer: pb.Answer) -> list[pb.Answer]:
        if answer.round == 6 and relay.seen["dropped"] == 0:
            relay.seen["dropped"] += 1
            return []
        return [answer]

    relay.answers = answers
    with crew.run(Steps(address=relay.address, name="clocks", timeout=2.0, jumping_clock=True)) as run:
        run.until(mode="service", times=5)
        run.until(reason="no_decision")
        run.until(mode="service", times=10)
    assert relay.seen["dropped"] == 1
    assert run.modes[:6] == ["service"] * 6
    waits = [result["records"][6]["wait"] for result in run.results]
    assert 1.5 < max(waits) < 2.0 + STARVED_SLACK


def test_idle_and_hostile_connections_beside_a_job(crew: Crew, balancer: ServiceProcess) -> None:
    rng = random.Random(5)
    with contextlib.ExitStack() as stack, crew.run(Steps(address=balancer.address, name="crowd", timeout=10.0)) as run:
        run.until(mode="service", times=2)
        sockets = [stack.enter_context(socket.create_connection(("127.0.0.1", balancer.port))) for _ in range(200 + 25)]
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        for number, hostile in enumerate(sockets[200:]):
            said = (b"GET / HTTP/1.1\r\n\r\n", rng.randbytes(5000), preface, preface + rng.randbytes(3000))[number % 4]
            with contextlib.suppress(OSError):
                hostile.sendall(said)
        channel = stack.enter_context(grpc.insecure_channel(balancer.address))
        stub = pb_grpc.BalancerServiceStub(channel)  # type: ignore[no-untyped-call]
        nonsense = pb.BalanceRequest(submit=pb.Submit(round=2**63, num_samples=2**31, costs_i64=b"123"))
        calls = [stub.Balance(iter([nonsense] * 3)) for _ in range(25)]
        refused = sum(any(response.WhichOneof("response") == "error" for response in call) for call in calls)
        run.until(mode="service", times=20)
        assert refused == 25
    assert set(run.modes) == {"service"}


@pytest.mark.parametrize("who", ["service", "rank"])
def test_out_of_file_descriptors(crew: Crew, balancer: ServiceProcess, proxy: TcpProxy, who: str) -> None:
    assert balancer.process is not None
    pid = balancer.process.pid if who == "service" else crew.processes[1].pid
    assert pid is not None
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with crew.run(Steps(address=proxy.address, name=f"descriptors-{who}")) as run:
        run.until(mode="service", times=3)
        used = max(map(int, os.listdir(f"/proc/{pid}/fd"))) + 1
        try:
            proxy.reset()
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(used, 8) if who == "rank" else 8, before[1]))
            run.until(reason="no_decision")
            run.until(mode="embedded", times=10)
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        run.until(mode="service", times=3)
    assert run.results[0]["breaker_changes"] >= 2
