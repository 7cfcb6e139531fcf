"""docs/api.md compared with a server: its endpoints, and the effect of each field."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.e2e.client import Json
from tests.e2e.conftest import Serve
from tests.e2e.models import Model
from tests.e2e.server import ROOT, Server

PAGE = (ROOT / "docs/api.md").read_text(encoding="utf-8")
ROUTES = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
BODIES: dict[str, Json] = {
    "chat": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "completions": {"prompt": "a", "max_tokens": 1},
}
SCHEMAS = {"chat": "ChatRequest", "completions": "CompletionRequest"}


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    assert lines
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def fields() -> list[tuple[str, str, str]]:
    """Each field with a route and the page's text about it."""
    found = []
    for name, chat, completions, *_ in rows("Fields of chat and completions"):
        plain = name.strip("`")
        found += [(plain, "chat", chat), (plain, "completions", completions)]
    return found


@pytest.fixture(scope="module")
def server(serve_for_module: Serve, tiny: Model) -> Server:
    return serve_for_module(tiny, "--device", "sim")


@pytest.fixture(scope="module")
def document(server: Server) -> Any:
    return server.http.get("/openapi.json").json()


def test_every_endpoint_is_on_the_page(document: Any) -> None:
    served = {(path, method.upper()) for path, item in document["paths"].items() for method in item}
    told = {(path.strip("`"), method) for path, methods, *_ in rows("Endpoints") for method in methods.split(", ")}
    assert told == served


@pytest.mark.parametrize("route", ROUTES)
def test_every_field_that_is_served_is_on_the_page(document: Any, route: str) -> None:
    served = set(document["components"]["schemas"][SCHEMAS[route]]["properties"])
    told = {name for name, where, what in fields() if where == route and what == "yes"}
    assert told == served


@pytest.mark.parametrize(("name", "route", "what"), [field for field in fields() if field[2] != "yes"])
def test_what_becomes_of_other_fields(server: Server, name: str, route: str, what: str) -> None:
    # Any value that requests an effect will do.
    response = server.post(ROUTES[route], {**BODIES[route], name: 1})
    if what == "400":
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter")
    else:
        assert what in ("named", "-")
        assert response.status_code == 200, response.text
        assert response.headers["x-forebay-ignored"] == name
    nothing = server.post(ROUTES[route], {**BODIES[route], name: None})
    assert (nothing.status_code, "x-forebay-ignored" in nothing.headers) == (200, False)


def test_every_family_is_on_the_page() -> None:
    source = (ROOT / "crates/dialect/src/family.rs").read_text(encoding="utf-8")
    names = set(re.findall(r'    name: "([^"]+)"', source))
    table = PAGE.split("| calls | other names |")[1].split("\n\n")[0]
    assert names <= set(re.findall(r"`([^`]+)`", table))
    assert len(names) > 15


def test_there_are_few_differences() -> None:
    listed = re.findall(r"^\d+\. ", PAGE.split("## Different on purpose")[1], re.MULTILINE)
    assert 0 < len(listed) <= 5
