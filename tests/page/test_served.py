"""The page as the binary serves it. Only the device is simulated."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.page.conftest import Open

ROOT = Path(__file__).resolve().parents[2]
BINARY = Path(os.environ.get("FOREBAY_TEST_BINARY", ROOT / "target/fast/forebay"))
HANDS_PYTHON = ROOT / ".venv/bin/python"
START_SECONDS = 60


class Served:
    """A running `forebay` with the page at its root."""

    def __init__(self, *arguments: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [BINARY, *arguments, "--port", str(port), "--log-level", "warn"],
            env={**os.environ, "FOREBAY_PYTHON": str(HANDS_PYTHON)},
            stdin=subprocess.DEVNULL,
        )
        end = time.monotonic() + START_SECONDS
        while not self.healthy():
            assert self.process.poll() is None, f"the server ended with status {self.process.returncode}"
            assert time.monotonic() < end, "the server is not ready"
            time.sleep(0.05)

    def healthy(self) -> bool:
        """True if the server accepts requests."""
        try:
            return bool(urllib.request.urlopen(f"{self.url}/health", timeout=5).status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False

    def close(self) -> None:
        """Ends the server as an operator would."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        finally:
            self.process.kill()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    if not BINARY.exists():
        pytest.skip("`make build-tests` builds the binary")
    server = Served("serve", "smollm2", "--device", "sim", "--sim-output-tokens", "40")
    yield server
    server.close()


@pytest.fixture(scope="module")
def router(served: Served) -> Iterator[Served]:
    server = Served("route", "--backends", served.url)
    yield server
    server.close()


def say(page: Any, text: str) -> None:
    """Sends a message, and waits until its answer is complete."""
    box = page.get_by_role("textbox", name=re.compile("^Message"))
    box.fill(text)
    box.press("Enter")
    page.get_by_text(re.compile(r"\d+ tokens · ")).last.wait_for()


def test_a_chat_is_answered_and_its_steps_are_drawn(served: Served, open_page: Open) -> None:
    page: Any = open_page(served)
    say(page, "Say something.")
    page.get_by_role("tab", name="Engine").click()
    page.get_by_text("The last steps as a table").click()
    rows = page.get_by_role("region", name="Steps", exact=True).get_by_role("row")
    rows.nth(12).wait_for()
    page.get_by_text(re.compile(r"Ended lately \(\d+\)")).click()
    page.get_by_role("button", name=re.compile("^Request ")).first.click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("finished").wait_for()
    said = dialog.inner_text()
    assert said.index("received") < said.index("queued") < said.index("admitted") < said.index("first token")


def test_the_trace_is_a_download(served: Served, open_page: Open) -> None:
    page: Any = open_page(served, "engine")
    with page.expect_download() as download:
        page.get_by_role("button", name="Chrome trace").click()
    assert '"traceEvents"' in Path(download.value.path()).read_text()


def test_a_router_chats_and_shows_its_backends(served: Served, router: Served, open_page: Open) -> None:
    page: Any = open_page(router)
    say(page, "Say something else.")
    page.get_by_role("tab", name="Backends").click()
    row = page.get_by_role("row").filter(has_text=served.url)
    row.get_by_text("ready").wait_for()
    assert "closed" in row.inner_text()
