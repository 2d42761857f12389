"""TLS files, and plaintext only where it is wanted."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trustme

from benchmarks.harness import zygote
from benchmarks.harness.authorities import write_certificate
from evenkeel.credentials import is_loopback
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
