"""The page works on a narrow screen, with the keyboard, in dark mode, and with a screen reader."""

from __future__ import annotations

from typing import Any

import pytest

from tests.page.conftest import Open, Serve
from tests.page.engine import Engine, Json, Router
from tests.page.server import ROOT
from tests.page.test_chat import answer, call, say

AXE = ROOT / "web/node_modules/axe-core/axe.min.js"
NARROW = {"width": 390, "height": 844}
MARKDOWN = """# A heading

Some *text* with `code`, a [link](https://example.org) and a list:

1. one
2. two

| a | b |
|---|--:|
| 1 | 2 |

> quoted

```python
print("a long line of code that is wider than a telephone's screen, so that it has to scroll by itself")
```
"""


def script(body: Json) -> Any:
    if body["messages"][-1]["content"] == "Call.":
        return call(0, "get_weather", '{"city": "Bern", "days": [1, 2, 3]}')
    return [{"reasoning_content": "I think."}, MARKDOWN]


def chatted(page: Any) -> None:
    """Makes a conversation that has everything a message can have."""
    say(page, "Explain it.")
    answer(page)
    say(page, "Call.")
    answer(page)


def wide_elements(page: Any) -> list[str]:
    """The elements that extend beyond the right edge, and whether the page scrolls sideways."""
    found: list[str] = page.evaluate(
        """() => {
            const root = document.scrollingElement;
            const wide = root.scrollWidth > root.clientWidth ? ['the page scrolls'] : [];
            for (const box of document.querySelectorAll('.log, .engine, .side')) {
                if (box.scrollWidth > box.clientWidth) wide.push(`${box.className} scrolls`);
            }
            return wide;
        }"""
    )
    return found


@pytest.mark.parametrize("tab", ["chat", "engine", "router"])
def test_nothing_is_wider_than_a_telephone(serve: Serve, open_page: Open, tab: str) -> None:
    feed = Router() if tab == "router" else Engine(2)
    if isinstance(feed, Engine):
        feed.arrivals = 20
        feed.advance(2)
    server = serve(feed)
    server.script = script
    page = open_page(server, "chat" if tab == "chat" else "engine", viewport=NARROW, has_touch=True)
    if tab == "chat":
        chatted(page)
        assert wide_elements(page) == []
        for side in ("Conversations", "Settings"):
            page.get_by_role("button", name=side, exact=True).click()
            assert wide_elements(page) == []
        page.get_by_role("button", name="Settings", exact=True).click()
        assert page.get_by_label("Message", exact=True).is_visible()
    elif tab == "engine":
        page.get_by_role("button", name="Request ").first.wait_for()
        assert wide_elements(page) == []
        page.get_by_role("button", name="Request ").first.click()
        page.get_by_role("dialog").get_by_text("received").wait_for()
        box = page.get_by_role("dialog").bounding_box()
        assert box
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= NARROW["width"]
    else:
        page.get_by_role("row").first.wait_for()
        assert wide_elements(page) == []


def serious(page: Any) -> list[str]:
    """The violations that axe rates as serious or critical."""
    if not AXE.is_file():
        pytest.skip("axe-core is not installed: `make web` does it")
    # The debugger runs it, because the content security policy forbids another script in the page.
    page.evaluate(AXE.read_text())
    found: Any = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{item['id']}: {item['nodes'][0]['html'][:200]} {item['nodes'][0]['failureSummary']}"
        for item in found["violations"]
        if item["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [{"width": 1280, "height": 900}, NARROW], ids=["wide", "narrow"])
def test_axe_finds_nothing_serious(serve: Serve, open_page: Open, scheme: str, size: Any) -> None:
    engine = Engine(2, host_pages=512)
    engine.arrivals = 20
    engine.advance(3)
    server = serve(engine)
    server.script = script
    page = open_page(server, color_scheme=scheme, viewport=size)
    assert serious(page) == []
    chatted(page)
    for summary in page.locator("summary").all():
        if summary.is_visible() and not summary.evaluate("(element) => element.parentElement.open"):
            summary.click()
    assert serious(page) == []
    if size == NARROW:
        page.get_by_role("button", name="Settings", exact=True).click()
        assert serious(page) == []
    page.get_by_role("tab", name="Engine").click()
    page.get_by_role("button", name="Request ").first.wait_for()
    page.get_by_text("The last steps as a table").click()
    with server.lock:
        engine.kill(1)
    page.get_by_text("restarting").wait_for()
    assert serious(page) == []
    page.get_by_role("button", name="Request ").first.click()
    page.get_by_role("dialog").get_by_text("received").wait_for()
    assert serious(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_backends_and_colours(serve: Serve, open_page: Open, scheme: str) -> None:
    router = Router()
    router.backends[1] |= {"ready": False, "breaker": "open"}
    router.backends[2] |= {"breaker": "half_open"}
    page = open_page(serve(router), color_scheme=scheme)
    page.get_by_label("Colour tokens by probability").check()
    say(page, "one two three four five six seven eight nine ten")
    answer(page)
    assert serious(page) == []
    page.get_by_role("tab", name="Backends").click()
    page.get_by_role("row").first.wait_for()
    assert serious(page) == []


def test_the_keyboard_is_enough(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(Engine()))
    page.get_by_role("tab", name="Chat").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_role("region", name="Steps", exact=True).wait_for()
    assert page.evaluate("document.activeElement.id") == "tab-engine"
    page.keyboard.press("ArrowLeft")
    box = page.get_by_label("Message", exact=True)
    box.wait_for()
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('aria-label')") == "Message":
            break
    page.keyboard.type("by hand")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("and foot")
    page.keyboard.press("Enter")
    assert "by hand\nand foot" in page.get_by_role("article", name="Your message").inner_text()
    answer(page)
