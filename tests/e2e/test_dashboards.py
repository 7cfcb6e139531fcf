"""What dashboards, alerts and autoscalers read is what a server and a router say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.promql import deployed
from tests.e2e.metrics import Metrics
from tests.e2e.models import Model
from tests.e2e.server import ROOT, Server

VLLM: list[dict[str, Any]] = yaml.safe_load((ROOT / "tests/deploy/vllm_dashboards.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def router(tiny: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A router before a server with a simulated device and a host tier, after some requests."""
    folder = tmp_path_factory.mktemp("logs")
    flags = ["--device", "sim", "--enable-hierarchical-cache", "--log-interval", "0"]
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
    """The metrics of both."""
    (backend,) = router.http.get("/v1/loads").json()["loads"]
    both = [router.http.get("/metrics"), router.http.get(backend["url"] + "/metrics")]
    return Metrics("".join(response.text for response in both))


def base(name: str) -> str:
    """A metric's name without a histogram's suffix."""
    return re.sub(r"_(?:bucket|sum|count)$", "", name)


def test_everything_deployed_is_served(served: Metrics) -> None:
    """Every metric that something in deploy/ reads is there, with the labels that it matches or groups by."""
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
    """What docs/operations.md says of vLLM's dashboards that is missing."""
    section = (ROOT / "docs/operations.md").read_text(encoding="utf-8").split("\n## vLLM's dashboards\n")[1]
    rows = [line for line in section.split("\n## ")[0].splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def test_dashboards_of_vllm_fill_as_far_as_the_page_says(served: Metrics) -> None:
    """A metric that is added to the server has to leave the page, one that is lost fails here."""
    served_names = {base(sample.name) for sample in served.samples}
    wanted = {name for board in VLLM for name in board["metrics"]}
    assert wanted - served_names == documented()


@pytest.mark.parametrize("board", VLLM, ids=lambda board: Path(board["dashboard"]).stem)
def test_each_dashboard_of_vllm_has_something_to_show(board: dict[str, Any], served: Metrics) -> None:
    assert re.fullmatch(r"[0-9a-f]{40}", board["commit"])
    assert board["metrics"] == sorted(set(board["metrics"]))
    assert set(board["metrics"]) & {base(sample.name) for sample in served.samples}
