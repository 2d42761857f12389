"""What the files of deploy/ promise, as far as it can be read off them; `make test-compose` runs them for real."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from evenkeel.protocol.plan_round import RoundLimits
from services.balancer.access import Occupancy
from services.balancer.history import History
from services.balancer.people import build_metrics
from services.balancer.workers import WorkerPool
from services.planner.metrics import Metrics as PlannerMetrics

ROOT = Path(__file__).parents[2]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return document


@pytest.mark.parametrize("name", ["services-common.txt", "services-balancer.txt", "services-planner.txt"])
def test_images_hold_what_the_tests_ran_with_and_no_torch(name: str) -> None:
    tested = pins("dev.txt")
    assert pins(name)
    for package, version in pins(name).items():
        assert tested.get(package) == version, package
        assert "torch" not in package


@pytest.mark.parametrize("service", ["balancer-1", "balancer-2", "planner", "prometheus", "grafana"])
def test_services_are_locked_down(service: str) -> None:
    found = compose()["services"][service]
    assert found["read_only"] is True
    assert found["cap_drop"] == ["ALL"]
    assert found["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in found["ports"])
    assert set(found["deploy"]["resources"]["limits"]) == {"cpus", "memory", "pids"}
    assert not re.search(r":-?latest|:\s*$", found["image"])
    if "build" in found:
        dockerfile = (ROOT / found["build"]["dockerfile"]).read_text()
        assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", dockerfile, re.MULTILINE)
        assert "HEALTHCHECK" in dockerfile
        name, setting = ("PLANNER", "DRAIN") if service == "planner" else ("BALANCER", "GRACE")
        drain = float(found["environment"].get(f"EVENKEEL_{name}_{setting}_SECONDS", 10))
        assert float(found["stop_grace_period"].removesuffix("s")) > drain
    else:
        assert found["healthcheck"]


def test_every_metric_that_is_named_exists() -> None:
    from trainer_client.observing.metrics import RankMeasures

    services = [
        build_metrics(History(), Occupancy(max_calls=1, max_bytes=1), WorkerPool(RoundLimits(), workers=1, seconds=1)),
        PlannerMetrics(),
    ]
    registries = [*(each.registry for each in services), RankMeasures(job="j", rank=0).registry]
    known = {name for each in registries for name in each._names_to_collectors}
    known |= {f"{metric.name}{suffix}" for each in registries for metric in each.collect()
              for suffix in ("", "_total", "_sum", "_count")}  # fmt: skip
    files = [
        *(ROOT / "deploy/prometheus/rules").glob("*.yml"),
        ROOT / "docs/operate/runbook.md",
        *(ROOT / "deploy/grafana/dashboards").glob("*.json"),
    ]
    for path in files:
        for name in re.findall(r"\bevenkeel_(?:balancer|planner|trainer)_\w+", path.read_text()):
            assert name in known, (path.name, name)


def test_settings_of_the_stack_exist() -> None:
    from services.balancer.settings import Settings as Balancer
    from services.planner.settings import Settings as Planner

    files = ["docker-compose.yml", *map(str, (ROOT / "deploy").glob("compose.*.yml")),
             *(f"services/{name}/Dockerfile" for name in ("balancer", "planner"))]  # fmt: skip
    text = "\n".join((ROOT / file).read_text() for file in files)
    for prefix, fields in (("EVENKEEL_BALANCER_", Balancer.model_fields), ("EVENKEEL_PLANNER_", Planner.model_fields)):
        names = set(re.findall(rf"{prefix}([A-Z_]+)", text))
        assert names
        assert not [name for name in names if name.lower() not in fields]


def test_every_alert_has_a_section_in_the_runbook() -> None:
    runbook = (ROOT / "docs/operate/runbook.md").read_text()
    page = "{{ $externalURL }}/consoles/runbook.html"
    sections = {f"{page}#{title.lower()}" for title in re.findall(r"^## (\w+)$", runbook, re.MULTILINE)}
    groups = yaml.safe_load((ROOT / "deploy/prometheus/rules/alerts.yml").read_text())["groups"]
    links = [rule["annotations"]["runbook_url"] for group in groups for rule in group["rules"]]
    assert len(links) > 10
    assert set(links) == sections


def test_dashboards_have_ids_of_their_own_and_their_links_lead_to_them() -> None:
    boards = [json.loads(path.read_text()) for path in (ROOT / "deploy/grafana/dashboards").glob("*.json")]
    links = {link.partition("?")[0] for link in json.dumps(boards).split("/d/")[1:]}
    assert len({board["uid"] for board in boards}) == len(boards)
    assert set() < links <= {board["uid"] for board in boards}
    places = [panel["gridPos"] for board in boards for panel in board["panels"]]
    assert max(place["x"] + place["w"] for place in places) <= 24


def test_secrets_are_not_committed() -> None:
    for folder in ("deploy/secrets", "deploy/prometheus/targets", "deploy/prometheus/alertmanagers"):
        assert (ROOT / folder / ".gitignore").read_text().split() == ["*", "!.gitignore"]
