"""The whole stack for real: images, health, a job of two ranks, a plan, scrapes, every panel and alert, and down again.

Run it with `make test-compose`. Where no registry is reached (EVENKEEL_COMPOSE_OFFLINE=1), Prometheus comes from
Debian's package, Grafana stays away, and its dashboards are checked by running their queries all the same.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import yaml

from scripts.check_sbom import canonical, read_pins
from tests.deploy.stack import (
    BASE_IMAGE,
    OFFLINE,
    PROJECTS,
    ROOT,
    Compose,
    TwoRanks,
    eventually,
    get,
    planner_example,
    query,
    two_ranks,
    value,
)

BALANCERS = ("balancer-1", "balancer-2")
ADDRESS = "127.0.0.1:50051,127.0.0.2:50051"  # on the host's network
SERVICES = (*BALANCERS, "planner", "prometheus") + (() if OFFLINE else ("grafana",))
JOB = "stack-test"
MEGABYTE = 1_000_000
MAX_BYTES = {"balancer": 400 * MEGABYTE, "planner": 500 * MEGABYTE}

pytestmark = pytest.mark.timeout(1500)


@dataclass(frozen=True, slots=True)
class Stack:
    """The stack, up and healthy, and a job that trains with it."""

    compose: Compose
    job: TwoRanks


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    (folder / "grafana_password").write_text("only-for-this-test")
    files = ("docker-compose.yml", "deploy/compose.hostnet.yml")
    compose = Compose(project=PROJECTS[0], files=files, secrets=folder)
    compose.clear(*SERVICES)
    if OFFLINE:
        compose.build_prometheus(folder)
    compose.build("balancer-1", "planner")
    targets = ROOT / "deploy/prometheus/targets"
    try:
        compose("up", "--detach", "--wait", "--wait-timeout", "300", *SERVICES, timeout=400)
        with two_ranks(folder, ADDRESS, JOB, targets) as job:
            both = f'evenkeel_trainer_load{{exported_job="{JOB}",when="after"}}'
            eventually(lambda: job.process.poll() is not None or len(query(both)) == 2, 300, f"two series of {both}")
            job.check_running()
            yield Stack(compose, job)
    finally:
        compose.down()
        for left in targets.glob(f"{JOB}-*.json"):
            left.unlink()


def test_images_are_small_and_hold_no_torch(stack: Stack) -> None:
    inspect = stack.compose.inspect
    base = int(inspect(BASE_IMAGE, "{{.Size}}"))
    for service, most in MAX_BYTES.items():
        image = f"evenkeel-{service}:test"
        size = int(inspect(image, "{{.Size}}")) - base
        print(f"{image}: {size / MEGABYTE:.0f} MB beyond its base image")
        assert size < most, f"{image} adds {size / MEGABYTE:.0f} MB to its base image"
        unwanted = "import importlib.util as u; print([m for m in ('torch', 'pip') if u.find_spec(m)])"
        name = "balancer-1" if service == "balancer" else service
        assert stack.compose("exec", "-T", name, "python", "-c", unwanted) == "[]"


@pytest.mark.parametrize("service", ["balancer", "planner"])
def test_images_hold_what_is_pinned(stack: Stack, service: str) -> None:
    """Which is what `make audit` writes bills of materials of."""
    listing = (
        "import importlib.metadata as m, json; print(json.dumps([[d.name, d.version] for d in m.distributions()]))"
    )
    name = "balancer-1" if service == "balancer" else service
    installed = json.loads(stack.compose("exec", "-T", name, "python", "-c", listing))
    wanted, constraints = read_pins(ROOT / f"requirements/services-{service}.txt")
    found = {canonical(name): version for name, version in installed}
    assert found.keys() >= wanted.keys()
    assert found.items() <= (constraints | wanted).items()


@pytest.mark.parametrize("service", [*BALANCERS, "planner"])
def test_containers_are_locked_down(stack: Stack, service: str) -> None:
    """As `test_files` says that they are told to be."""
    refused = stack.compose("exec", "-T", service, "sh", "-c", "touch /opt/evenkeel/x 2>&1 || true")
    assert "Read-only file system" in refused
    identity = stack.compose("exec", "-T", service, "sh", "-c", "id -u; grep CapEff /proc/self/status")
    assert identity.split() == ["65532", "CapEff:", "0000000000000000"]
    inspect, name = stack.compose.inspect, stack.compose.container(service)
    assert inspect(name, "{{.State.Health.Status}} {{.RestartCount}}") == "healthy 0"
    assert "only-for-this-test" not in inspect(name, "{{.Config.Env}} {{.Config.Cmd}}")


def test_the_kernels_are_those_of_the_image(stack: Stack) -> None:
    """A kernel that had to be compiled would be a new file, and tens of seconds in one of the rounds."""
    assert ".nbc" in stack.compose("exec", "-T", "balancer-1", "find", "/opt/kernels")
    assert stack.compose("exec", "-T", "balancer-1", "find", "/tmp", "-name", "*.nb?") == ""
    rounds = value("sum(evenkeel_balancer_search_seconds_count) > 0")
    seconds = value("sum(evenkeel_balancer_search_seconds_sum)")
    print(f"mean of {rounds:g} searches: {seconds / rounds:.6f} s")
    assert value('sum(evenkeel_balancer_search_seconds_bucket{le="2.5"})') >= rounds


def test_the_planner_answers(stack: Stack) -> None:
    example = planner_example()
    for _ in range(3):
        status, text = get("http://127.0.0.1:8080/v1/plans", example)
        assert status == 200, text


def test_the_job_is_balanced_by_the_service(stack: Stack) -> None:
    rounds = f'evenkeel_balancer_rounds_total{{exported_job="{JOB}"}}'
    eventually(lambda: any(float(found["value"][1]) > 50 for found in query(rounds)), 120, f"{rounds} > 50")
    value(f'evenkeel:job_imbalance_over_bound:mean5m{{exported_job="{JOB}"}}')
    before, after = (
        value(f'evenkeel:job_imbalance:mean5m{{exported_job="{JOB}",when="{when}"}}') for when in ("before", "after")
    )
    assert 1 <= after < before
    value(f'evenkeel:job_saved_gpus:rate5m{{exported_job="{JOB}"}} > 0')
    value(f'sum(evenkeel_trainer_rounds_total{{exported_job="{JOB}",mode="service"}}) > 0')


def panels() -> list[tuple[str, str, str]]:
    return [
        (path.stem, panel["title"], target["expr"])
        for path in sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
        for panel in json.loads(path.read_text())["panels"]
        for target in panel["targets"]
    ]


def test_every_panel_has_data(stack: Stack) -> None:
    example = planner_example()
    values = {"$job": JOB, "$loader": "train", "$balancer": ".*", "$planner": ".*", "$__rate_interval": "1m",
              "$__range": "5m"}  # fmt: skip
    waiting = {}
    for board, title, expression in panels():
        filled = expression
        for variable, replacement in values.items():
            filled = filled.replace(variable, replacement)
        assert "$" not in filled
        waiting[f"{board} / {title}: {expression}"] = filled
    print(f"{len(waiting)} queries")

    def all_have_data() -> bool:
        status, text = get("http://127.0.0.1:8080/v1/plans", example)  # a rate needs requests between two scrapes
        assert status == 200, text
        for name, expression in list(waiting.items()):
            if query(expression):
                del waiting[name]
        return not waiting

    eventually(all_have_data, 240, waiting)


def test_every_alert_has_data_behind_it(stack: Stack) -> None:
    groups = yaml.safe_load((ROOT / "deploy/prometheus/rules/alerts.yml").read_text())["groups"]
    waiting = {
        rule["alert"]: rule["expr"].rpartition(" ")[0][:-2].strip() for group in groups for rule in group["rules"]
    }

    def all_have_data() -> bool:
        get("http://127.0.0.1:8080/v1/hardware-profiles")  # a rate needs requests between two scrapes
        for name, operand in list(waiting.items()):
            if query(operand):
                del waiting[name]
        return not waiting

    eventually(all_have_data, 240, waiting)


def test_no_alert_fires_beside_a_healthy_job(stack: Stack) -> None:
    stack.job.check_running()
    for found in query('ALERTS{alertstate="pending"}'):
        print(f"pending: {found['metric']}")
    firing = query('ALERTS{alertstate="firing"}')
    assert firing == [], [found["metric"] for found in firing]


def test_a_balancer_may_go_under_the_job(stack: Stack) -> None:
    """The lead goes over to the other replica, whichever it was connected to; that costs no sample and no step."""
    planned = f'sum(evenkeel_trainer_rounds_total{{exported_job="{JOB}",rank="0",mode="service"}})'
    for name in BALANCERS:
        stack.compose("stop", "--timeout", "20", name)
        reached = value(planned)
        eventually(lambda reached=reached: value(planned) > reached + 50, 240, "rounds by the service again")
        stack.compose("start", name)
        eventually(lambda name=name: stack.compose.inspect(stack.compose.container(name), "{{.State.Health.Status}}")
                   == "healthy", 120, f"{name} to be healthy")  # fmt: skip
    stack.job.check_running()


def test_everything_stops_in_time(stack: Stack) -> None:
    """Last: the job ends whole, then both services drain within their grace and exit with 0."""
    ranks = stack.job.finish()
    for rank, counts in enumerate(ranks):
        print(f"rank {rank}: {counts}")
        assert counts["service"] > 100
        assert counts.get("identity", 0) == 0  # what no service planned, the lead did
    assert sum(counts["trained"] for counts in ranks) == sum(counts["loaded"] for counts in ranks)
    started = time.monotonic()
    stack.compose("stop")
    print(f"stopped in {time.monotonic() - started:.1f} s")
    for service in (*BALANCERS, "planner"):  # killed at the end of its grace, it would be 137
        state = stack.compose.inspect(stack.compose.container(service), "{{.State.ExitCode}} {{.State.OOMKilled}}")
        assert state == "0 false"
