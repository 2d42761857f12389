"""Who may call, and what: while a job trains beside them, which must not miss a round."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.harness.authorities import channel, write_certificate
from benchmarks.harness.balancer_process import running_balancer, until_logged
from evenkeel.protocol.plan_round import RoundNames
from tests.evenkeel.protocol.rounds import make_round
from tests.services.balancer.calls import SECONDS, Lead, refused, request_of
from tests.services.balancer.jobs import RunningJob
from tests.services.security.conftest import Secured
from tests.waiting import until

pytestmark = pytest.mark.timeout(400)


def assert_refused(opened: grpc.Channel, code: str, *texts: str) -> None:
    """Every kind of call of a stranger ends with this status."""
    with opened:
        lead = Lead(opened)
        with refused(code, *texts):
            lead.send(b"no request", "victim")
        with refused(code, *texts):
            lead.info()


def test_tokens_that_do_not_hold(secured: Secured, victim: RunningJob) -> None:
    for token, message in (
        (None, "no token"),
        ("wrong-token-0123456789abcdef0123456789ab", "unknown token"),
        ("x" * 4000, "malformed authorization"),
        (secured.tokens["late"], "token 'late' expired"),
        (secured.tokens["planner"], "token 'planner' is for planner, not for the balancer"),
    ):
        assert_refused(secured.connect(token), "UNAUTHENTICATED", message)
        assert token is None or token not in secured.balancer.log
    with secured.connect(None) as opened:  # health needs none
        health = health_pb2_grpc.HealthStub(opened)
        status = health.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS).status
    assert status == health_pb2.HealthCheckResponse.SERVING


def test_a_token_of_another_job(secured: Secured, victim: RunningJob) -> None:
    """It plans for its own jobs only, whatever the metadata say."""
    ours = make_round(names=RoundNames(job="other-1"))
    theirs = make_round(names=RoundNames(job="victim"))
    with secured.connect(secured.tokens["other"]) as opened:
        lead = Lead(opened)
        lead.plan(ours)
        with refused("PERMISSION_DENIED", "token 'other' is for other-*, not for job 'victim'"):
            lead.plan(theirs)
        with refused("PERMISSION_DENIED", "name the same job in both"):
            lead.send(request_of(theirs), "other-1")


def test_certificates_of_others(secured: Secured, victim: RunningJob, tmp_path: Path) -> None:
    stranger = write_certificate(trustme.CA(), tmp_path, "stranger")
    token = secured.tokens["victim"]
    assert_refused(channel(secured.balancer.address, stranger.ca, token=token), "UNAVAILABLE", "CERTIFICATE")
    assert_refused(channel(secured.balancer.address, None), "UNAVAILABLE")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_old_tls_is_refused(secured: Secured) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    with secured.dial() as raw, pytest.raises((ssl.SSLError, ConnectionError)):
        context.wrap_socket(raw)


def test_client_certificates(tmp_path: Path) -> None:
    """With a client authority, a certificate of it is needed."""
    authority = trustme.CA()
    server, client = (write_certificate(authority, tmp_path, name) for name in ("server", "client"))
    stranger = write_certificate(trustme.CA(), tmp_path, "stranger")
    past = datetime.now(UTC).replace(tzinfo=None) - timedelta(days=1)
    expired = write_certificate(authority, tmp_path, "expired", expires=past)
    flags = ("--tls-certificate", str(server.certificate), "--tls-key", str(server.key))
    with running_balancer(*flags, "--tls-client-ca", str(server.ca)) as balancer:
        with channel(balancer.address, server.ca, client) as opened:
            Lead(opened).plan(make_round())
        for other in (None, stranger, expired):
            assert_refused(channel(balancer.address, server.ca, other), "UNAVAILABLE")


def test_renewed_certificates(tmp_path: Path) -> None:
    """New connections see the renewed certificate; a damaged file changes nothing."""
    files = write_certificate(trustme.CA(), tmp_path, "server")
    old_ca = tmp_path / "old-ca.pem"
    old_ca.write_bytes(files.ca.read_bytes())

    def ask(ca: Path) -> int:
        with channel(balancer.address, ca) as opened:
            return int(Lead(opened).info().instance)

    with running_balancer("--tls-certificate", str(files.certificate), "--tls-key", str(files.key)) as balancer:
        instance = ask(old_ca)
        files.certificate.write_text("damaged")
        # Which it looks at when somebody connects.
        until(lambda: ask(old_ca) == instance and "TLS files cannot be used" in balancer.log)
        renewed = write_certificate(trustme.CA(), tmp_path, "server")
        assert until(lambda: ask(renewed.ca), but=grpc.RpcError) == instance
        until_logged(balancer, "TLS files read again")
        with refused("UNAVAILABLE"):
            ask(old_ca)
