"""The files of deploy/kubernetes against the schemas of those who read them, without a cluster and without kubectl."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "deploy/kubernetes"
VERSIONS = ("1.30", "1.37")
# What Kubeflow publishes of its own resources and of JobSet's, which it is built on.
MODELS = {
    "JobSet": "jobset_v1alpha2_job_set",
    "ClusterTrainingRuntime": "trainer_v1alpha1_cluster_training_runtime",
    "TrainJob": "trainer_v1alpha1_train_job",
}
OF_OPERATORS = ("monitoring.coreos.com/", "cert-manager.io/", "kustomize.config.k8s.io/")  # which publish no package
LABELS = {
    "EVENKEEL_JOB": "metadata.labels['jobset.sigs.k8s.io/jobset-name']",
    "EVENKEEL_RUN_ID": "metadata.labels['jobset.sigs.k8s.io/jobset-uid']",
    "EVENKEEL_RESTART_COUNT": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']",
    "EVENKEEL_NODE": "spec.nodeName",
}


def documents(*names: str) -> list[dict[str, Any]]:
    """Those of some files, of all when none is named."""
    paths = [FOLDER / name for name in names] or sorted(FOLDER.rglob("*.yaml"))
    return [one for path in paths for one in yaml.safe_load_all(path.read_text()) if one]


def check_model(document: dict[str, Any]) -> None:
    """Checks a resource of Kubeflow or JobSet: nothing in it is unknown, and its values have the right types."""
    name = MODELS[document["kind"]]
    module = importlib.import_module(f"kubeflow_trainer_api.models.{name}")
    prefix = "Jobset" if document["kind"] == "JobSet" else "Trainer"
    model = getattr(module, f"{prefix}V1alpha{2 if prefix == 'Jobset' else 1}{document['kind']}")
    assert model.from_dict(copy.deepcopy(document)).to_dict() == document  # what it does not know, it leaves out


def test_every_resource_fits_its_schema() -> None:
    checked = 0
    for document in documents():
        if document["kind"] in MODELS:
            check_model(document)
        elif not document["apiVersion"].startswith(OF_OPERATORS):
            for version in VERSIONS:
                kubernetes_validate.validate(document, version, strict=True)
        else:
            continue
        checked += 1
    assert checked >= 13


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    """The pods' template of a JobSet, or of a runtime of Kubeflow's Trainer."""
    spec = document["spec"] if document["kind"] == "JobSet" else document["spec"]["template"]["spec"]
    (node,) = spec["replicatedJobs"]
    pod: dict[str, Any] = node["template"]["spec"]["template"]
    return pod


@pytest.mark.parametrize("name", ["jobset.yaml", "kubeflow_runtime.yaml"])
def test_ranks_take_name_run_and_restarts_from_the_controllers_labels(name: str) -> None:
    (document,) = documents(f"trainers/{name}")
    pod = pod_of(document)
    assert pod["metadata"]["labels"] == {"evenkeel.io/client": "true"}  # which gets it through the network policy
    (container,) = pod["spec"]["containers"]
    taken = {one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"] for one in container["env"] if "valueFrom" in one}
    assert taken == LABELS
    given = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    (job,) = documents("trainers/job.yaml")
    single = {one["name"]: one.get("value") for one in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert given == {key: single[key] for key in ("EVENKEEL_BALANCER", "EVENKEEL_TLS_CA", "EVENKEEL_TOKEN_FILE")}


def test_a_train_job_names_the_runtime() -> None:
    (runtime,), (job,) = documents("trainers/kubeflow_runtime.yaml"), documents("trainers/kubeflow_trainjob.yaml")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]


def test_services_are_spread_and_not_disrupted_together() -> None:
    base = documents("base/balancer.yaml", "base/planner.yaml")
    budgets = [one for one in base if one["kind"] == "PodDisruptionBudget"]
    workloads = [one for one in base if one["kind"] == "Deployment"]
    assert len(workloads) == 2
    scaled = {one["spec"]["scaleTargetRef"]["name"] for one in base if one["kind"] == "HorizontalPodAutoscaler"}
    assert scaled == {one["metadata"]["name"] for one in workloads}
    for workload in workloads:
        labels = workload["spec"]["template"]["metadata"]["labels"]
        spread = workload["spec"]["template"]["spec"]["topologySpreadConstraints"]
        assert {one["topologyKey"] for one in spread} == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
        assert all(one["labelSelector"]["matchLabels"].items() <= labels.items() for one in spread)
        (budget,) = [one for one in budgets if one["spec"]["selector"]["matchLabels"].items() <= labels.items()]
        assert budget["spec"]["maxUnavailable"] == 1
        (policy,) = documents("base/network.yaml")
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
