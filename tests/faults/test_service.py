"""Whatever befalls the service or the way to it: no sample is lost, and no step waits for more than planning takes."""

import json
import random
import resource
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import pytest
import trustme
import yaml

from benchmarks.harness.authorities import write_certificate
from benchmarks.harness.balancer_process import ServiceProcess, running_balancer, until_logged
from benchmarks.harness.crew import Crew, Run
from benchmarks.harness.proxy import TcpProxy
from benchmarks.harness.relay import Ask, Refused, Relay
from benchmarks.harness.steps import Steps
from evenkeel.credentials import Credentials
from services.security.tokens import hash_token

WAIT = 1.0
"""Seconds that a step may wait on a machine which runs much else; planning takes a thousandth of it."""


def check_waits(run: Run) -> None:
    """The lead never waited for an answer that did not come."""
    assert max(record["wait"] for result in run.results for record in result["records"]) < WAIT
    assert set(run.modes) <= {"service", "embedded"}


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_balancer_that_dies_around_a_round_and_comes_back(
    crew: Crew, balancer: ServiceProcess, relay: Relay, when: str
) -> None:
    died = False

    def die(request: bytes, ask: Ask) -> bytes:
        nonlocal died
        first, died = not died, True
        if first and when != "after":
            balancer.kill()
            if when == "during":
                time.sleep(0.05)
        answer = ask(request)
        if first:
            balancer.kill()
        return answer

    with crew.run(Steps(address=relay.address, name=f"dies-{when}", timeout=20.0)) as run:
        run.until(mode="service", times=3)
        relay.hook = die
        run.until(mode="embedded", times=3)
        assert died
        balancer.start()
        run.until(mode="service", times=3)
    check_waits(run)


def test_a_balancer_that_stands_still_and_goes_on(crew: Crew, balancer: ServiceProcess) -> None:
    with crew.run(Steps(address=balancer.address, name="still", timeout=20.0)) as run:
        run.until(mode="service", times=3)
        balancer.signal(signal.SIGSTOP)
        run.until(mode="embedded", times=10)
        balancer.signal(signal.SIGCONT)
        run.until(mode="service", times=3)
    check_waits(run)
    assert run.results[0]["breaker_changes"] == 0, "its answers came, if late"


def test_a_balancer_that_is_drained_or_never_was_there(crew: Crew, balancer: ServiceProcess) -> None:
    with crew.run(Steps(address=balancer.address, name="drained")) as run:
        run.until(mode="service", times=3)
        assert balancer.stop() == 0
        run.until(mode="embedded", times=5)
        balancer.start()
        run.until(mode="service", times=3)
    check_waits(run)
    with crew.run(Steps(address="127.0.0.1:9", name="nobody")) as run:
        run.until(reason="not_asked", times=10)
    assert set(run.modes) == {"embedded"}
    assert "rank 0 plans by itself" in run.results[0]["warnings"][0]
    assert not run.results[1]["warnings"]


def never(request: bytes, ask: Ask) -> bytes:
    time.sleep(3.0)
    return ask(request)


def late(request: bytes, ask: Ask) -> bytes:
    time.sleep(0.1)
    return ask(request)


def refuse(request: bytes, ask: Ask) -> bytes:
    raise Refused(grpc.StatusCode.UNAVAILABLE)


def forge(request: bytes, ask: Ask) -> bytes:
    answer = ask(request)
    return random.Random(len(answer)).choice([b"", answer[:-5], answer + b"\x01", bytes(len(answer))])


def of_another_round(request: bytes, ask: Ask) -> bytes:
    of_another_round.last, answer = ask(request), getattr(of_another_round, "last", b"")
    return answer


@pytest.mark.parametrize("harm", [never, late, refuse, forge, of_another_round])
def test_answers_that_are_late_refused_or_wrong(crew: Crew, relay: Relay, harm: Callable[[bytes, Ask], bytes]) -> None:
    good = relay.hook
    timeout = 2.0 if harm is never else 20.0
    with crew.run(Steps(address=relay.address, name=harm.__name__, timeout=timeout)) as run:
        run.until(mode="service", times=3)
        relay.hook = harm
        run.until(mode="embedded", times=3)
        relay.hook = good
        run.until(mode="service", times=3)
    check_waits(run)
    assert run.results[0]["breaker_changes"] == 0 or harm is not late


@pytest.mark.parametrize(("limit", "most"), [("max_message_bytes", 1500), ("max_samples", 100)])
def test_rounds_over_a_limit_are_told_once_and_count_as_no_outage(crew: Crew, limit: str, most: int) -> None:
    big = frozenset((1, step) for step in range(8, 100_000, 8))
    with (
        running_balancer(f"--{limit.replace('_', '-')}", str(most)) as strict,
        crew.run(Steps(address=strict.address, name="large", timeout=20.0, big=big)) as run,
    ):
        for _ in range(4):
            run.until(times=8)
            run.until(mode="service", times=2)
    check_waits(run)
    (refused,) = [line for line in run.results[0]["warnings"] if "refuses" in line]
    assert limit in refused
    assert str(most) in refused
    assert run.results[0]["breaker_changes"] == 0


@pytest.mark.parametrize("harm", ["delay", "swallow", "rate", "cut_after", "refuse"])
def test_a_network_that_is_slow_cut_or_loses_everything(crew: Crew, proxy: TcpProxy, harm: str) -> None:
    with crew.run(Steps(address=proxy.address, name=f"network-{harm}", batch_size=40)) as run:
        run.until(mode="service", times=3)
        value = {"delay": 1.0, "swallow": True, "rate": 2000.0, "cut_after": 60, "refuse": True}[harm]
        setattr(proxy, harm, value)
        if harm == "refuse":
            proxy.reset()
        run.until(mode="embedded")
        proxy.heal()
        run.until(mode="service", times=3)
    check_waits(run)


def test_hostile_connections_beside_a_job(crew: Crew, balancer: ServiceProcess) -> None:
    rng = random.Random(5)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    with ExitStack() as stack, crew.run(Steps(address=balancer.address, name="crowd", timeout=10.0)) as run:
        run.until(mode="service", times=2)
        for number in range(200):
            hostile = stack.enter_context(socket.create_connection(("127.0.0.1", balancer.port)))
            said = (b"GET / HTTP/1.1\r\n\r\n", rng.randbytes(5000), preface, preface + rng.randbytes(3000))[number % 4]
            with suppress(OSError):
                hostile.sendall(said)
        channel = stack.enter_context(grpc.insecure_channel(balancer.address))
        plan = channel.unary_unary("/evenkeel.balancer.v2.BalancerService/PlanRound")
        for _ in range(25):
            with pytest.raises(grpc.RpcError) as error:
                plan(rng.randbytes(500), timeout=30.0, metadata=(("evenkeel-job", "other"),))
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        run.until(mode="service", times=5)
    check_waits(run)


@pytest.mark.parametrize("who", ["service", "lead"])
def test_out_of_file_descriptors(crew: Crew, balancer: ServiceProcess, proxy: TcpProxy, who: str) -> None:
    assert balancer.process is not None
    pid = balancer.process.pid if who == "service" else crew.processes[0].pid
    assert pid is not None
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with crew.run(Steps(address=proxy.address, name=f"descriptors-{who}")) as run:
        run.until(mode="service", times=3)
        try:
            proxy.reset()
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))  # so that what is closed leaves no number
            run.until(mode="embedded", times=5)
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        run.until(mode="service", times=3)
    check_waits(run)


def test_ranks_behind_tls_and_tokens_go_on_while_these_are_rotated(crew: Crew, tmp_path: Path) -> None:
    """No call is refused but those of another job, and no secret is logged."""
    authority, first, second = trustme.CA(), "t" * 43, "n" * 43
    server, client = (write_certificate(authority, tmp_path, name) for name in ("server", "client"))
    tokens, token = tmp_path / "tokens.yml", tmp_path / "token"

    def allow(*known: str) -> None:
        entries = [{"name": key[:4], "sha256": hash_token(key), "jobs": ["secured"]} for key in known]
        part = tokens.with_suffix(".part")
        part.write_text(yaml.safe_dump({"tokens": entries}))
        part.replace(tokens)

    allow(first)
    token.write_text(first)
    named = Credentials(ca=server.ca, certificate=client.certificate, key=client.key, token_file=token)
    with running_balancer(
        "--tls-certificate", str(server.certificate), "--tls-key", str(server.key), "--tls-client-ca", str(server.ca),
        "--token-file", str(tokens), "--log-level", "debug",
    ) as balancer:  # fmt: skip
        address = f"localhost:{balancer.port}"
        with crew.run(Steps(address=address, name="secured", timeout=20.0, credentials=named)) as run:
            run.until(mode="service", times=3)
            for change in (lambda: allow(first, second), lambda: token.write_text(second), lambda: allow(second)):
                change()
                time.sleep(1.2)  # files are looked at once a second
                run.catch_up()
                run.until(mode="service", times=3)
        assert "call failed" not in balancer.log
        with crew.run(Steps(address=address, name="another", credentials=named)) as run:
            run.until(mode="embedded", times=3)
        assert set(run.modes) == {"embedded"}
        until_logged(balancer, "PERMISSION_DENIED")
        with socket.create_connection(("127.0.0.1", balancer.port), 60) as stranger, suppress(OSError):
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")  # no TLS: gRPC's core complains
            stranger.recv(4096)
        assert balancer.stop() == 0
        log = balancer.log
    lines, life = [json.loads(line) for line in log.splitlines()], ["serving", "draining", "stopped"]
    assert [line["event"] for line in lines if line["event"] in life] == life
    assert {line["job"] for line in lines if line["event"] == "round planned"} == {"secured"}
    assert not [secret for key in (first, second) for secret in (key, hash_token(key), "PRIVATE KEY") if secret in log]
