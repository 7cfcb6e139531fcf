"""The plain manifests, which need no Helm to be checked."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.deploy.charts import KUBERNETES
from tests.deploy.tools import DEPLOY, run, unknown_flags

FILE = DEPLOY / "kubernetes/forebay.yaml"
OBJECTS: list[dict[str, Any]] = [found for found in yaml.safe_load_all(FILE.read_text(encoding="utf-8")) if found]
DEPLOYMENTS = [found for found in OBJECTS if found["kind"] == "Deployment"]


def test_kubernetes_takes_them() -> None:
    run("kubernetes-validate", "--strict", "--kubernetes-version", KUBERNETES, FILE)


def test_nothing_of_helm_is_left() -> None:
    text = "\n".join(line for line in FILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    assert "helm" not in text.lower()
    assert "{{" not in text


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda found: found["metadata"]["name"])
def test_flags_and_times_fit_the_program(deployment: dict[str, Any]) -> None:
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    program, command = container["command"]
    assert program == "forebay"
    assert unknown_flags(command, container["args"]) == []
    (drain,) = (word.split("=")[1] for word in container["args"] if word.startswith("--drain-timeout="))
    assert pod["terminationGracePeriodSeconds"] == int(drain) + 10


def test_there_is_a_server_and_a_router() -> None:
    assert [found["spec"]["template"]["spec"]["containers"][0]["command"][1] for found in DEPLOYMENTS] == [
        "serve",
        "route",
    ]
    names = {(found["kind"], found["metadata"]["name"]) for found in OBJECTS}
    assert len(names) == len(OBJECTS)
