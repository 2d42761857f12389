"""The planner's process behind TLS and tokens, while its certificate is renewed."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import trustme

from benchmarks.harness.authorities import write_certificate
from benchmarks.harness.balancer_process import fork, until_logged
from services.operations.launch import running_service
from services.security.tokens import hash_token
from tests.asking import get
from tests.services.security.conftest import TOKENS, write_tokens
from tests.waiting import until

pytestmark = pytest.mark.timeout(400)


def ask(port: int, ca: Path, token: str | None, path: str = "/v1/hardware-profiles") -> int:
    context = ssl.create_default_context(cafile=str(ca))
    return get(f"https://localhost:{port}{path}", token, context=context)[0]


def test_tls_tokens_and_renewal(tmp_path: Path) -> None:
    files = write_certificate(trustme.CA(), tmp_path, "server")
    old_ca = tmp_path / "old.pem"
    old_ca.write_bytes(files.ca.read_bytes())
    write_tokens(tmp_path / "tokens.yml")
    flags = ("--tls-certificate", str(files.certificate), "--tls-key", str(files.key))
    with running_service(
        "services.planner", *flags, "--token-file", str(tmp_path / "tokens.yml"), "--log-level", "debug",
        log_file=tmp_path / "log", spawn=fork,
    ) as planner:  # fmt: skip
        port = planner.port
        assert [ask(port, old_ca, token) for token in (TOKENS["planner"], None, TOKENS["late"])] == [200, 401, 401]
        without = {path: ask(port, old_ca, None, path) for path in ("/healthz", "//healthz", "/healthz/../v1/plans")}
        assert without == {"/healthz": 200, "//healthz": 401, "/healthz/../v1/plans": 401}
        with socket.create_connection(("127.0.0.1", port), timeout=30) as plain:  # no TLS, no answer
            plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            with contextlib.suppress(OSError):
                assert b"200" not in plain.recv(4096)
        files.certificate.write_text("damaged")
        until_logged(planner, "TLS files cannot be used")
        assert ask(port, old_ca, TOKENS["planner"]) == 200
        renewed = write_certificate(trustme.CA(), tmp_path, "server")
        assert until(lambda: ask(port, renewed.ca, TOKENS["planner"]), but=urllib.error.URLError) == 200
        assert planner.stop() == 0
    log = (tmp_path / "log").read_text()
    events = [json.loads(line)["event"] for line in log.splitlines()]
    assert (events[0], events[-1]) == ("planner_ready", "planner_stopped")
    assert {"TLS files read again", "request refused"} <= set(events)
    assert not [secret for token in TOKENS.values() for secret in (token, hash_token(token)) if secret in log]
