"""A balancer with TLS and tokens, shared by the attacks: what one of them leaves behind, the next one meets."""

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
import trustme

from benchmarks.harness.authorities import Files, channel, write_certificate
from benchmarks.harness.balancer_process import ServiceProcess, running_balancer
from tests.services.balancer.jobs import RunningJob
from tests.tokens import known, write_tokens

TOKENS = {name: f"token-of-{name}-0123456789abcdef0123456789abcdef" for name in ("victim", "other", "late", "planner")}


@dataclass(slots=True)
class Secured:
    """A running balancer and what its clients need."""

    balancer: ServiceProcess
    server: Files
    tokens: dict[str, str] = field(default_factory=lambda: dict(TOKENS))

    def connect(self, token: str | None) -> grpc.Channel:
        return channel(self.balancer.address, self.server.ca, token=token)

    def dial(self, timeout: float = 30) -> socket.socket:
        """A bare connection."""
        return socket.create_connection(("127.0.0.1", self.balancer.port), timeout=timeout)

    def connect_as(self, name: str) -> Callable[[], grpc.Channel]:
        return lambda: self.connect(self.tokens[name])


def write_all_tokens(path: Path) -> Path:
    """The token file of the tests."""
    now = datetime.now(UTC)
    return write_tokens(
        path,
        known(TOKENS["victim"], "victim*", name="victim"),
        known(TOKENS["other"], "other-*", name="other", expires=(now + timedelta(days=1)).isoformat()),
        known(TOKENS["late"], name="late", expires=(now - timedelta(seconds=1)).isoformat()),
        known(TOKENS["planner"], name="planner", services=["planner"]),
    )


@pytest.fixture(scope="package")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    server = write_certificate(trustme.CA(), folder, "server")
    tokens = write_all_tokens(folder / "tokens.yml")
    with running_balancer(
        "--tls-certificate", str(server.certificate), "--tls-key", str(server.key),
        "--token-file", str(tokens), "--reflection", "true",
    ) as balancer:  # fmt: skip
        yield Secured(balancer, server)


@pytest.fixture
def victim(secured: Secured) -> Iterator[RunningJob]:
    """A job that trains during the test; no round of it may go wrong."""
    with RunningJob(secured.connect_as("victim")) as job:
        before = job.planned
        yield job
        job.wait(before + 20)
        assert job.troubles == []
