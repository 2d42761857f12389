"""Attacks on a balancer while a job trains beside them: it must not miss a round."""

from __future__ import annotations

import contextlib
import resource
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol import balancer_pb2_grpc as pb_grpc
from tests.services.security.authorities import channel, write_certificate
from tests.services.security.conftest import Secured, write_tokens
from tests.services.security.jobs import RunningJob, join, submit

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def victim(secured: Secured) -> Iterator[RunningJob]:
    """A job that trains during the test; no round of it may go wrong."""
    with RunningJob(secured.connect_as("victim")) as job:
        before = min(job.balanced)
        yield job
        deadline = time.monotonic() + 60
        while min(job.balanced) < before + 20 and not job.troubles and time.monotonic() < deadline:
            time.sleep(0.01)
        job.check(before + 20)


def stream(opened: grpc.Channel, *requests: pb.BalanceRequest, timeout: float = 30) -> list[pb.BalanceResponse]:
    with opened:
        return list(pb_grpc.BalancerServiceStub(opened).Balance(iter(requests), timeout=timeout))


def refusal(opened: grpc.Channel, job: str) -> grpc.RpcError:
    """The status of every kind of call, which must all be the same."""
    stub = pb_grpc.BalancerServiceStub(opened)
    errors = []
    for call in (
        lambda: list(stub.Balance(iter([pb.BalanceRequest(join=join(job))]), timeout=30)),
        lambda: stub.BalanceRound(pb.BalanceRoundRequest(join=join(job), submit=submit(0)), timeout=30),
        lambda: stub.GetSessionStats(pb.GetSessionStatsRequest(), timeout=30),
        lambda: stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=30),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        errors.append(caught.value)
    opened.close()
    assert len({error.code() for error in errors}) == 1, errors
    return errors[0]


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (None, "no token"),
        ("wrong-token-0123456789abcdef0123456789ab", "unknown token"),
        ("x" * 4000, "malformed authorization"),
        ("late", "token 'late' expired"),
        ("planner", "token 'planner' is for planner, not for the balancer"),
    ],
)
def test_tokens_that_do_not_hold(secured: Secured, victim: RunningJob, token: str | None, message: str) -> None:
    error = refusal(secured.connect(secured.tokens.get(str(token), token)), "victim")
    assert error.code() == grpc.StatusCode.UNAUTHENTICATED
    assert message in error.details()
    assert str(secured.tokens.get(str(token), token)) not in error.details()


def test_token_of_another_job_cannot_join_read_or_disturb(secured: Secured, victim: RunningJob) -> None:
    for run_id in ("run", "usurper"):
        answers = stream(secured.connect(secured.tokens["other"]), pb.BalanceRequest(join=join("victim", 0, 2, run_id)))
        assert [answer.error.code for answer in answers] == [pb.ERROR_CODE_UNAUTHENTICATED]
        assert answers[0].error.fatal
        assert "token 'other' is for other-*, not for job 'victim'" in answers[0].error.message
    with secured.connect(secured.tokens["other"]) as opened:
        stub = pb_grpc.BalancerServiceStub(opened)
        with pytest.raises(grpc.RpcError) as caught:
            stub.BalanceRound(pb.BalanceRoundRequest(join=join("victim", 0, 2), submit=submit(7)), timeout=30)
        assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
        stream(secured.connect(secured.tokens["other"]), pb.BalanceRequest(join=join("other-1")))
        for job in ("", "victim"):
            seen = stub.GetSessionStats(pb.GetSessionStatsRequest(job=job), timeout=30).sessions
            assert "victim" not in {session.job for session in seen}
    with secured.connect(secured.tokens["victim"]) as opened:
        stub = pb_grpc.BalancerServiceStub(opened)
        seen = stub.GetSessionStats(pb.GetSessionStatsRequest(), timeout=30).sessions
        assert {session.job for session in seen} == {"victim"}


def test_certificate_of_another_authority(secured: Secured, victim: RunningJob, tmp_path: Path) -> None:
    stranger = write_certificate(trustme.CA(), tmp_path, "stranger")
    with channel(secured.balancer.address, stranger.ca, token=secured.tokens["victim"]) as opened:
        error = refusal(opened, "victim")
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert "CERTIFICATE_VERIFY_FAILED" in error.details()


def test_plaintext_gets_nothing(secured: Secured, victim: RunningJob) -> None:
    assert refusal(channel(secured.balancer.address, None), "victim").code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_old_tls_is_refused(secured: Secured, victim: RunningJob) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    with connection(secured) as raw, pytest.raises((ssl.SSLError, ConnectionError)):
        context.wrap_socket(raw)


def test_health_needs_no_token(secured: Secured, victim: RunningJob) -> None:
    with secured.connect(None) as opened:
        answer = health_pb2_grpc.HealthStub(opened).Check(health_pb2.HealthCheckRequest(), timeout=30)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_rotation_without_restart(secured: Secured, victim: RunningJob) -> None:
    fresh = "a-fresh-token-0123456789abcdef0123456789"
    info = pb.GetServerInfoRequest()
    with secured.connect(fresh) as opened:
        stub = pb_grpc.BalancerServiceStub(opened)
        with pytest.raises(grpc.RpcError, match="unknown token"):
            stub.GetServerInfo(info, timeout=30)
        write_tokens(secured.token_file, fresh=fresh)
        eventually(lambda: stub.GetServerInfo(info, timeout=30))
        secured.token_file.write_text("tokens: [")  # damaged: what was read before stays in force
        reported = time.monotonic() + 30
        while "token file cannot be used" not in secured.balancer.log:
            stub.GetServerInfo(info, timeout=30)
            assert time.monotonic() < reported
            time.sleep(0.1)
        stub.GetServerInfo(info, timeout=30)
        # A stream that is open when its token is withdrawn ends, even though it goes on sending.
        ended = threading.Event()

        def requests() -> Iterator[pb.BalanceRequest]:
            yield pb.BalanceRequest(join=join("other-rotating"))
            for number in range(1000):
                if ended.wait(0.05):
                    return
                yield pb.BalanceRequest(submit=submit(number))

        answers = stub.Balance(requests(), timeout=30)
        assert next(answers).WhichOneof("response") == "joined"
        write_tokens(secured.token_file)
        last = list(answers)[-1]
        ended.set()
        assert last.error.code == pb.ERROR_CODE_UNAUTHENTICATED
        with pytest.raises(grpc.RpcError, match="unknown token"):
            stub.GetServerInfo(info, timeout=30)


def test_idle_streams_and_calls_of_a_withdrawn_token_end(secured: Secured, victim: RunningJob) -> None:
    fleeting = "a-fleeting-token-0123456789abcdef0123456789"
    write_tokens(secured.token_file, fleeting=fleeting)
    with secured.connect(fleeting) as opened:
        stub, hold = pb_grpc.BalancerServiceStub(opened), threading.Event()
        eventually(lambda: stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=30))

        def requests() -> Iterator[pb.BalanceRequest]:
            yield pb.BalanceRequest(join=join("other-idle", 0, 2))
            hold.wait(60)  # nothing more is said

        answers = stub.Balance(requests(), timeout=60)
        assert next(answers).WhichOneof("response") == "joined"
        waiting = stub.BalanceRound.future(
            pb.BalanceRoundRequest(join=join("other-idle-call", 0, 2), submit=submit(0)), timeout=60
        )
        write_tokens(secured.token_file)
        (last,) = list(answers)
        hold.set()
        assert last.error.code == pb.ERROR_CODE_UNAUTHENTICATED
        assert waiting.result(30).answer.error.code == pb.ERROR_CODE_UNAUTHENTICATED


def test_slow_loris(secured: Secured, victim: RunningJob) -> None:
    """Connections that never finish a handshake, or trickle, are closed; they must not stop others from connecting."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(connection(secured)) for _ in range(300)]
        hello = ssl_client_hello()
        for number, raw in enumerate(sockets):
            raw.sendall(hello[: number % len(hello)])
        with secured.connect(secured.tokens["victim"]) as opened:
            pb_grpc.BalancerServiceStub(opened).GetServerInfo(pb.GetServerInfoRequest(), timeout=30)
        deadline = time.monotonic() + 60
        waiting = set(sockets)
        while waiting and time.monotonic() < deadline:
            waiting = {raw for raw in waiting if not is_closed(raw)}
            time.sleep(0.05)
        assert not waiting, f"{len(waiting)} of {len(sockets)} connections are still open"


def test_streams_that_never_join(secured: Secured, victim: RunningJob) -> None:
    with secured.connect(secured.tokens["other"]) as opened:
        stub, hold = pb_grpc.BalancerServiceStub(opened), threading.Event()

        def nothing() -> Iterator[pb.BalanceRequest]:
            hold.wait(60)
            yield from ()

        streams = [stub.Balance(nothing(), timeout=60) for _ in range(64)]
        codes = {answer.error.code for one in streams for answer in one}
        hold.set()
    assert codes == {pb.ERROR_CODE_NOT_JOINED}


def test_message_flood(secured: Secured, victim: RunningJob) -> None:
    """A client that sends as fast as it can, never reading, on many streams."""
    stop = time.monotonic() + 3
    with contextlib.ExitStack() as stack:
        calls = []
        for number in range(4):
            opened = stack.enter_context(secured.connect(secured.tokens["other"]))

            def flood(number: int = number) -> Iterator[pb.BalanceRequest]:
                yield pb.BalanceRequest(join=join(f"other-flood-{number}"))
                message = pb.BalanceRequest(submit=submit(0, samples=256))
                while time.monotonic() < stop:
                    yield message

            calls.append(pb_grpc.BalancerServiceStub(opened).Balance(flood(), timeout=30))
        time.sleep(3.5)
        for call in calls:
            call.cancel()


@pytest.mark.parametrize("seed", range(3))
def test_fuzzed_messages(secured: Secured, victim: RunningJob, seed: int) -> None:
    """Bytes that are no message, and messages whose fields say anything; the server answers each and lives on."""
    rng = np.random.default_rng(seed)
    with secured.connect(secured.tokens["other"]) as opened:
        method = "/evenkeel.balancer.v1.BalancerService/"
        raw_stream = opened.stream_stream(f"{method}Balance", lambda raw: raw, pb.BalanceResponse.FromString)
        raw_round = opened.unary_unary(f"{method}BalanceRound", lambda raw: raw, pb.BalanceRoundResponse.FromString)
        valid = pb.BalanceRequest(submit=submit(0)).SerializeToString()
        for number in range(60):
            name = f"other-{seed}-{number}"
            first = pb.BalanceRequest(join=join(name)).SerializeToString()
            with contextlib.suppress(grpc.RpcError):
                list(raw_stream(iter([first, mutate(valid, rng), mutate(valid, rng)]), timeout=5))
            with contextlib.suppress(grpc.RpcError):
                list(raw_stream(iter([mutate(first, rng)]), timeout=5))
            both = pb.BalanceRoundRequest(join=join(name, run_id="r"), submit=submit(0)).SerializeToString()
            with contextlib.suppress(grpc.RpcError):
                raw_round(mutate(both, rng), timeout=5)
        pb_grpc.BalancerServiceStub(opened).GetServerInfo(pb.GetServerInfoRequest(), timeout=30)


def test_malformed_frames(secured: Secured, victim: RunningJob) -> None:
    """Valid TLS, then no HTTP/2, broken HTTP/2, or an endless header."""
    context = ssl.create_default_context(cafile=str(secured.server.ca))
    context.set_alpn_protocols(["h2"])
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    rng = np.random.default_rng(0)
    attacks = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        preface + b"\xff" * 4096,
        preface + settings + bytes([0xFF, 0xFF, 0xFF, 0, 0, 0, 0, 0, 1]) + b"x" * 65536,  # a frame of 16 MiB
        preface + settings + bytes([0, 0x10, 0, 1, 0, 0, 0, 0, 1]) + b"\x40" * 4096,  # headers that do not decode
        preface + settings + bytes([0, 0, 4, 3, 0, 0, 0, 0, 1, 0, 0, 0, 8]) * 5000,  # resets of streams never opened
        preface + settings + bytes([0, 0, 8, 6, 0, 0, 0, 0, 0]) * 1 + b"12345678" * 5000,  # pings and rubbish
        preface + settings * 20_000,  # a flood of settings
        *[preface + settings + rng.bytes(2000) for _ in range(20)],
    ]
    for attack in attacks:
        with connection(secured) as raw, context.wrap_socket(raw, server_hostname="localhost") as secure:
            with contextlib.suppress(OSError):
                secure.sendall(attack)
            secure.settimeout(0.2)
            with contextlib.suppress(OSError):
                while secure.recv(65536):
                    pass


def test_oversized_message(secured: Secured, victim: RunningJob) -> None:
    huge = submit(0)
    huge.memory = bytes(20 << 20)
    with secured.connect(secured.tokens["other"]) as opened:
        with pytest.raises(grpc.RpcError) as caught:
            pb_grpc.BalancerServiceStub(opened).BalanceRound(
                pb.BalanceRoundRequest(join=join("other-huge"), submit=huge), timeout=20
            )
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_ten_thousand_connections(secured: Secured, victim: RunningJob) -> None:
    """Beyond its limit a server takes no connection; the job's own go on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 10_000
    if hard != resource.RLIM_INFINITY and hard < wanted + 500:
        wanted = hard - 500
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted + 500), hard))
    sockets: list[socket.socket] = []
    try:
        for _ in range(wanted):
            with contextlib.suppress(OSError):
                sockets.append(connection(secured, timeout=5))
        assert len(sockets) > wanted * 0.9
        time.sleep(1.0)
    finally:
        for raw in sockets:
            raw.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    # Once they are gone there is room again.
    with secured.connect(secured.tokens["victim"]) as opened:
        stub = pb_grpc.BalancerServiceStub(opened)
        eventually(lambda: stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=5), seconds=30)


def test_no_secret_in_log_or_process_list(secured: Secured) -> None:
    process = secured.balancer.process
    assert process is not None
    command = Path(f"/proc/{process.pid}/cmdline").read_text() + Path(f"/proc/{process.pid}/environ").read_text()
    log = secured.balancer.log
    assert "call refused" in log  # the attacks above have been seen
    for token in secured.tokens.values():
        assert token not in log
        assert token not in command
    assert "Traceback" not in log, log[log.index("Traceback") :][:3000]


def test_client_certificates(tmp_path: Path, secured: Secured) -> None:
    """With a client authority, a certificate of it is needed beside the token."""
    from tests.balancer_process import running_balancer

    authority, server = secured.authority, secured.server
    client = write_certificate(authority, tmp_path, "client")
    stranger = write_certificate(trustme.CA(), tmp_path, "stranger")
    expired = write_certificate(
        authority, tmp_path, "expired", expires=datetime.now(UTC).replace(tzinfo=None) - timedelta(days=1)
    )
    flags = ("--tls-certificate", str(server.certificate), "--tls-key", str(server.key), "--tls-client-ca",
             str(server.ca))  # fmt: skip
    info = pb.GetServerInfoRequest()
    with running_balancer(*flags) as balancer:
        with channel(balancer.address, server.ca, client) as opened:
            assert pb_grpc.BalancerServiceStub(opened).GetServerInfo(info, timeout=30).instance
        for other in (None, stranger, expired):
            with channel(balancer.address, server.ca, other) as opened:
                assert refusal(opened, "job").code() == grpc.StatusCode.UNAVAILABLE


# ------------------------------------------------------------------ helpers


def connection(secured: Secured, timeout: float = 30) -> socket.socket:
    return socket.create_connection(("127.0.0.1", secured.balancer.port), timeout=timeout)


def is_closed(raw: socket.socket) -> bool:
    raw.settimeout(0.001)
    try:
        return raw.recv(4096) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def ssl_client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


def mutate(message: bytes, rng: np.random.Generator) -> bytes:
    """Some bytes changed, cut out, doubled or appended."""
    data = bytearray(message)
    for _ in range(int(rng.integers(1, 6))):
        at = int(rng.integers(0, max(1, len(data))))
        kind = rng.integers(0, 5)
        if kind == 0 and data:
            data[at % len(data)] = int(rng.integers(0, 256))
        elif kind == 1:
            del data[at : at + int(rng.integers(1, 32))]
        elif kind == 2:
            data[at:at] = rng.bytes(int(rng.integers(1, 32)))
        elif kind == 3:
            data[at:at] = data[: int(rng.integers(1, 64))]
        else:
            data += rng.bytes(8)
    return bytes(data)


def eventually(call: Any, seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except grpc.RpcError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
