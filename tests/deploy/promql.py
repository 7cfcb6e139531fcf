"""The metrics that a Prometheus expression reads, and their labels in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from tests.deploy.tools import DEPLOY

_STRING = re.compile(r'"(?:\\.|[^"\\])*"')
_RANGE = re.compile(r"\[[^\]]*\]")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*(\{[^}]*\})?(?!\w*\s*\()")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_WORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan"}

# Prometheus adds `job` and `instance` when it scrapes. `le` is the label of histogram buckets.
ADDED = {"job", "instance", "le"}


@dataclass(frozen=True)
class Use:
    """A metric that an expression reads, with the labels that it matches or groups by."""

    where: str
    metric: str
    labels: frozenset[str]


def uses(expression: str, where: str) -> list[Use]:
    """Every metric of the expression. Labels of a grouping count for all of its metrics."""
    bare = _RANGE.sub("", _STRING.sub('""', expression))
    grouped = {label.strip() for group in _GROUPING.findall(bare) for label in group.split(",")} - {""}
    found = []
    for name, matchers in _SELECTOR.findall(_GROUPING.sub(" ", bare)):
        if name.lower() not in _WORDS:
            labels = grouped | set(_MATCHER.findall(matchers))
            found.append(Use(where, name, frozenset(labels - ADDED)))
    return found


def dashboard() -> dict[str, Any]:
    """The dashboard of Grafana."""
    found: dict[str, Any] = json.loads((DEPLOY / "grafana/forebay.json").read_text(encoding="utf-8"))
    return found


def dashboard_expressions() -> Iterator[tuple[str, str]]:
    """Title and expression of each series of the dashboard's panels."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


def variable_queries() -> Iterator[tuple[str, str, str]]:
    """Name, selector and label of each variable of the dashboard that lists a label's values."""
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert found, variable
            yield variable["name"], found[1], found[2]


def rules() -> list[dict[str, Any]]:
    """Alerts and recorded series."""
    groups = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def adapter_rules() -> list[dict[str, Any]]:
    """The metrics for the autoscaler of Kubernetes."""
    path = DEPLOY / "kubernetes/prometheus-adapter.yaml"
    found: list[dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))["rules"]["custom"]
    return found


def deployed() -> list[Use]:
    """Every metric that the dashboard, alerts and autoscaler read, except those that Prometheus makes itself."""
    made = {rule["record"] for rule in rules() if "record" in rule} | {"up"}
    found = [use for title, expression in dashboard_expressions() for use in uses(expression, f"panel {title}")]
    for name, selector, label in variable_queries():
        where = f"variable {name}"
        found += [Use(where, use.metric, use.labels | ({label} - ADDED)) for use in uses(selector, where)]
    for rule in rules():
        found += uses(rule["expr"], f"rule {rule.get('alert', rule.get('record'))}")
    for rule in adapter_rules():
        # The two labels in the adapter's query come from the scrape of a pod.
        found += [Use("adapter", use.metric, frozenset()) for use in uses(rule["seriesQuery"], "adapter")]
    return [use for use in found if use.metric not in made]
