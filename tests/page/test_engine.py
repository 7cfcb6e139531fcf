"""The engine and the backends, as the page shows them from the live feed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.page.conftest import Open, Serve, until
from tests.page.engine import Engine, Router
from tests.page.server import PageServer

STEP = "Number(document.querySelector('.timeline')?.dataset.step ?? 0)"
"""The sum over all replicas of the number of the last drawn step. 0 until the timeline is shown."""


@pytest.fixture
def engine() -> Engine:
    """Two replicas with work for an hour."""
    engine = Engine(2, host_pages=512)
    for replica in (0, 1):
        for number in range(6):
            engine.add(400 + 100 * number, 100_000, replica=replica, cached=256 if number else 0)
    engine.add(900, 128)
    return engine


@pytest.fixture
def server(serve: Serve, engine: Engine) -> PageServer:
    return serve(engine)


@pytest.fixture
def page(server: PageServer, open_page: Open) -> Any:
    return open_page(server, "engine")


def drawn(page: Any) -> int:
    """The number of colored pixels of the timeline."""
    count = page.evaluate(
        """() => {
            const canvas = document.querySelector('.timeline canvas');
            const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
            const colours = new Map();
            for (let at = 0; at < data.length; at += 4) {
                const colour = (data[at] << 16) | (data[at + 1] << 8) | data[at + 2];
                if (data[at + 3]) colours.set(colour, (colours.get(colour) ?? 0) + 1);
            }
            const decode = getComputedStyle(canvas).getPropertyValue('--decode').trim().slice(1);
            return colours.get(parseInt(decode, 16)) ?? 0;
        }"""
    )
    return int(count)


def test_the_timeline_advances(page: Any) -> None:
    timeline = page.get_by_role("region", name="Steps", exact=True)
    timeline.wait_for()
    until(page, f"{STEP} > 20")
    before = page.evaluate(STEP)
    until(page, f"{STEP} > {before} + 20")
    assert drawn(page) > 1000
    page.get_by_text("The last steps as a table").click()
    rows = timeline.get_by_role("row")
    rows.nth(12).wait_for()
    # A paused timeline does not move.
    page.get_by_role("button", name="Hold the timeline").click()
    page.get_by_role("button", name="Earlier").click()
    page.get_by_role("button", name="Follow the server").click()


def test_a_step_is_described_where_the_pointer_is(page: Any) -> None:
    page.get_by_role("button", name="0.25 s").click()
    until(page, f"{STEP} > 60")
    page.locator(".timeline canvas").hover(position={"x": 500, "y": 50})
    tip = page.locator(".tip").inner_text()
    assert "step " in tip
    assert "decode" in tip
    assert "replica 0" in tip


def test_a_request_s_life_opens(page: Any, engine: Engine, server: PageServer) -> None:
    page.get_by_role("button", name=re.compile("^Request 2 ")).click()
    dialog = page.get_by_role("dialog", name="The life of request 2")
    dialog.get_by_text("first token", exact=False).wait_for()
    said = dialog.inner_text()
    assert said.index("received") < said.index("queued") < said.index("admitted") < said.index("prefill")
    assert "cached 256" in said
    before = dialog.get_by_role("listitem").count()
    # The list grows while the request runs.
    until(page, f"document.querySelectorAll('.life .event').length > {before}")
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    # The focus returns to the element that had it.
    assert page.evaluate("document.activeElement.innerText").split()[:2] == ["Request", "2"]


def test_requests_that_end_leave_the_list(page: Any) -> None:
    page.get_by_text("Ended lately (1)").wait_for(timeout=20_000)
    running = page.get_by_role("list", name="Running and queued requests")
    assert running.get_by_role("listitem").count() == 12
    page.get_by_text("Ended lately (1)").click()
    ended = page.get_by_role("list", name="Requests that ended lately").get_by_role("button")
    assert "/128 out" in ended.inner_text()
    ended.click()
    page.get_by_role("dialog").get_by_text("finished").wait_for()


def test_a_life_that_is_forgotten_is_said_so(server: PageServer, open_page: Open, engine: Engine) -> None:
    page = open_page(server, "engine", refused=(404,))
    button = page.get_by_role("button", name=re.compile("^Request 2 "))
    button.wait_for()
    engine.requests.clear()
    button.click()
    page.get_by_role("dialog").get_by_text("The ring no longer knows this request").wait_for()


def test_a_replica_that_restarts_is_seen(page: Any, engine: Engine, server: PageServer) -> None:
    replica = page.get_by_role("region", name="Replica 1", exact=True)
    other = page.get_by_role("region", name="Replica 0", exact=True)
    replica.get_by_text("ready").wait_for()
    with server.lock:
        engine.kill(1)
    replica.get_by_text("restarting").wait_for()
    assert other.get_by_role("status").inner_text() == "ready"
    with server.lock:
        engine.recover(1)
    replica.get_by_text("ready").wait_for()
    facts = dict(zip(replica.locator("dt").all_inner_texts(), replica.locator("dd").all_inner_texts(), strict=True))
    assert facts["respawns"] == "1"
    assert facts["replayed"] == "6"


def test_pages_are_counted_by_tier(page: Any) -> None:
    card = page.get_by_role("region", name="KV pages")
    maps = card.get_by_role("img")
    maps.first.wait_for()
    assert maps.count() == 4
    until(page, "!document.querySelector('.tier canvas').getAttribute('aria-label').startsWith('0 ')")
    for index, total in enumerate([1024, 512, 1024, 512]):
        label = maps.nth(index).get_attribute("aria-label")
        assert sum(int(word) for word in label.split() if word.isdigit()) == total


def test_the_charts_have_numbers(page: Any, engine: Engine) -> None:
    engine.arrivals = 10
    until(page, f"{STEP} > 100")
    for title in ["Decode", "Prefill", "Prefix cache", "Requests", "Gaps between steps", "Plan latency"]:
        chart = page.locator(f"section.chart[aria-label^='{title}:']")
        chart.locator("b").first.filter(has_not_text="–").wait_for()
        assert chart.locator("canvas").count() == 1


def test_the_trace_is_a_download(page: Any) -> None:
    with page.expect_download() as download:
        page.get_by_role("button", name="Chrome trace").click()
    assert json.loads(Path(download.value.path()).read_text())["traceEvents"]


def test_a_feed_that_ends_is_found_again(page: Any, server: PageServer, serve: Serve) -> None:
    page.get_by_text("live", exact=True).wait_for()
    server.closing.set()
    page.get_by_text("It is tried again.").wait_for()
    server.closing.clear()
    page.get_by_text("live", exact=True).wait_for()
    page.get_by_role("region", name="Steps", exact=True).wait_for()


def test_a_server_without_a_feed_says_so(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(), "engine", refused=(404,))
    page.get_by_text("This server has no live feed").wait_for()


def test_the_feed_waits_for_a_key(server: PageServer, open_page: Open) -> None:
    server.key = "secret"
    page = open_page(server, "engine", refused=(401,))
    page.get_by_text("The server wants an API key").wait_for()
    page.get_by_role("tab", name="Chat").click()
    page.get_by_label("API key").fill("secret")
    page.get_by_role("button", name="Use").click()
    page.get_by_role("tab", name="Engine").click()
    page.get_by_role("region", name="Steps", exact=True).wait_for()


def test_a_router_shows_its_backends(serve: Serve, open_page: Open) -> None:
    router = Router()
    server = serve(router)
    page = open_page(server, "engine")
    page.get_by_role("tab", name="Backends").wait_for()
    row = page.get_by_role("row").filter(has_text="http://127.0.0.1:8002")
    row.get_by_text("closed").wait_for()
    assert "4,700" in row.inner_text()
    with server.lock:
        router.backends[1] |= {"ready": False, "breaker": "open", "failed": 4}
    row.get_by_text("open: left out").wait_for()
    assert "not ready" in row.inner_text()
    assert page.get_by_text("2 ready").is_visible()
