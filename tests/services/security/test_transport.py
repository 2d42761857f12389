"""TLS files, and plaintext only where it is wanted."""

from __future__ import annotations

import ssl
import time
from pathlib import Path

import grpc
import pytest
import trustme

from benchmarks.harness import zygote
from benchmarks.harness.authorities import channel, write_certificate
from benchmarks.harness.balancer_process import running_balancer
from evenkeel.credentials import is_loopback
from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol import balancer_pb2_grpc as pb_grpc
from services.security.transport import Transport

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("[::1]", True), ("localhost", True), ("0.0.0.0", False),
     ("::", False), ("[::]", False), ("10.0.0.1", False), ("balancer.internal", False), ("", False)],
)  # fmt: skip
def test_plaintext_beyond_this_machine(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback
    Transport(allow_plaintext=True).check(host, prefix="X_")
    if loopback:
        Transport().check(host, prefix="X_")
    else:
        with pytest.raises(ValueError, match=r"set X_TLS_CERTIFICATE and X_TLS_KEY.*X_ALLOW_PLAINTEXT=true"):
            Transport().check(host, prefix="X_")


def test_the_balancer_refuses_to_start_in_plaintext_for_others() -> None:
    done = zygote.run("services.balancer", "--host", "0.0.0.0", "--port", "0", timeout=240)
    assert done.returncode == 2
    assert "EVENKEEL_BALANCER_ALLOW_PLAINTEXT=true" in done.stderr
    assert "Traceback" not in done.stderr


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    files = write_certificate(trustme.CA(), tmp_path, "one")
    other = write_certificate(trustme.CA(), tmp_path, "two")
    good = Transport(certificate=files.certificate, key=files.key, client_ca=files.ca)
    good.check("0.0.0.0", prefix="X_")
    assert good.context().verify_mode == ssl.CERT_REQUIRED
    for wrong, message in (
        (Transport(certificate=files.certificate), "tls_certificate is set and tls_key is not"),
        (Transport(key=files.key), "tls_key is set and tls_certificate is not"),
        (Transport(client_ca=files.ca), "tls_client_ca is set without tls_certificate"),
        (Transport(certificate=files.certificate, key=other.key), "cannot be used together"),
        (Transport(certificate=files.ca, key=tmp_path / "none.pem"), "none.pem cannot be read"),
        (Transport(certificate=files.certificate, key=files.key, client_ca=files.key), "tls_client_ca .* cannot be"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong.check("0.0.0.0", prefix="X_")


def test_renewed_certificates_are_taken_up(tmp_path: Path) -> None:
    """New connections see the renewed certificate; a damaged file changes nothing."""
    first, second = trustme.CA(), trustme.CA()
    files = write_certificate(first, tmp_path, "server")
    old_ca = tmp_path / "old-ca.pem"
    old_ca.write_bytes(files.ca.read_bytes())

    def ask(ca: Path) -> int:
        with channel(balancer.address, ca) as opened:
            stub = pb_grpc.BalancerServiceStub(opened)
            return int(stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=30).instance)

    with running_balancer("--tls-certificate", str(files.certificate), "--tls-key", str(files.key)) as balancer:
        instance = ask(old_ca)
        files.certificate.write_text("damaged")
        deadline = time.monotonic() + 60
        while "TLS files cannot be used" not in balancer.log:  # which it looks at when somebody connects
            assert ask(old_ca) == instance
            assert time.monotonic() < deadline
        assert ask(old_ca) == instance
        renewed = write_certificate(second, tmp_path, "server")
        deadline = time.monotonic() + 60
        while True:
            try:
                assert ask(renewed.ca) == instance
                break
            except grpc.RpcError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        with pytest.raises(grpc.RpcError):
            ask(old_ca)
