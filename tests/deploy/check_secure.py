"""`make up` and `make down` with deploy/compose.secure.yml: a job of two ranks and curl, by TLS and with tokens."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import trustme

from benchmarks.harness.authorities import Files, channel, write_certificate
from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol import balancer_pb2_grpc as pb_grpc
from tests.deploy.stack import PROJECTS, ROOT, Compose, TwoRanks, eventually, two_ranks

FILES = ("docker-compose.yml", "deploy/compose.secure.yml", "deploy/compose.hostnet.yml")
SERVICES = ("balancer-1", "planner")
SERVICE_USER = 65532
JOB = "secure-test"
pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True, slots=True)
class Secured:
    """The stack with TLS and tokens, and a job that trains with it."""

    compose: Compose
    folder: Path
    authority: trustme.CA
    files: Files
    job: TwoRanks

    def token(self, name: str) -> str:
        return (self.folder / f"{name}.token").read_text().strip()

    def curl(self, *arguments: str) -> tuple[int, str]:
        """Exit status and output of curl, with the answer's status appended."""
        command = ["curl", "-sS", "--noproxy", "*", "--max-time", "60", "-w", "\n%{http_code}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
        return done.returncode, done.stdout + done.stderr

    def instance(self, name: str, ca: Path) -> int:
        with channel("127.0.0.1:50051", ca, token=self.token(name)) as opened:
            stub = pb_grpc.BalancerServiceStub(opened)
            return int(stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=20).instance)


def issue(folder: Path, name: str, *flags: str) -> None:
    """Draws a token as docs/operate/deployment.md tells, and lets the services' user read a new file."""
    tokens = folder / "services/tokens.yml"
    new = not tokens.exists()
    command = [sys.executable, "-m", "services.security.issue", name, "--file", str(tokens), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (folder / f"{name}.token").write_text(done.stdout)
    if new:
        readable(tokens)


def readable(path: Path) -> None:
    """For the user that the services run as, and for nobody else where we may give files away."""
    if os.geteuid() == 0:
        os.chown(path, SERVICE_USER, SERVICE_USER)
        path.chmod(0o400)
    else:
        path.chmod(0o444)


def certificate(authority: trustme.CA, folder: Path, drafts: str) -> Files:
    """A certificate of the authority, put into place by renaming, as renewals do."""
    files = write_certificate(authority, folder / drafts, "server")
    for source, name in ((files.certificate, "server.pem"), (files.key, "server-key.pem")):
        readable(source)
        source.replace(folder / "services" / name)
    return files


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secure")
    (folder / "services").mkdir(mode=0o755)
    (folder / "targets").mkdir()
    authority = trustme.CA()
    files = certificate(authority, folder, "first")
    issue(folder, "team", "--job", f"{JOB}*", "--service", "balancer")
    issue(folder, "others", "--job", "others-*", "--days", "1")
    compose = Compose(project=PROJECTS[1], files=FILES, secrets=folder)
    compose.clear(*SERVICES)
    environment = {"EVENKEEL_TLS_CA": str(files.ca), "EVENKEEL_TOKEN_FILE": str(folder / "team.token")}
    try:
        compose.run("make", "up", f"SERVICES={' '.join(SERVICES)}", timeout=1200)
        with two_ranks(folder, "localhost:50051", JOB, folder / "targets", environment) as job:
            yield Secured(compose, folder, authority, files, job)
    finally:
        print(compose("logs", "--no-color", "--tail", "50", check=False))
        compose.run("make", "down", timeout=300)
        left = compose("ps", "-aq")
        compose("down", "--volumes", "--timeout", "30", check=False)
        assert left == "", "make down left containers"


def planned(secured: Secured, name: str) -> int:
    """Rounds of all jobs that a token may see."""
    ca = (
        secured.folder / ("second" if (secured.folder / "second/server-ca.pem").exists() else "first") / "server-ca.pem"
    )
    code, text = secured.curl("--cacert", str(ca), "-H", f"Authorization: Bearer {secured.token(name)}",
                              "https://localhost:9101/v1/streams")  # fmt: skip
    body, _, status = text.rpartition("\n")
    assert (code, status) == (0, "200"), text
    return sum(row["rounds_planned"] for row in json.loads(body)["streams"])


def test_the_job_trains_through_tls(secured: Secured) -> None:
    eventually(lambda: secured.job.process.poll() is not None or planned(secured, "team") > 0, 240, "rounds planned")
    secured.job.check_running()
    assert planned(secured, "others") == 0


def test_renewal_needs_no_restart(secured: Secured) -> None:
    """Certificate, key and tokens are replaced by renaming, which a mounted file would not notice."""

    def holds(name: str, ca: Path) -> bool:
        try:
            return bool(secured.instance(name, ca))
        except grpc.RpcError:
            return False

    instance = secured.instance("others", secured.files.ca)
    issue(secured.folder, "fresh", "--job", "fresh-*")
    eventually(lambda: holds("fresh", secured.files.ca), 60, "the fresh token to hold")
    another = trustme.CA()
    renewed = certificate(another, secured.folder, "second")
    eventually(lambda: holds("fresh", renewed.ca), 60, "the renewed certificate to be shown")
    assert secured.instance("fresh", renewed.ca) == instance
    address = ("--cacert", str(renewed.ca), "https://localhost:8080/readyz")
    eventually(lambda: secured.curl(*address)[0] == 0, 60, "the planner to show the renewed certificate")
    secured.job.check_running()


def test_no_secret_is_seen(secured: Secured) -> None:
    seen = secured.compose("logs", "--no-color")
    for service in SERVICES:
        name = secured.compose.container(service)
        seen += secured.compose.run("docker", "inspect", name) + secured.compose.run("docker", "top", name)
    assert "balancer-1" in seen
    for name in ("team", "others", "fresh"):
        assert secured.token(name) not in seen
    assert "PRIVATE KEY" not in seen


def test_the_job_ends_whole(secured: Secured) -> None:
    """Last: open connections outlive the renewals."""
    secured.job.check_running()
    before = planned(secured, "team")
    eventually(lambda: planned(secured, "team") > before + 100, 240, "a hundred rounds more")
    ranks = secured.job.finish()
    for rank, counts in enumerate(ranks):
        print(f"rank {rank}: {counts}")
        assert counts["service"] > 100
    assert sum(counts["trained"] for counts in ranks) == sum(counts["loaded"] for counts in ranks)
