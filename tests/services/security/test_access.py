"""Who may call, and what: while a job trains beside them, which must not miss a round."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.harness.authorities import channel, write_certificate
from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol import balancer_pb2_grpc as pb_grpc
from tests.services.security.conftest import Secured, write_tokens
from tests.services.security.jobs import RunningJob, eventually, join, submit

pytestmark = pytest.mark.timeout(400)


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
    with secured.dial() as raw, pytest.raises((ssl.SSLError, ConnectionError)):
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


def test_client_certificates(tmp_path: Path, secured: Secured) -> None:
    """With a client authority, a certificate of it is needed beside the token."""
    from benchmarks.harness.balancer_process import running_balancer

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
