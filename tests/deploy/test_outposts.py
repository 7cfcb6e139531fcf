"""The manifest of a server and its workers on other machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.charts import KUBERNETES
from tests.deploy.tools import DEPLOY, run, unknown_flags

FILE = DEPLOY / "kubernetes/outposts.yaml"
OBJECTS: list[dict[str, Any]] = [found for found in yaml.safe_load_all(FILE.read_text(encoding="utf-8")) if found]
(SERVICE,) = (found for found in OBJECTS if found["kind"] == "Service")
(GROUP,) = (found for found in OBJECTS if found["kind"] == "LeaderWorkerSet")
TEMPLATE = GROUP["spec"]["leaderWorkerTemplate"]
PODS = {name: TEMPLATE[f"{name}Template"] for name in ("leader", "worker")}


def argument(name: str, flag: str) -> str:
    (container,) = PODS[name]["spec"]["containers"]
    (value,) = (word.split("=", 1)[1] for word in container["args"] if word.startswith(f"{flag}="))
    return str(value)


@pytest.mark.parametrize("name", PODS)
def test_kubernetes_takes_the_pods(name: str, tmp_path: Path) -> None:
    """Only the pods are checked, because the schema of LeaderWorkerSet is not part of Kubernetes."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **PODS[name]["metadata"]}}
    file = tmp_path / "pod.json"
    file.write_text(json.dumps({**pod, "spec": PODS[name]["spec"]}))
    run("kubernetes-validate", "--strict", "--kubernetes-version", KUBERNETES, file)


@pytest.mark.parametrize("name", PODS)
def test_flags_are_those_of_the_program(name: str) -> None:
    pod = PODS[name]["spec"]
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        program, command = container["command"]
        assert program == "forebay"
        assert unknown_flags(command, container["args"]) == []


def test_workers_find_the_server_and_its_model() -> None:
    (container,) = PODS["leader"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert argument("leader", "--listen-hands") == f"0.0.0.0:{ports['hands']}"
    assert argument("worker", "--join") == f"$(LWS_LEADER_ADDRESS):{ports['hands']}"
    assert SERVICE["spec"]["ports"][0]["targetPort"] in ports
    assert SERVICE["spec"]["selector"] == PODS["leader"]["metadata"]["labels"]
    assert SERVICE["spec"]["selector"] != PODS["worker"]["metadata"]["labels"]
    (pull,) = PODS["worker"]["spec"]["initContainers"]
    assert pull["args"] == container["args"][:1]
    assert pull["env"] == container["env"]
    assert int(argument("leader", "--dp-size")) == TEMPLATE["size"] - 1


def test_workers_have_no_key() -> None:
    volumes = {name: {v["name"]: v for v in PODS[name]["spec"]["volumes"]} for name in PODS}
    assert volumes["worker"]["join"]["secret"]["items"] == [{"key": "token", "path": "token"}]
    for name, flag in (("leader", "--join-token-file"), ("worker", "--token-file")):
        (container,) = PODS[name]["spec"]["containers"]
        (mount,) = (one for one in container["volumeMounts"] if one["name"] == "join")
        assert argument(name, flag) == f"{mount['mountPath']}/token"
