"""The manifests as kustomize renders them, against the schemas of Kubernetes; needs kubectl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.balancer.settings import Settings as BalancerSettings
from services.planner.settings import Settings as PlannerSettings

ROOT = Path(__file__).parents[2]
SETTINGS = {"balancer": BalancerSettings, "planner": PlannerSettings}


@pytest.fixture(scope="module")
def rendered() -> list[dict[str, Any]]:
    if shutil.which("kubectl") is None:
        pytest.skip("MANIFESTS NOT CHECKED: kubectl is missing, which renders them")
    command = ["kubectl", "kustomize", str(ROOT / "deploy/kubernetes")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def trainer() -> dict[str, Any]:
    """The job to copy from, which is applied by whoever trains."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "deploy/kubernetes/trainers/job.yaml").read_text())
    return document


def test_without_the_operator_the_same_services_remain(rendered: list[dict[str, Any]]) -> None:
    command = ["kubectl", "kustomize", str(ROOT / "deploy/kubernetes/plain")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    plain = list(yaml.safe_load_all(done.stdout))
    assert plain == [one for one in rendered if one["kind"] not in ("ServiceMonitor", "PodMonitor", "PrometheusRule")
                     and one["metadata"].get("labels", {}).get("grafana_dashboard") is None]  # fmt: skip


def workloads(rendered: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [document for document in rendered if document["kind"] == "Deployment"]


def test_containers_are_locked_down_and_their_settings_exist(rendered: list[dict[str, Any]]) -> None:
    assert len(workloads(rendered)) == 2
    for document in workloads(rendered):
        pod = document["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        security = container["securityContext"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False  # EVENKEEL_PLANNER_PORT=tcp://… would be taken for the setting
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        name = container["name"]
        for variable in container["env"]:
            field = variable["name"].removeprefix(f"EVENKEEL_{name.upper()}_").lower()
            assert field in SETTINGS[name].model_fields, variable


def test_selectors_find_the_pods_and_ports_they_mean(rendered: list[dict[str, Any]]) -> None:
    pods = [document["spec"]["template"] for document in workloads(rendered)]
    for document in rendered:
        spec = document.get("spec", {})
        if document["kind"] == "Service":
            found = [pod for pod in pods if spec["selector"].items() <= pod["metadata"]["labels"].items()]
            assert len(found) == 1
            names = {port["name"] for port in found[0]["spec"]["containers"][0]["ports"]}
            assert {port["targetPort"] for port in spec["ports"]} <= names
        elif document["kind"] == "PodDisruptionBudget":
            labels = spec["selector"]["matchLabels"]
            assert len([pod for pod in pods if labels.items() <= pod["metadata"]["labels"].items()]) == 1
        elif document["kind"] == "ServiceMonitor":
            services = [each for each in rendered if each["kind"] == "Service"]
            labels = spec["selector"]["matchLabels"]
            (service,) = [each for each in services if labels.items() <= each["metadata"].get("labels", {}).items()]
            ports = {port["name"] for port in service["spec"]["ports"]}
            assert {endpoint["port"] for endpoint in spec["endpoints"]} <= ports


def test_a_trainer_gets_through_and_each_of_its_ranks_is_scraped(rendered: list[dict[str, Any]]) -> None:
    (monitor,) = [document for document in rendered if document["kind"] == "PodMonitor"]
    (policy,) = [document for document in rendered if document["kind"] == "NetworkPolicy"]
    pod = trainer()["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    first = int(variables["EVENKEEL_METRICS_PORT"])
    ranks = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert [port["containerPort"] for port in container["ports"]] == [first + rank for rank in range(ranks)]
    assert [each["port"] for each in monitor["spec"]["podMetricsEndpoints"]] == [
        port["name"] for port in container["ports"]
    ]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    allowed = [source["podSelector"]["matchLabels"] for rule in policy["spec"]["ingress"] for source in rule["from"]
               if "podSelector" in source]  # fmt: skip
    assert any(labels.items() <= pod["metadata"]["labels"].items() for labels in allowed)
    service = next(each for each in rendered if each["metadata"]["name"] == "evenkeel-balancer")
    namespace, port = service["metadata"]["namespace"], service["spec"]["ports"][0]["port"]
    assert variables["EVENKEEL_BALANCER"] == f"evenkeel-balancer.{namespace}.svc:{port}"


def test_services_reach_names_and_a_collector_and_nothing_else(rendered: list[dict[str, Any]]) -> None:
    (policy,) = [document for document in rendered if document["kind"] == "NetworkPolicy"]
    ports = [{(port["port"], port["protocol"]) for port in rule["ports"]} for rule in policy["spec"]["egress"]]
    assert ports == [{(53, "UDP"), (53, "TCP")}, {(4318, "TCP")}]
    assert all(rule["to"] for rule in policy["spec"]["egress"])


def test_rules_and_dashboards_are_loaded(rendered: list[dict[str, Any]]) -> None:
    (rules,) = [document for document in rendered if document["kind"] == "PrometheusRule"]
    written = [group for path in sorted((ROOT / "deploy/prometheus/rules").glob("*.yml"))
               for group in yaml.safe_load(path.read_text())["groups"]]  # fmt: skip
    assert [group["name"] for group in rules["spec"]["groups"]] == [group["name"] for group in written]
    (boards,) = [document for document in rendered if document["kind"] == "ConfigMap"]
    assert boards["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert set(boards["data"]) == {path.name for path in (ROOT / "deploy/grafana/dashboards").glob("*.json")}


def test_the_certificate_is_for_the_names_that_clients_use(rendered: list[dict[str, Any]]) -> None:
    names = yaml.safe_load((ROOT / "deploy/kubernetes/certificate/certificate.yaml").read_text())["spec"]["dnsNames"]
    for service in (document for document in rendered if document["kind"] == "Service"):
        assert f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc" in names
