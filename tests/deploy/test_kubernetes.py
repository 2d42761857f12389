"""The files of deploy/kubernetes against the schemas of those who read them, without a cluster and without kubectl."""

import copy
import importlib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from services.balancer.settings import Settings as BalancerSettings
from services.planner.settings import Settings as PlannerSettings

FOLDER = Path(__file__).parents[2] / "deploy/kubernetes"
VERSIONS = ("1.30", "1.37")
SETTINGS = {"balancer": BalancerSettings, "planner": PlannerSettings}
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
    (train_job,) = documents("trainers/kubeflow_trainjob.yaml")
    assert train_job["spec"]["runtimeRef"]["name"] == document["metadata"]["name"] or document["kind"] == "JobSet"


@pytest.fixture
def base() -> dict[str, list[dict[str, Any]]]:
    """The services' resources, by kind."""
    found: dict[str, list[dict[str, Any]]] = {}
    for one in documents("base/balancer.yaml", "base/planner.yaml", "base/network.yaml", "monitoring/monitors.yaml"):
        found.setdefault(one["kind"], []).append(one)
    return found


def _selecting(resources: list[dict[str, Any]], labels: dict[str, str]) -> list[dict[str, Any]]:
    return [one for one in resources if one["spec"]["selector"]["matchLabels"].items() <= labels.items()]


def test_containers_are_locked_down_and_their_settings_exist(base: dict[str, list[dict[str, Any]]]) -> None:
    assert len(base["Deployment"]) == 2
    (policy,) = base["NetworkPolicy"]
    for document in base["Deployment"]:
        labels = document["spec"]["template"]["metadata"]["labels"]
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
        pod = document["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        security = container["securityContext"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False  # EVENKEEL_PLANNER_PORT=tcp://… would be taken for the setting
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        for variable in container["env"]:
            field = variable["name"].removeprefix(f"EVENKEEL_{container['name'].upper()}_").lower()
            assert field in SETTINGS[container["name"]].model_fields, variable


def test_services_and_monitors_find_pods_and_ports(base: dict[str, list[dict[str, Any]]]) -> None:
    pods = [document["spec"]["template"] for document in base["Deployment"]]
    for service in base["Service"]:
        (pod,) = [pod for pod in pods if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()]
        names = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
        (monitor,) = _selecting(base["ServiceMonitor"], service["metadata"]["labels"])
        ports = {port["name"] for port in service["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports
    (certificate,) = [one for one in documents("certificate/certificate.yaml") if one["kind"] == "Certificate"]
    clients = {f"{service['metadata']['name']}.evenkeel.svc" for service in base["Service"]}
    assert clients <= set(certificate["spec"]["dnsNames"])


def test_a_trainer_gets_through_and_each_of_its_ranks_is_scraped(base: dict[str, list[dict[str, Any]]]) -> None:
    (job,), (monitor,), (policy,) = documents("trainers/job.yaml"), base["PodMonitor"], base["NetworkPolicy"]
    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    first, ranks = int(variables["EVENKEEL_METRICS_PORT"]), int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert [port["containerPort"] for port in container["ports"]] == [first + rank for rank in range(ranks)]
    scraped = [each["port"] for each in monitor["spec"]["podMetricsEndpoints"]]
    assert scraped == [port["name"] for port in container["ports"]]
    labels = pod["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    sources = [source for rule in policy["spec"]["ingress"] for source in rule["from"] if "podSelector" in source]
    assert any(source["podSelector"]["matchLabels"].items() <= labels.items() for source in sources)
    assert variables["EVENKEEL_BALANCER"] == "evenkeel-balancer.evenkeel.svc:50051"
    egress = [{(port["port"], port["protocol"]) for port in rule["ports"]} for rule in policy["spec"]["egress"]]
    assert egress == [{(53, "UDP"), (53, "TCP")}, {(4318, "TCP")}]  # names and a collector, and nothing else
    assert all(rule["to"] for rule in policy["spec"]["egress"])
