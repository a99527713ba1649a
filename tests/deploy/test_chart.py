"""The Helm chart: its resources are valid for Kubernetes, our processes accept its configuration files, and names match."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pilotlight.sites.config import parse
from pilotlight.sites.network import NetworkConfig
from pilotlight.sites.site import SiteConfig
from tests.deploy.helm_subset import render, rendered

CHART = Path(__file__).parents[2] / "deploy" / "chart"
SITES = [
    {"name": "ams1", "city": "Amsterdam", "latitude": 52.31, "longitude": 4.76, "gpus": 8, "cpu": "32", "memory": "512Gi",
     "sharedMemory": "256Gi", "stateGib": 20, "cacheGib": 500, "models": [{"name": "llama", "source": "meta-llama/Llama-3.1-8B-Instruct"}],
     "config": "[engine]\ndevices = [\"cuda:0\", \"cuda:1\"]\n"},
    {"name": "iad1", "city": 'Washington "DC"', "latitude": 38.94, "longitude": -77.46, "gpus": 0, "cpu": "500m", "memory": "8Gi",
     "sharedMemory": "2Gi", "stateGib": 1, "cacheGib": 1, "models": []} | {"models": [{"name": "ember", "source": "embedded:ember"}]},
]  # fmt: skip
ROUTER = {
    "replicas": 3, "port": 9000, "requireKey": False, "stateGib": 5, "resources": {"limits": {"memory": "1Gi"}},
    "config": '[telemetry]\nlog_format = "json"', "ingress": {"host": "llm.example", "className": "nginx", "tlsSecret": "tls"},
}  # fmt: skip
EVERYTHING: dict[str, Any] = {"sites": SITES, "router": ROUTER, "serviceMonitor": True}


def named(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [each for each in documents if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


@pytest.mark.parametrize("changes", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_kubernetes_takes_every_resource(changes: dict[str, Any]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    documents = rendered(CHART, changes)
    for document in documents:
        if "k8s.io" in document["apiVersion"] or "." not in document["apiVersion"]:
            kubernetes_validate.validate(document, "1.31", strict=True)
    assert {each["kind"] for each in documents} >= {
        "ConfigMap", "StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy",
    }  # fmt: skip
    assert ("Ingress" in {each["kind"] for each in documents}) == bool(changes)


@pytest.mark.parametrize("changes", [{"router": {**ROUTER, "requireKey": False}}, EVERYTHING])
def test_our_processes_take_the_files_and_find_each_other(changes: dict[str, Any]) -> None:
    documents = rendered(CHART, changes)
    text = named(documents, "ConfigMap", "pl-router")["data"]["network.toml"]
    network = parse(NetworkConfig, tomllib.loads(text), "network.toml")
    assert network.telemetry.log_format == "json"
    for ref in network.sites:
        site = parse(
            SiteConfig, tomllib.loads(named(documents, "ConfigMap", f"pl-{ref.name}")["data"]["site.toml"]), "site.toml"
        )
        assert (site.name, site.place, site.listen.require_hop) == (ref.name, ref.place, True)
        service = named(documents, "Service", f"pl-{ref.name}")
        assert ref.url == f"http://pl-{ref.name}:{service['spec']['ports'][0]['port']}"
        assert site.listen.port == service["spec"]["ports"][0]["port"]


def test_a_site_has_its_gpus_its_shared_memory_and_no_rights() -> None:
    documents = rendered(CHART, EVERYTHING)
    spec = named(documents, "StatefulSet", "pl-ams1")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["resources"]["limits"] == {"memory": "512Gi", "nvidia.com/gpu": 8}
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert spec["securityContext"]["runAsUser"] == 10001
    assert "nvidia.com/gpu" not in str(named(documents, "StatefulSet", "pl-iad1"))
    policy = named(documents, "NetworkPolicy", "pl-ams1")["spec"]
    (rule,) = policy["ingress"]
    assert rule["from"][0]["podSelector"]["matchLabels"]["part"] == "router"


def test_changed_values_replace_the_pods_whose_file_they_change() -> None:
    def pods(changes: dict[str, Any]) -> dict[str, Any]:
        sets = [each for each in rendered(CHART, changes) if each["kind"] == "StatefulSet"]
        return {each["metadata"]["name"]: each["spec"]["template"] for each in sets}

    def changed_by(changes: dict[str, Any]) -> set[str]:
        now = pods(EVERYTHING | changes)
        return {name for name, template in pods(EVERYTHING).items() if now[name] != template}

    assert changed_by({"router": {**ROUTER, "config": ""}}) == {"pl-router"}
    further = {**SITES[1], "name": "sin1"}
    assert changed_by({"sites": [*SITES, further]}) == {"pl-router"}
    assert "pl-iad1" in changed_by({"sites": [SITES[0], {**SITES[1], "config": "[limits]\n"}]})
    assert "pl-ams1" not in changed_by({"sites": [SITES[0], {**SITES[1], "config": "[limits]\n"}]})


@pytest.mark.parametrize(
    ("config", "seconds"),
    [
        ("", 45), ("[TABLE]\ndrain_timeout_s = 300\n", 315), ("TABLE = { x = 1, drain_timeout_s=90.5 }", 105), ("TABLE.drain_timeout_s = 1", 45),
        ("# drain_timeout_s = 300", 45), ("[TABLE]\ndrain_timeout_s = inf", 365 * 24 * 3600), ("TABLE = {drain_timeout_s = +inf}", 365 * 24 * 3600),
        ("TABLE = {drain_timeout_s = 1e9}", 365 * 24 * 3600), ("[TABLE]\ndrain_timeout_s = 3_600 # an hour", 3615),
        ("[TABLE]\n\"drain_timeout_s\"\t=\t1.5e2\r\n", 165), ("[TABLE]\ndrain_timeout_s = +300", 315),
    ],
)  # fmt: skip
def test_a_pod_may_drain_for_the_time_of_its_file(config: str, seconds: int) -> None:
    values = {
        "router": {**ROUTER, "config": config.replace("TABLE", "relay")},
        "sites": [{**SITES[0], "config": config.replace("TABLE", "limits")}],
    }
    documents = rendered(CHART, values)
    for name in ("pl-router", "pl-ams1"):
        pod = named(documents, "StatefulSet", name)["spec"]["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] == seconds


def test_selectors_find_their_pods() -> None:
    documents = rendered(CHART, EVERYTHING)
    pods = [each["spec"]["template"]["metadata"]["labels"] for each in documents if each["kind"] == "StatefulSet"]
    for each in documents:
        selector = each["spec"].get("selector") if each["kind"] in ("Service", "PodDisruptionBudget") else None
        if selector is not None:
            wanted = selector.get("matchLabels", selector)
            assert sum(wanted.items() <= labels.items() for labels in pods) == 1, each["metadata"]["name"]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"sites": []}, "sites"), ({"image": ""}, "image"), ({"typo": 1}, "typo"), ({"sites": [{**SITES[0], "gpus": -1}]}, "gpus"),
        ({"sites": [{**SITES[0], "name": "Not A Name"}]}, "name"), ({"router": {**ROUTER, "replicas": 0}}, "replicas"),
    ],
)  # fmt: skip
def test_values_that_make_no_network_are_refused_by_the_schema(changes: dict[str, Any], word: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    yaml = pytest.importorskip("yaml")
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.validate(values, schema)
    jsonschema.validate(values | EVERYTHING, schema)
    with pytest.raises(jsonschema.ValidationError, match=word) as refused:
        jsonschema.validate(values | changes, schema)
    assert word in str([*refused.value.absolute_path, refused.value.message])


def test_what_the_renderer_does_not_know_is_an_error() -> None:
    for template in ('{{ include "x" . }}', "{{ .Values.a | upper }}", "{{ if .Values.a }}", "{{ end }}"):
        with pytest.raises(ValueError, match=r"not supported|missing|ends nothing"):
            render(template, {"a": 1}, "pl")
