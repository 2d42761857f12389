"""What the checks of running containers share: compose, HTTP, Prometheus, and a job of two ranks."""

import ast
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OFFLINE = os.environ.get("EVENKEEL_COMPOSE_OFFLINE") == "1"
BASE_IMAGE = os.environ.get("EVENKEEL_PYTHON_IMAGE", "python:3.11-slim")
PROMETHEUS_IMAGE = "evenkeel-prometheus:test"
PORTS = {
    "balancer-1": (50051, 9101),
    "balancer-2": (),
    "planner": (8080, 9102),
    "prometheus": (9090,),
    "grafana": (3000,),
}
PROJECTS = ("evenkeel-test", "evenkeel-secure")
BUILD_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Compose:
    """A compose project of this repository.

    Attributes:
        project: Its name; containers of other projects stay untouched.
        files: The compose files, in order.
        secrets: The folder that stands for deploy/secrets.
    """

    project: str
    files: tuple[str, ...]
    secrets: Path

    @property
    def environment(self) -> dict[str, str]:
        """What docker compose and make need to know."""
        values = {
            **os.environ, "COMPOSE_PROJECT_NAME": self.project, "COMPOSE_FILE": ":".join(self.files),
            "EVENKEEL_PYTHON_IMAGE": BASE_IMAGE, "EVENKEEL_VERSION": "test", "EVENKEEL_SECRETS": str(self.secrets),
            "DOCKER_BUILDKIT": "1",
        }  # fmt: skip
        if OFFLINE:
            values["EVENKEEL_PROMETHEUS_IMAGE"] = PROMETHEUS_IMAGE
        return values

    def run(self, *command: str, check: bool = True, timeout: float = 120) -> str:
        """Runs a command in the repository's root; returns what it printed.

        Raises:
            AssertionError: If it fails and `check` is set, or if it runs into the timeout.
        """
        shown = " ".join(command)
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{shown}: not done after {timeout:g} s\n{error.stdout}\n{error.stderr}") from None
        assert not check or done.returncode == 0, f"{shown}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout.strip()

    def __call__(self, *arguments: str, check: bool = True, timeout: float = 300) -> str:
        return self.run("docker", "compose", *arguments, check=check, timeout=timeout)

    def container(self, service: str) -> str:
        """The id of a service's container."""
        return self("ps", "-aq", service)

    def inspect(self, what: str, form: str) -> str:
        """What Docker knows of a container or an image."""
        return self.run("docker", "inspect", "--format", form, what)

    def build(self, *services: str) -> None:
        """Builds images; tries again, since registries of packages fail at times."""
        for left in reversed(range(BUILD_TRIES)):
            try:
                self("build", *services, timeout=900)
            except AssertionError as error:
                if not left:
                    raise
                print(f"building failed, trying again: {error}")
                time.sleep(5)
            else:
                return

    def build_prometheus(self, folder: Path) -> None:
        """Makes an image of this machine's Prometheus, where the published one cannot be had."""
        found = shutil.which("prometheus")
        assert found is not None, "prometheus is missing: install Debian's package prometheus"
        context = folder / "prometheus"
        context.mkdir()
        shutil.copy(found, context / "prometheus")
        command = ["docker", "build", "-q", "--network", "host", "-t", PROMETHEUS_IMAGE, "--build-arg",
                   f"BASE_IMAGE={BASE_IMAGE}", "-f", "tests/deploy/prometheus.Dockerfile", str(context)]  # fmt: skip
        self.run(*command, timeout=300)

    def clear(self, *services: str) -> None:
        """Takes away what a run that was killed has left, and asserts that nothing else has the services' ports."""
        for project in PROJECTS:
            self.run("docker", "compose", "-p", project, "down", "--volumes", "--timeout", "10", check=False)
        refuse_taken_ports(*services)

    def down(self) -> None:
        """Prints the logs and takes everything away."""
        print(self("logs", "--no-color", "--tail", "40", check=False))
        self("down", "--volumes", "--timeout", "30", check=False)


def refuse_taken_ports(*services: str) -> None:
    """Containers on the host's network would fail later, and less clearly."""
    for service in services:
        for port in PORTS[service]:
            with socket.socket() as probe:
                taken = probe.connect_ex(("127.0.0.1", port)) == 0
            assert not taken, f"something already listens on port {port}, which the {service} needs: stop it first"


def get(url: str, body: Any = None) -> tuple[int, str]:
    """Asks over HTTP; returns status and text, with status 0 for no answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"} if data else {})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def query(expression: str) -> list[dict[str, Any]]:
    """Asks Prometheus; returns the series of the result, none while it does not answer."""
    status, text = get("http://127.0.0.1:9090/api/v1/query?" + urllib.parse.urlencode({"query": expression}))
    if status == 0:
        return []
    assert status == 200, f"{expression}: {text}"
    found: list[dict[str, Any]] = json.loads(text)["data"]["result"]
    return found


def value(expression: str, seconds: float = 120) -> float:
    """The one value of an expression, as soon as it has one: a scrape that failed leaves a gap."""
    found = eventually(lambda: query(expression), seconds, expression)
    return float(found[0]["value"][1])


def eventually(check: Callable[[], Any], seconds: float, what: object) -> Any:
    """Waits until a check returns something true, and returns that."""
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, f"after {seconds:g} s still waiting for: {what}"
        time.sleep(0.5)
    return found


def planner_example() -> Any:
    """The request that the planner's own documentation shows."""
    status, text = get("http://127.0.0.1:8080/openapi.json")
    assert status == 200, text
    document = json.loads(text)
    return document["paths"]["/v1/plans"]["post"]["requestBody"]["content"]["application/json"]["example"]


@dataclass(frozen=True, slots=True)
class TwoRanks:
    """A job of two ranks that trains beside the checks.

    Attributes:
        process: The launcher.
        stop_file: Ends the job when it appears.
        log: What the ranks print.
    """

    process: subprocess.Popen[bytes]
    stop_file: Path
    log: Path

    def check_running(self) -> None:
        """Asserts that no rank has failed."""
        assert self.process.poll() is None, self.log.read_text()

    def finish(self, seconds: float = 120) -> list[dict[str, int]]:
        """Ends the job; returns what each rank counted: samples `loaded` and `trained`, and rounds by mode."""
        self.stop_file.touch()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job does not end:\n{self.log.read_text()}") from None
        assert self.process.returncode == 0, self.log.read_text()
        return [ast.literal_eval(Path(f"{self.stop_file}.{rank}").read_text()) for rank in range(2)]


@contextlib.contextmanager
def two_ranks(
    folder: Path, address: str, job: str, targets: Path, environment: Mapping[str, str] | None = None
) -> Iterator[TwoRanks]:
    """Starts tests/deploy/job.py on two ranks; ends it with the block, whatever happened."""
    stop, path = folder / f"{job}.stop", folder / f"{job}.log"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
               "tests.deploy.job", address, job, str(stop), str(targets)]  # fmt: skip
    values = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    with path.open("w") as log:
        # Until kernels are compiled, batches stay as loaded: not what these tests are about.
        warm_up = [sys.executable, "-m", "trainer_client.cli", "warm-up"]
        subprocess.run(warm_up, cwd=ROOT, env=values, stdout=log, stderr=log, timeout=300, check=True)
        process = subprocess.Popen(command, cwd=ROOT, env=values, stdout=log, stderr=log)
    try:
        yield TwoRanks(process, stop, path)
    finally:
        stop.touch()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(60)
        if process.returncode:
            print(path.read_text())
