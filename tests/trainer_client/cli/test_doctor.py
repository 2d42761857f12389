"""`evenkeel doctor` against real services and against what goes wrong on the way to them."""

from __future__ import annotations

import datetime
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from typer.testing import CliRunner

from benchmarks.harness.authorities import Files, write_certificate
from benchmarks.harness.balancer_process import ServiceProcess, running_balancer
from evenkeel.variables import KNOWN
from tests.tokens import known, write_tokens
from trainer_client.cli import app

TOKEN = "d" * 43


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    soon = datetime.datetime.now(datetime.UTC).replace(tzinfo=None) + datetime.timedelta(days=3)
    return write_certificate(trustme.CA(), tmp_path_factory.mktemp("tls"), "server", expires=soon)


@pytest.fixture(scope="module")
def secured(files: Files) -> Iterator[ServiceProcess]:
    tokens = write_tokens(files.ca.with_name("tokens.yml"), known(TOKEN, "train-*"))
    files.ca.with_name("token").write_text(TOKEN)
    with running_balancer(
        "--tls-certificate", str(files.certificate), "--tls-key", str(files.key), "--token-file", str(tokens)
    ) as balancer:
        yield balancer


def examine(*arguments: object) -> tuple[int, dict[str, dict[str, Any]]]:
    result = CliRunner().invoke(app, ["doctor", "--json", "--timeout", "3", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, {finding["check"]: finding for finding in json.loads(result.stdout)}


def failed(findings: dict[str, dict[str, Any]]) -> list[str]:
    return [check for check, finding in findings.items() if finding["status"] == "fail"]


@pytest.fixture
def flags(secured: ServiceProcess, files: Files) -> list[object]:
    """The way to the balancer: by one address, with its authority and a token."""
    token = files.ca.with_name("token")
    return ["--balancer", f"grpc://localhost:{secured.port}", "--tls-ca", files.ca, "--token-file", token]


def test_all_is_well_also_where_there_are_proxies_for_the_way_out(
    flags: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    code, findings = examine(*flags)
    assert (code, failed(findings)) == (0, []), findings
    assert findings["token"]["text"] == "accepted"
    assert findings["versions"]["status"] == "ok"
    assert "expires in 3.0 days" in findings["TLS"]["text"] or "expires in 2.9" in findings["TLS"]["text"]
    assert findings["TLS"]["status"] == "warn"
    assert findings["torch"]["status"] == "ok"
    assert TOKEN not in json.dumps(findings)


def test_each_obstacle_is_told_apart(secured: ServiceProcess, files: Files, tmp_path: Path) -> None:
    address = f"localhost:{secured.port}"
    stranger = write_certificate(trustme.CA(), tmp_path, "stranger")
    wrong = tmp_path / "wrong"
    wrong.write_text("w" * 43)
    with socket.socket() as nobody, socket.create_server(("127.0.0.1", 0)) as silent:  # which answers nothing
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        hangs = f"127.0.0.1:{silent.getsockname()[1]}"
        cases: list[tuple[tuple[object, ...], str, str]] = [
            (("nowhere",), "settings", "give host:port"),
            (("no.such.host.invalid:1",), "address", "has no address"),
            ((f"127.0.0.1:{nobody.getsockname()[1]}",), "address", "refused"),
            ((hangs, "--timeout", 0.5), "TLS", "timed out"),
            ((address,), "TLS", "the balancer speaks TLS, and this client plaintext"),
            ((address, "--tls-ca", stranger.ca), "TLS", "does not hold"),
            ((address, "--tls-ca", files.ca), "token", "no token"),
            ((address, "--tls-ca", files.ca, "--token-file", wrong), "token", "unknown token"),
            ((address, "--tls-ca", tmp_path / "none"), "settings", "cannot be read"),
        ]
        for arguments, check, text in cases:
            code, findings = examine("--balancer", *arguments)
            assert (code, failed(findings)) == (1, [check]), (arguments, findings)
            assert text in findings[check]["text"], findings[check]
            assert findings[check]["remedy"]


def test_plaintext_and_planner() -> None:
    with running_balancer("--metrics-port", "0") as balancer:
        code, findings = examine("--balancer", balancer.address, "--planner", "http://127.0.0.1:1")
    assert (code, failed(findings)) == (1, ["planner"])
    assert findings["TLS"]["status"] == "skip"
    assert findings["token"]["text"] == "none needed"


def test_without_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENKEEL_BALANCER", "embedded")
    code, findings = examine()
    assert (code, findings["balancer"]["status"]) == (0, "skip")
    shown = CliRunner().invoke(app, ["doctor"])
    assert (shown.exit_code, "evenkeel" in shown.stdout) == (0, True)


@pytest.mark.parametrize("job", ["train-42", "others"])
def test_whether_a_job_may_be_planned_is_told_by_replica(
    flags: list[object], secured: ServiceProcess, job: str
) -> None:
    """The addresses behind a name are IPs; their certificate holds the name."""
    code, findings = examine(*flags, "--job", job)
    mine = {check.removesuffix(f" 127.0.0.1:{secured.port}"): finding for check, finding in findings.items()}
    assert (mine["TLS"]["status"], mine["token"]["text"]) == ("warn", "accepted"), findings
    if job == "others":
        assert "others: PERMISSION_DENIED: token 'team' is for train-*" in mine["job"]["text"]
    else:
        assert mine["job"]["text"] == "train-42 may be planned here"
    wrong = [check for check in failed(findings) if "::1" not in check]
    assert len(wrong) == (job == "others")
    assert code == (1 if failed(findings) else 0)


def test_variables_that_are_likely_misspelt_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENKEEL_TOKENFILE", "/run/token")
    monkeypatch.setenv("EVENKEEL_OURS", "1")
    _, findings = examine()
    assert findings["variables"]["text"] == "EVENKEEL_TOKENFILE is set, and nothing reads it"
    assert findings["variables"]["remedy"] == "did you mean EVENKEEL_TOKEN_FILE?"


def test_all_variables_that_the_code_reads_are_known() -> None:
    root = Path(__file__).parents[3]
    read = {
        name
        for folder in ("evenkeel", "trainer_client", "examples")
        for path in (root / folder).rglob("*.py")
        for name in re.findall(r"\bEVENKEEL_([A-Z][A-Z_]*[A-Z])\b", path.read_text())
    }
    assert {name for name in read if not name.startswith(("BALANCER_", "PLANNER_"))} == set(KNOWN)
