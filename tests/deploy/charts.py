"""Renders the Helm chart."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.tools import DEPLOY, run

CHART = DEPLOY / "helm/forebay"
KUBERNETES = "1.31"
"""Fixed, because Helm's own default depends on how it was built."""

# Values with which the chart renders every one of its objects.
EVERYTHING: dict[str, Any] = {
    "model": "org/model@main",
    "args": ["--max-running-requests", "64", "--enable-hierarchical-cache"],
    "env": [{"name": "RUST_BACKTRACE", "value": "1"}],
    "replicas": 3,
    "drainTimeout": 120,
    "imagePullSecrets": [{"name": "registry"}],
    "secrets": {"apiKeys": "keys", "routerKey": "router", "huggingFace": "hub"},
    "cache": {"enabled": True, "storageClass": "fast", "accessModes": ["ReadWriteMany"]},
    "gpu": {"count": 2, "runtimeClassName": "nvidia"},
    "podAnnotations": {"note": "x"},
    "podLabels": {"team": "a"},
    "nodeSelector": {"gpu": "h100"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 1, "podAffinityTerm": {"topologyKey": "kubernetes.io/hostname"}}
            ]
        }
    },
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
    ],
    "priorityClassName": "high",
    "autoscaling": {"enabled": True, "maxReplicas": 8},
    "router": {"replicas": 2, "args": ["--request-timeout-secs", "600"]},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True},
    "dashboard": {"enabled": True},
}
BARE: dict[str, Any] = {
    "router": {"enabled": False},
    "podDisruptionBudget": {"enabled": False},
    "fullnameOverride": "llm",
}
SETS = {"defaults": {}, "everything": EVERYTHING, "bare": BARE}


def template(values: dict[str, Any], *flags: str, chart: Path = CHART) -> str:
    """The output of `helm template` for the release `r` in the namespace `n`."""
    arguments = ["template", "r", str(chart), "--namespace", "n", "--kube-version", f"{KUBERNETES}.0", *flags]
    return run("helm", *arguments, "--values", "-", stdin=json.dumps(values))


@cache
def rendered(name: str) -> tuple[dict[str, Any], ...]:
    """The objects of the chart with one of `SETS`."""
    return tuple(found for found in yaml.safe_load_all(template(SETS[name])) if found)


def objects(name: str, kind: str) -> list[dict[str, Any]]:
    """The objects of one kind."""
    return [found for found in rendered(name) if found["kind"] == kind]


def one(name: str, kind: str, component: str) -> dict[str, Any]:
    """The only object of a kind with a component's label."""
    label = "app.kubernetes.io/component"
    (found,) = (each for each in objects(name, kind) if each["metadata"]["labels"][label] == component)
    return found


def container(name: str, component: str) -> dict[str, Any]:
    """The container of a Deployment."""
    (found,) = one(name, "Deployment", component)["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found
