"""Every line that a service logs is JSON where no person looks on, tells what it is about, and holds no secret."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import grpc
import pytest
import structlog
import trustme
import yaml

from benchmarks.harness.authorities import channel, write_certificate
from benchmarks.harness.balancer_process import running_balancer
from services.operations.program import Sparing
from services.security.tokens import hash_token
from tests.services.balancer.calls import Lead
from tests.services.balancer.jobs import RunningJob

TOKEN, WRONG = "s" * 43, "w" * 43
SECONDS = 60.0


def test_whatever_writes_to_the_log_writes_json() -> None:
    code = """
        import asyncio, logging, warnings
        import structlog
        from services.operations.program import configure_logs
        configure_logs("info", "auto")
        structlog.get_logger("a").info("ours", job="j", step=3)
        structlog.get_logger("a").debug("too low")
        logging.getLogger("library").warning("theirs %s", 1)
        warnings.warn("old")
        def fails():
            password = "hunter2"
            raise RuntimeError(len(password))
        for logger in (structlog.get_logger("a"), logging.getLogger("library")):
            try:
                fails()
            except RuntimeError:
                logger.exception("went wrong")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=SECONDS, check=True
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["event"].partition(":")[0][:10], line["level"]) for line in lines[:2]] == [
        ("ours", "info"), ("theirs 1", "warning"),
    ]  # fmt: skip
    assert len(lines) == 5
    assert "old" in lines[2]["event"]
    assert all("RuntimeError: 7" in line["exception"] for line in lines[3:])
    assert all("timestamp" in line for line in lines)
    assert "hunter2" not in done.stderr
    assert done.stdout == ""


def test_a_balancer_s_log(tmp_path: Path) -> None:
    files = write_certificate(trustme.CA(), tmp_path, "server")
    tokens = tmp_path / "tokens.yml"
    tokens.write_text(yaml.safe_dump({"tokens": [{"name": "t", "sha256": hash_token(TOKEN), "jobs": ["*"]}]}))
    flags = (
        "--tls-certificate", str(files.certificate), "--tls-key", str(files.key), "--token-file", str(tokens),
        "--log-level", "debug",
    )  # fmt: skip
    with running_balancer(*flags) as balancer:
        with RunningJob(lambda: channel(balancer.address, files.ca, token=TOKEN), job="logged") as job:
            job.wait(3)
        with channel(balancer.address, files.ca, token=WRONG) as opened, pytest.raises(grpc.RpcError):
            Lead(opened).info()
        with socket.create_connection(("127.0.0.1", balancer.port), SECONDS) as stranger:  # no TLS: the core complains
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            stranger.settimeout(SECONDS)
            while stranger.recv(4096):
                pass
        assert balancer.stop() == 0
        text = balancer.log
    lines = [json.loads(line) for line in text.splitlines()]
    events = [line["event"] for line in lines]
    assert [event for event in events if event in ("serving", "draining", "stopped")] == [
        "serving", "draining", "stopped",
    ]  # fmt: skip
    planned = [line for line in lines if line["event"] == "round planned"]
    assert [line["round"] for line in planned[:3]] == [0, 1, 2]
    assert {line["job"] for line in planned} == {"logged"}
    failed = next(line for line in lines if line["event"] == "call failed")
    assert (failed["status"], failed["reason"]) == ("UNAUTHENTICATED", "token")
    for secret in (TOKEN, WRONG, hash_token(TOKEN), "PRIVATE KEY"):
        assert secret not in text


def test_lines_about_one_caller_are_spared_and_those_about_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    sparing = Sparing(rate=1.0, burst=3.0)

    def passes(**event: str) -> dict[str, object] | None:
        try:
            return dict(sparing(None, "warning", event))
        except structlog.DropEvent:
            return None

    assert [passes(event="refused", caller="x") is not None for _ in range(10)] == [True] * 3 + [False] * 7
    assert passes(event="refused", caller="y") == {"event": "refused", "caller": "y", "left_out": 7}
    assert all(passes(event="serving") for _ in range(1000)), "lines about nobody are never spared"
    now += 1.0
    assert [passes(event="refused", caller="x") is not None for _ in range(2)] == [True, False]
