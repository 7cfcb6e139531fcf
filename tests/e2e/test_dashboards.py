"""Dashboards, alerts and autoscalers read only metrics that a server or a router has."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from tests.deploy.promql import dashboard_expressions, deployed, rules
from tests.deploy.tools import DEPLOY, tool
from tests.e2e.metrics import Metrics
from tests.e2e.models import Model
from tests.e2e.server import ROOT, Server, free_port
from tests.e2e.simulated import SIM, paced
from tests.e2e.waiting import eventually

VLLM: list[dict[str, Any]] = yaml.safe_load((ROOT / "tests/deploy/vllm_dashboards.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def router(tiny: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A router in front of a server with a simulated device and a host tier, after some requests."""
    folder = tmp_path_factory.mktemp("logs")
    # Steps take time, so that the device is busy.
    flags = (*SIM, *paced(folder, step_us=500), "--enable-hierarchical-cache", "--log-interval", "0")
    with ExitStack() as stack:
        server = Server(tiny.path, *flags, log=folder / "server.log")
        stack.callback(server.kill)
        server.wait_for_health()
        router = Server("--backends", server.url, command="route", log=folder / "router.log")
        stack.callback(router.kill)
        router.wait_for_health()
        for _ in range(3):
            router.ask("/v1/completions", {"model": tiny.name, "prompt": "Rivers run " * 20, "max_tokens": 8})
        yield router


@pytest.fixture(scope="module")
def served(router: Server) -> Metrics:
    """The metrics of the server and the router."""
    (backend,) = router.http.get("/v1/loads").json()["loads"]
    both = [router.http.get("/metrics"), router.http.get(backend["url"] + "/metrics")]
    return Metrics("".join(response.text for response in both))


def base(name: str) -> str:
    """A metric's name without a histogram's suffix."""
    return re.sub(r"_(?:bucket|sum|count)$", "", name)


def test_everything_deployed_is_served(served: Metrics) -> None:
    """Every metric that deploy/ reads exists, with the labels that it matches or groups by."""
    labels: dict[str, set[str]] = {}
    for sample in served.samples:
        labels.setdefault(sample.name, set()).update(sample.labels)
    lost = {(use.where, use.metric) for use in deployed() if use.metric not in labels}
    assert not lost
    wrong = {(use.where, use.metric, *(use.labels - labels[use.metric])) for use in deployed()}
    assert not {found for found in wrong if len(found) > 2}


def test_the_numbers_are_of_the_requests(served: Metrics) -> None:
    assert served.value("vllm:request_success_total", finished_reason="length") == 3
    assert served.value("forebay_router_requests_total") == 3
    assert served.value("vllm:prefix_cache_hits_total") > 0
    assert served.value("sglang:hicache_host_total_tokens") > 0


def documented() -> set[str]:
    """The metrics of vLLM's dashboards that docs/operations.md lists as missing."""
    section = (ROOT / "docs/operations.md").read_text(encoding="utf-8").split("\n## vLLM's dashboards\n")[1]
    rows = [line for line in section.split("\n## ")[0].splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def test_dashboards_of_vllm_fill_as_far_as_the_page_says(served: Metrics) -> None:
    """If a metric is added to the server, the page must no longer list it; a lost metric fails here."""
    served_names = {base(sample.name) for sample in served.samples}
    wanted = {name for board in VLLM for name in board["metrics"]}
    assert wanted - served_names == documented()


@pytest.mark.parametrize("board", VLLM, ids=lambda board: Path(board["dashboard"]).stem)
def test_each_dashboard_of_vllm_has_something_to_show(board: dict[str, Any], served: Metrics) -> None:
    assert re.fullmatch(r"[0-9a-f]{40}", board["commit"])
    assert board["metrics"] == sorted(set(board["metrics"]))
    assert set(board["metrics"]) & {base(sample.name) for sample in served.samples}


class Prometheus:
    """A Prometheus process that scrapes a server and a router each second and evaluates the rules. Always `kill` it."""

    def __init__(self, folder: Path, targets: dict[str, str]) -> None:
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(DEPLOY / "prometheus/rules.yml")],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": [url.removeprefix("http://")]}]}
                for job, url in targets.items()
            ],
        }
        file = folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(config))
        self.url = f"http://127.0.0.1:{free_port()}"
        listen = f"--web.listen-address={self.url.removeprefix('http://')}"
        command = [tool("prometheus"), f"--config.file={file}", f"--storage.tsdb.path={folder}/data", listen]
        with (folder / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.http = httpx2.Client(base_url=self.url, timeout=30, trust_env=False)

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer; None while Prometheus starts."""
        try:
            response = self.http.get(f"/api/v1/{path}", params=parameters)
        except httpx2.TransportError:
            return None
        if response.status_code == 503:
            return None
        assert response.status_code == 200, response.text
        return response.json()["data"]

    def kill(self) -> None:
        """Kills the process."""
        self.process.kill()
        self.process.wait()
        self.http.close()


def test_panels_fill_and_rules_are_evaluated(router: Server, tiny: Model, tmp_path: Path) -> None:
    """Prometheus has data for every panel, and evaluates every rule without an error."""
    (backend,) = router.http.get("/v1/loads").json()["loads"]
    prometheus = Prometheus(tmp_path, {"forebay": backend["url"], "forebay-router": router.url})
    variables = {"$__rate_interval": "1m", "$job": "forebay", "$router_job": "forebay-router"}
    empty: list[str] = []

    def filled() -> bool:
        messages = [{"role": "user", "content": "Rivers run " * 200}]
        router.ask("/v1/chat/completions", {"model": tiny.name, "messages": messages, "max_tokens": 8})
        empty.clear()
        for title, expression in dashboard_expressions():
            for name, value in variables.items():
                expression = expression.replace(name, value)
            found = prometheus.get("query", query=re.sub(r"\$\w+", ".*", expression))
            if not found or not found["result"]:
                empty.append(f"{title}: {expression}")
        return not empty

    try:
        try:
            eventually(filled, "every panel has data")
        except AssertionError:
            assert not empty
            raise
        assert len(every_rule(prometheus)) == len(rules())
        eventually(lambda: all(rule["health"] == "ok" for rule in every_rule(prometheus)), "all rules are evaluated")
        quiet = {"ForebayHandDied", "ForebayReplicaDown", "ForebayErrors", "ForebayRouterErrors", "ForebayUnreachable"}
        firing = {alert["labels"]["alertname"] for alert in prometheus.get("alerts")["alerts"]}
        assert not firing & quiet
    finally:
        prometheus.kill()


def every_rule(prometheus: Prometheus) -> list[Any]:
    """The rules, with the results of their last evaluation."""
    return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
