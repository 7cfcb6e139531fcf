"""Makes the pictures of docs/page.md: the web page with a scripted server, in chromium.

Run it as `.venv/page/bin/python scripts/screenshots.py [FOLDER]` after `make setup-page`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from playwright.sync_api import Browser, Page, sync_playwright  # noqa: E402

from tests.page.engine import Engine, Json, Router  # noqa: E402
from tests.page.server import Chunk, PageServer  # noqa: E402

WIDE = {"width": 1280, "height": 800}
TALL = {"width": 1280, "height": 900}
NARROW = {"width": 390, "height": 780}
THOUGHTS = (
    "A forebay stands before a turbine. The question is what it is good for, so the answer needs the head of water."
)
ANSWER = """A **forebay** is a small basin right in front of a turbine's intake. It does two things:

1. It holds water ready, so that a change of load does not run the turbine dry.
2. It lets sand and leaves settle before they reach the blades.

| part | keeps |
|---|---|
| forebay | seconds to minutes of water |
| reservoir | days to months of it |

The flow is `Q = P / (rho * g * h)`: less head `h` needs more water for the same power.
"""


def script(body: Json) -> Iterable[Chunk]:
    """Yields an answer with reasoning, one with a tool call, or one that uses the tool's result."""
    if body["messages"][-1]["role"] == "tool":
        yield from pieces("In Bern it rains today, at 11 degrees. Take a coat.")
    elif "weather" in str(body["messages"][-1]["content"]):
        call = {"name": "get_weather", "arguments": '{"city": "Bern"}'}
        yield {"tool_calls": [{"index": 0, "id": "call-1", "type": "function", "function": call}]}
    else:
        yield {"reasoning_content": THOUGHTS}
        yield from pieces(ANSWER)


def pieces(text: str) -> Iterable[Chunk]:
    """Yields a text as tokens, at the speed of a model."""
    for start in range(0, len(text), 4):
        yield text[start : start + 4]
        yield 0.004


def ask(page: Page, text: str) -> None:
    """Sends a message and waits for the whole answer."""
    complete = page.get_by_role("button", name="Regenerate")
    before = complete.count()
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    complete.nth(before).wait_for()


def open_page(browser: Browser, server: PageServer, tab: str, scheme: Any = "light", size: Any = None) -> Page:
    """Opens the page in a new browser context, so that no conversation is kept."""
    context = browser.new_context(viewport=size or WIDE, color_scheme=scheme, reduced_motion="reduce")
    page = context.new_page()
    page.goto(f"{server.url}/#{tab}")
    return page


def chat(browser: Browser, server: PageServer, folder: Path) -> None:
    """Takes pictures of a conversation in the light scheme, and of one with a tool call in the dark scheme."""
    for scheme in ("light", "dark"):
        page = open_page(browser, server, "chat", scheme)
        ask(page, "What is a forebay good for?")
        if scheme == "dark":
            page.get_by_label("Send tools").evaluate("(box) => box.click()")
            ask(page, "How is the weather in Bern?")
            page.get_by_label("Result", exact=True).fill('{"sky": "rain", "degrees": 11}')
        else:
            page.locator("summary", has_text="Reasoning").click()
        page.screenshot(path=folder / f"chat-{scheme}.png")
        page.context.close()


def colours(browser: Browser, server: PageServer, folder: Path) -> None:
    """Takes a picture of coloured tokens on a narrow screen."""
    page = open_page(browser, server, "chat", size=NARROW)
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_label("Colour tokens by probability").check()
    page.get_by_role("button", name="Settings", exact=True).click()
    ask(page, "What is a forebay good for?")
    page.screenshot(path=folder / "chat-narrow.png")
    page.context.close()


def engine(browser: Browser, folder: Path) -> None:
    """Takes pictures of the engine at work, a request's timeline, and a replica that restarts."""
    feed = Engine(2, model="Qwen3-0.6B", host_pages=2048)
    feed.arrivals = 9
    for replica in feed.replicas:
        replica.slots = 16
    server = PageServer(feed)
    for scheme in ("light", "dark"):
        page = open_page(browser, server, "engine", scheme, TALL)
        page.get_by_role("button", name="0.25 s" if scheme == "light" else "1 s", exact=True).click()
        page.wait_for_timeout(16_000 if scheme == "light" else 6_000)
        if scheme == "dark":
            with server.lock:
                feed.kill(1)
            page.wait_for_timeout(600)
        page.screenshot(path=folder / f"engine-{scheme}.png", full_page=False)
        if scheme == "light":
            page.get_by_role("list", name="Running and queued requests").get_by_role("button").first.click()
            page.get_by_role("dialog").get_by_text("first token").wait_for()
            page.get_by_role("dialog").screenshot(path=folder / "life.png")
        page.context.close()
    server.close()


def backends(browser: Browser, folder: Path) -> None:
    """Takes a picture of a router's backends."""
    feed = Router()
    feed.backends[2] |= {"ready": False, "breaker": "open", "failed": 12, "in_flight": 0, "running": 0}
    server = PageServer(feed)
    page = open_page(browser, server, "engine", size={"width": 1280, "height": 260})
    page.wait_for_timeout(800)
    page.screenshot(path=folder / "backends.png")
    page.context.close()
    server.close()


def main() -> None:
    """Writes the pictures into the folder given as argument, or into docs/page."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/page"
    folder.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if not chromium:
        sys.exit("chromium is not installed")
    server = PageServer(Engine())
    server.script = script
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        chat(browser, server, folder)
        colours(browser, server, folder)
        engine(browser, folder)
        backends(browser, folder)
        browser.close()
    server.close()


if __name__ == "__main__":
    main()
