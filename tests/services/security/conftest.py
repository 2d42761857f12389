"""A balancer with TLS and tokens, shared by the attacks: what one of them leaves behind, the next one meets."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
import trustme
import yaml

from benchmarks.harness.authorities import Files, channel, write_certificate
from benchmarks.harness.balancer_process import ServiceProcess, running_balancer
from services.security.tokens import hash_token
from tests.services.balancer.jobs import RunningJob

TOKENS = {name: f"token-of-{name}-0123456789abcdef0123456789abcdef" for name in ("victim", "other", "late", "planner")}


@dataclass(slots=True)
class Secured:
    """A running balancer and what its clients need."""

    balancer: ServiceProcess
    authority: trustme.CA
    server: Files
    token_file: Path
    tokens: dict[str, str] = field(default_factory=lambda: dict(TOKENS))

    def connect(self, token: str | None) -> grpc.Channel:
        return channel(self.balancer.address, self.server.ca, token=token)

    def dial(self, timeout: float = 30) -> socket.socket:
        """A bare connection."""
        return socket.create_connection(("127.0.0.1", self.balancer.port), timeout=timeout)

    def connect_as(self, name: str) -> Callable[[], grpc.Channel]:
        return lambda: self.connect(self.tokens[name])


def write_tokens(path: Path, without: str | None = None, **extra: str) -> None:
    """The token file of the tests; entries of `extra` are (name, token)."""
    now = datetime.now(UTC)
    entries = [
        {"name": "victim", "sha256": hash_token(TOKENS["victim"]), "jobs": ["victim*"]},
        {"name": "other", "sha256": hash_token(TOKENS["other"]), "jobs": ["other-*"],
         "expires": (now + timedelta(days=1)).isoformat()},
        {"name": "late", "sha256": hash_token(TOKENS["late"]), "jobs": ["*"],
         "expires": (now - timedelta(seconds=1)).isoformat()},
        {"name": "planner", "sha256": hash_token(TOKENS["planner"]), "jobs": ["*"], "services": ["planner"]},
    ]  # fmt: skip
    entries += [{"name": name, "sha256": hash_token(token), "jobs": ["*"]} for name, token in extra.items()]
    part = path.with_suffix(".part")
    part.write_text(yaml.safe_dump({"tokens": [entry for entry in entries if entry["name"] != without]}))
    part.replace(path)


@pytest.fixture(scope="package")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    authority = trustme.CA()
    server = write_certificate(authority, folder, "server")
    write_tokens(folder / "tokens.yml")
    with running_balancer(
        "--tls-certificate", str(server.certificate), "--tls-key", str(server.key),
        "--token-file", str(folder / "tokens.yml"), "--reflection", "true",
    ) as balancer:  # fmt: skip
        yield Secured(balancer, authority, server, folder / "tokens.yml")


@pytest.fixture
def victim(secured: Secured) -> Iterator[RunningJob]:
    """A job that trains during the test; no round of it may go wrong."""
    with RunningJob(secured.connect_as("victim")) as job:
        before = job.planned
        yield job
        job.wait(before + 20)
        assert job.troubles == []
