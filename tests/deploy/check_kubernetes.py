"""The manifests as kustomize renders them; needs kubectl. What they say: test_kubernetes.py."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[2]


def rendered(folder: str) -> list[dict[str, Any]]:
    if shutil.which("kubectl") is None:
        pytest.skip("MANIFESTS NOT CHECKED: kubectl is missing, which renders them")
    done = subprocess.run(["kubectl", "kustomize", str(ROOT / folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def test_with_and_without_the_operator_the_same_services_are_rendered() -> None:
    monitored, plain = rendered("deploy/kubernetes"), rendered("deploy/kubernetes/plain")
    assert plain == [one for one in monitored if one["kind"] not in ("ServiceMonitor", "PodMonitor", "PrometheusRule")
                     and one["metadata"].get("labels", {}).get("grafana_dashboard") is None]  # fmt: skip
    assert {one["metadata"].get("namespace", "evenkeel") for one in plain} == {"evenkeel"}
    for document in plain:
        kubernetes_validate.validate(document, "1.37", strict=True)


def test_rules_and_dashboards_are_loaded() -> None:
    documents = rendered("deploy/kubernetes")
    (rules,) = [document for document in documents if document["kind"] == "PrometheusRule"]
    written = [group for path in sorted((ROOT / "deploy/prometheus/rules").glob("*.yml"))
               for group in yaml.safe_load(path.read_text())["groups"]]  # fmt: skip
    assert [group["name"] for group in rules["spec"]["groups"]] == [group["name"] for group in written]
    (boards,) = [document for document in documents if document["kind"] == "ConfigMap"]
    assert set(boards["data"]) == {path.name for path in (ROOT / "deploy/grafana/dashboards").glob("*.json")}
