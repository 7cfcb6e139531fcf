"""The Helm chart renders valid objects that agree with each other and with the program."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.binary import ROOT
from tests.deploy.charts import BARE, CHART, EVERYTHING, KUBERNETES, SETS, container, objects, one, rendered, template
from tests.deploy.promql import adapter_rules
from tests.deploy.tools import DEPLOY, run, tool, unknown_flags

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
# Kinds of the Prometheus operator, which the schemas of Kubernetes lack.
OPERATOR = {"ServiceMonitor", "PrometheusRule"}


@pytest.mark.parametrize("values", SETS)
def test_helm_lints_it(values: str, tmp_path: Path) -> None:
    file = tmp_path / "values.json"
    file.write_text(json.dumps(SETS[values]))
    run("helm", "lint", CHART, "--strict", "--kube-version", f"{KUBERNETES}.0", "--values", file)


@pytest.mark.parametrize("values", SETS)
def test_kubernetes_takes_it(values: str, tmp_path: Path) -> None:
    file = tmp_path / "objects.yaml"
    own = [found for found in rendered(values) if found["kind"] not in OPERATOR]
    file.write_text(yaml.safe_dump_all(own))
    run("kubernetes-validate", "--strict", "--kubernetes-version", KUBERNETES, file)
    assert len(own) >= (3 if values == "bare" else 6)


def test_a_wrong_object_is_not_taken(tmp_path: Path) -> None:
    wrong = json.loads(json.dumps(one("defaults", "Deployment", "server")))
    wrong["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"]["prot"] = 1
    file = tmp_path / "wrong.yaml"
    file.write_text(yaml.safe_dump(wrong))
    command = [tool("kubernetes-validate"), "--strict", "--kubernetes-version", KUBERNETES, str(file)]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


@pytest.mark.parametrize("values", SETS)
def test_flags_are_those_of_the_program(values: str) -> None:
    for component, command in (("server", "serve"), ("router", "route")):
        if component == "router" and values == "bare":
            continue
        found = container(values, component)
        assert found["command"] == ["forebay", command]
        assert unknown_flags(command, found["args"]) == []


@pytest.mark.parametrize("values", SETS)
def test_a_pod_has_ten_seconds_more_than_its_drain(values: str) -> None:
    for deployment in objects(values, "Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        (found,) = pod["containers"]
        (drain,) = (int(word.split("=")[1]) for word in found["args"] if word.startswith("--drain-timeout="))
        assert pod["terminationGracePeriodSeconds"] == drain + 10
        sleep = found["lifecycle"]["preStop"]["exec"]["command"]
        assert sleep[0] == "sleep"
        assert int(sleep[1]) < 10


@pytest.mark.parametrize("values", SETS)
def test_probes_ask_the_port_that_has_a_thread_of_its_own(values: str) -> None:
    found = container(values, "server")
    ports = {port["name"]: port["containerPort"] for port in found["ports"]}
    assert f"--port={ports['http']}" in found["args"]
    assert f"--health-port={ports['health']}" in found["args"]
    probes = {name: found[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {probe["port"] for probe in probes.values()} == {"health"}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/health",
        "readiness": "/health",
        "liveness": "/livez",
    }
    startup = found["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] >= VALUES["probes"]["startupSeconds"]


@pytest.mark.parametrize("values", SETS)
def test_selectors_find_their_pods_and_no_others(values: str) -> None:
    pods = [deployment["spec"]["template"]["metadata"]["labels"] for deployment in objects(values, "Deployment")]
    wanted = [service["spec"]["selector"] for service in objects(values, "Service")]
    wanted += [budget["spec"]["selector"]["matchLabels"] for budget in objects(values, "PodDisruptionBudget")]
    wanted += [deployment["spec"]["selector"]["matchLabels"] for deployment in objects(values, "Deployment")]
    for selector in wanted:
        assert len([pod for pod in pods if selector.items() <= pod.items()]) == 1, selector


def test_monitors_scrape_each_service_once() -> None:
    services = objects("everything", "Service")
    for component, port in (("server", "health"), ("router", "http")):
        monitor = one("everything", "ServiceMonitor", component)["spec"]
        selector = monitor["selector"]["matchLabels"]
        (service,) = (each for each in services if selector.items() <= each["metadata"]["labels"].items())
        assert monitor["endpoints"][0]["port"] == port
        assert port in {each["name"] for each in service["spec"]["ports"]}
        assert monitor["jobLabel"] in service["metadata"]["labels"]


def test_the_router_finds_each_pod() -> None:
    (pods,) = (each for each in objects("defaults", "Service") if each["spec"].get("clusterIP") == "None")
    address = f"{pods['metadata']['name']}:{pods['spec']['ports'][0]['port']}"
    assert f"--backends-dns={address}" in container("defaults", "router")["args"]


def test_pods_may_do_little() -> None:
    for values in SETS:
        for deployment in objects(values, "Deployment"):
            pod = deployment["spec"]["template"]["spec"]
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["automountServiceAccountToken"] is False
            assert not {"hostIPC", "hostNetwork", "hostPID"} & pod.keys()
            context = pod["containers"][0]["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
    # The process writes only to volumes.
    mounts = {mount["mountPath"] for mount in container("defaults", "server")["volumeMounts"]}
    assert mounts == {"/cache", "/tmp"}


def test_the_user_and_the_caches_are_those_of_the_images() -> None:
    pod = one("defaults", "Deployment", "server")["spec"]["template"]["spec"]
    text = (DEPLOY / "docker/Dockerfile.cpu").read_text(encoding="utf-8")
    context = pod["securityContext"]
    assert f"USER {context['runAsUser']}:{context['runAsGroup']}" in text
    environment = {each["name"]: each["value"] for each in container("defaults", "server")["env"]}
    text += (DEPLOY / "docker/Dockerfile.cuda").read_text(encoding="utf-8")
    assert all(f"{name}={value}" in text for name, value in environment.items())


def test_keys_come_from_secrets() -> None:
    found = container("everything", "server")
    assert "--api-key-file=/etc/forebay/keys/api-keys" in found["args"]
    secrets = {each["name"]: each["valueFrom"]["secretKeyRef"]["name"] for each in found["env"] if "valueFrom" in each}
    assert secrets == {"FOREBAY_ROUTER_KEY": "router", "HF_TOKEN": "hub"}
    router = container("everything", "router")
    assert "--api-key-file=/etc/forebay/keys/api-keys" in router["args"]
    assert [each["name"] for each in router["env"]] == ["FOREBAY_ROUTER_KEY"]


def test_gpus_are_asked_for() -> None:
    found = container("everything", "server")
    assert found["resources"]["limits"] == {"memory": "8Gi", "nvidia.com/gpu": 2}
    assert "--device=cuda" in found["args"]
    assert "--device=cuda" not in container("defaults", "server")["args"]


def test_the_autoscaler_reads_what_the_adapter_gives() -> None:
    (scaler,) = objects("everything", "HorizontalPodAutoscaler")
    (metric,) = scaler["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == VALUES["autoscaling"]["metric"]
    (rule,) = adapter_rules()
    assert rule["name"]["as"] == metric["pods"]["metric"]["name"]
    target = one("everything", "Deployment", "server")
    assert scaler["spec"]["scaleTargetRef"]["name"] == target["metadata"]["name"]
    # A fixed number of replicas would reset the autoscaler's choice at each upgrade.
    assert "replicas" not in target["spec"]
    assert one("defaults", "Deployment", "server")["spec"]["replicas"] == VALUES["replicas"]


def test_alerts_and_dashboard_are_those_of_the_checkout() -> None:
    (rule,) = objects("everything", "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text(encoding="utf-8"))
    (found,) = objects("everything", "ConfigMap")
    expected = json.loads((DEPLOY / "grafana/forebay.json").read_text(encoding="utf-8"))
    assert json.loads(found["data"]["forebay.json"]) == expected


@pytest.mark.parametrize("values", SETS)
def test_notes_tell_an_address_that_is_there(values: str, tmp_path: Path) -> None:
    # Helm shows notes only in an installation, which needs a cluster. So the test renders them as an object.
    chart = shutil.copytree(CHART, tmp_path / "forebay")
    notes = (chart / "templates/NOTES.txt").read_text(encoding="utf-8")
    (chart / "templates/_notes.tpl").write_text(f'{{{{- define "notes" }}}}{notes}{{{{- end }}}}')
    (chart / "templates/notes.yaml").write_text('kind: Notes\ntext: {{ include "notes" . | quote }}\n')
    made = template(SETS[values], "--show-only", "templates/notes.yaml", chart=chart)
    text = yaml.safe_load(made)["text"]
    (service, port) = re.findall(r"service/(\S+) (\d+)", text)[0]
    (found,) = (each for each in objects(values, "Service") if each["metadata"]["name"] == service)
    assert int(port) in {each["port"] for each in found["spec"]["ports"]}
    assert ("Bearer" in text) == (values == "everything")


def test_values_fit_their_schema_and_every_one_is_described() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA)
    assert VALUES.keys() | {"global"} == SCHEMA["properties"].keys()
    for name, value in VALUES.items():
        known = SCHEMA["properties"][name].get("properties")
        if isinstance(value, dict) and known is not None:
            assert value.keys() == known.keys(), name


@pytest.mark.parametrize(
    "wrong",
    [
        {"replica": 2},
        {"replicas": "two"},
        {"args": "--offline"},
        {"router": {"policy": "best"}},
        {"service": {"port": 0}},
        # The pause and the drain would exceed the pod's grace period.
        {"preStopSleep": 20},
        {"model": ""},
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    merged = {**VALUES, **{k: {**VALUES[k], **v} if isinstance(v, dict) else v for k, v in wrong.items()}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(merged, SCHEMA)


def test_values_that_helm_reads_are_all_there() -> None:
    """Templates read only values that values.yaml has, and each value is read."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in (CHART / "templates").iterdir())
    used = set(re.findall(r"\.Values\.(\w+(?:\.\w+)?)", text))
    known = {f"{name}.{inner}" for name, value in VALUES.items() if isinstance(value, dict) for inner in value}
    known |= set(VALUES)
    assert used <= known
    whole = {name for name in VALUES if name in used}
    leaves = {name for name in known if "." in name} | {
        k for k, v in VALUES.items() if not isinstance(v, dict) or not v
    }
    assert {leaf for leaf in leaves if leaf not in used and leaf.split(".")[0] not in whole} == set()


def test_versions_are_the_programs() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    found = re.search(r'\[workspace\.package\]\nversion = "([^"]+)"', (ROOT / "Cargo.toml").read_text(encoding="utf-8"))
    assert found
    assert chart["appVersion"] == found[1]


def test_plain_manifests_are_what_the_chart_renders() -> None:
    text = (DEPLOY / "kubernetes/forebay.yaml").read_text(encoding="utf-8")
    plain = [each for each in yaml.safe_load_all(text) if each]
    release = [each for each in yaml.safe_load_all(template({"fullnameOverride": "forebay"})) if each]
    for each in (*plain, *release):
        strip(each)
    assert plain == release


def strip(found: Any) -> None:
    """Removes labels that only a Helm release has, and the release's name."""
    if isinstance(found, dict):
        for name in ("app.kubernetes.io/managed-by", "helm.sh/chart", "app.kubernetes.io/instance"):
            found.pop(name, None)
        for value in found.values():
            strip(value)
    elif isinstance(found, list):
        for value in found:
            strip(value)


def test_sets_differ() -> None:
    """The tests above need each part of the chart both present and absent."""
    kinds = {name: {found["kind"] for found in rendered(name)} for name in SETS}
    assert kinds["everything"] - kinds["defaults"] >= {"HorizontalPodAutoscaler", "PersistentVolumeClaim", *OPERATOR}
    assert kinds["defaults"] - kinds["bare"] == {"PodDisruptionBudget"}
    assert len(rendered("bare")) < len(rendered("defaults")) < len(rendered("everything"))
    assert EVERYTHING.keys() | BARE.keys() < SCHEMA["properties"].keys()
