"""Hostile output of a model does not run, does not reach other hosts, and does not freeze the page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.page.conftest import Open, Serve, until
from tests.page.engine import Json
from tests.page.server import Chunk
from tests.page.test_chat import answer, say

MOST_FROZEN_MS = 1000
"""A bound, not a performance goal. Without the page's limits, these inputs take tens of seconds or crash the tab."""

LAST = "[...document.querySelectorAll('.message.assistant :is(.block, .plain)')].at(-1)"

ATTACKS = {
    "script": "<script>window.hit = 1</script>",
    "handler": '<img src="x" onerror="window.hit = 1">',
    "svg": '<svg onload="window.hit = 1"><animate onbegin="window.hit = 1" attributeName="x"/></svg>',
    "frame": '<iframe srcdoc="<script>parent.hit = 1</script>"></iframe>',
    "link": "[click](javascript:window.hit=1) <javascript:window.hit=1> [data](data:text/html,<script>hit=1</script>)",
    "entity link": "[click](&#106;avascript:window.hit=1) [tab](java\tscript:window.hit=1)",
    "image": "![pixel](http://127.0.0.1:9/pixel.png) ![data](data:image/svg+xml;base64,PHN2Zy8+)",
    "style": '<style>body { display: none }</style><p style="position: fixed; inset: 0">x</p>',
    "form": '<form action="http://127.0.0.1:9/"><input name="key"><button>Log in</button></form>',
    "mutation": "<math><mtext><table><mglyph><style><!--</style>"
    "<img title=\"--&gt;&lt;img src onerror='window.hit=1'&gt;\">",
    "code": "```html\n<script>window.hit = 1</script>\n```\n",
    "code language": '```"onmouseover="window.hit=1"\nx\n```\n',
    "title": "[a](http://127.0.0.1:9/ 'x\" onmouseover=\"window.hit=1')",
    "template": "<template><script>window.hit = 1</script></template><base href='http://127.0.0.1:9/'>",
}

HUGE = {
    "one line of 10 MB": "a" * 10_000_000,
    "words of 10 MB": "word " * 2_000_000,
    "a huge table": "|a|b|c|d|\n|-|-|-|-|\n" + "|1|2|3|4|\n" * 60_000,
    "tables": ("|a|b|\n|-|-|\n" + "|1|2|\n" * 400 + "\n") * 40,
    "brackets": "[" * 100_000,
    "brackets in lines": ("[" * 3000 + "\n") * 30,
    "stars": "**a " * 25_000,
    "stars in lines": ("*a_ " * 900 + "\n") * 30,
    "quotes": ">" * 60_000,
    "nested quotes": "\n".join(">" * depth + " x" for depth in range(1, 300)),
    "nested lists": "\n".join(" " * (2 * depth) + "- x" for depth in range(400)),
    "backticks": "\n\n".join("`" * number for number in range(1, 400)),
    "backticks in lines": ("`a" * 1500 + "\n") * 30,
    "entities": "&amp;" * 25_000,
    "links": "[a](b" * 20_000,
    "links in lines": ("[a](<b" * 600 + "\n") * 30,
    "autolinks": "http://a.b " * 10_000,
    "comments": "<!--" * 20_000,
    "blank lines": "\n" * 120_000 + "end",
    "many blocks": "a\n\n" * 40_000,
    "a code block": "```\n" + "x = 1\n" * 200_000,
    "right to left": "\u202e\u2066" * 50_000,
    "marks": "a" + "\u0301" * 100_000,
    "joined": "\U0001f469\u200d" * 40_000,
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_attacks_do_not_run(serve: Serve, open_page: Open, attack: str) -> None:
    server = serve()
    server.script = lambda _: ["Before.\n\n", attack, "\n\nAfter."]
    page = open_page(server, refused=(404,))
    say(page, "Attack.")
    done = answer(page)
    done.get_by_text("After.").wait_for()
    shown = done.locator(".markdown")
    found = shown.evaluate(
        """(root) => [...root.querySelectorAll('*')].flatMap((element) => [
            element.tagName, ...[...element.attributes].map(({name, value}) => `${name}=${value}`)])"""
    )
    allowed = {"DIV", "P", "PRE", "CODE", "A", "BR"}
    names = [item for item in found if "=" not in item]
    assert set(names) <= allowed
    for item in found:
        name, _, value = item.partition("=")
        if name in allowed:
            continue
        assert name in {"class", "href", "title", "target", "rel", "tabindex"}
        assert name != "href" or value.startswith(("http://", "https://"))
        assert name != "rel" or "noopener" in value
    for link in shown.locator("code, p").all():
        link.hover()
    assert page.evaluate("window.hit") is None


@pytest.mark.parametrize("pieces", [1, 40], ids=["at once", "in pieces"])
@pytest.mark.parametrize("text", HUGE.values(), ids=HUGE.keys())
def test_nothing_freezes_the_page(serve: Serve, open_page: Open, text: str, pieces: int) -> None:
    def huge(_: Json) -> Iterable[Chunk]:
        size = -(-len(text) // pieces)
        for start in range(0, len(text), size):
            yield text[start : start + size]
            yield 0.02
        yield "\n\nThe end."

    server = serve()
    server.script = huge
    page = open_page(server, refused=(404,))
    page.evaluate(
        """() => {
            let last = performance.now();
            window.frozen = 0;
            const look = () => {
                const now = performance.now();
                window.frozen = Math.max(window.frozen, now - last);
                last = now;
                setTimeout(look, 0);
            };
            look();
        }"""
    )
    say(page, "Huge.")
    # Playwright's locators would walk through every element of the page, inside the page.
    until(page, f"document.querySelector('.facts') && {LAST}.textContent.trimEnd().endsWith('The end.')", 60)
    frozen: Any = page.evaluate(
        "new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(window.frozen))))"
    )
    assert frozen < MOST_FROZEN_MS
