"""A browser whose pages fail a test for each unexpected request or error."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.page.engine import Engine, Router
from tests.page.server import PageServer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WIDE = {"width": 1280, "height": 900}

Serve = Callable[..., PageServer]
Open = Callable[..., Any]


def until(page: Any, expression: str, seconds: float = 20) -> None:
    """Waits until a JavaScript expression is true.

    The debugger evaluates it. Playwright's own waiting evaluates strings in the page, which the page's policy forbids.
    """
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"not within {seconds} seconds: {expression}"
        page.wait_for_timeout(50)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium without a window. All tests share it."""
    api = pytest.importorskip("playwright.sync_api", reason="`make setup-page` installs playwright")
    if not CHROMIUM:
        pytest.skip("chromium is not installed")
    with api.sync_playwright() as playwright:
        # As root in a container, Chromium cannot use its sandbox.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers that run until the end of the test."""
    servers = []

    def start(feed: Engine | Router | None = None) -> PageServer:
        servers.append(PageServer(feed))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens a server's page. Afterwards checks that it contacted no other host, and that the console shows no error.

    `refused`: the error statuses that the test provokes. A browser writes each of them to its console.
    """
    contexts = []
    checks: list[Callable[[], None]] = []

    def start(server: PageServer, tab: str = "chat", *, refused: tuple[int, ...] = (), **options: Any) -> Any:
        context = browser.new_context(**{"viewport": WIDE, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        asked: list[str] = []
        errors: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)

        def check() -> None:
            hosts = {urlsplit(url).netloc for url in asked if not url.startswith(("data:", "blob:"))}
            assert hosts == {urlsplit(server.url).netloc}
            allowed = tuple(f"status of {status}" for status in refused)
            assert [line for line in errors if not any(text in line for text in allowed)] == []

        checks.append(check)
        page.goto(f"{server.url}/#{tab}")
        page.get_by_role("tab", name="Chat").wait_for()
        return page

    yield start
    try:
        for check in checks:
            check()
    finally:
        for context in contexts:
            context.close()
