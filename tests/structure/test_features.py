"""The pages promise only what exists: docs/cli.md has each flag that they name, and docs/api.md each route.

tests/e2e/test_cli_page.py and tests/e2e/test_api_page.py compare docs/cli.md and docs/api.md with the binary.
"""

import re
from pathlib import Path

import pytest

from tests.structure.repository import read

PAGES = [
    "README.md",
    "docs/README.md",
    "docs/features.md",
    "docs/migrate.md",
    "docs/recipes.md",
    "docs/page.md",
    "docs/router.md",
    "docs/replicas.md",
    "docs/memory.md",
]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w*-])")
ROUTE = re.compile(r"`(?:(?:GET|POST|DELETE) )?(/[a-z][\w/{}-]*)`")
PARTS = {"/v1", "/v2"}
"""The first parts of versioned routes."""


def flags() -> set[str]:
    """Every flag of every command, in all spellings."""
    return set(FLAG.findall(read(Path("docs/cli.md"))))


def foreign() -> set[str]:
    """The flags of other servers that `forebay serve` or `forebay route` recognizes."""
    return set(FLAG.findall(read(Path("crates/forebay/src/flags/foreign.rs"))))


def routes() -> set[str]:
    """Every route of servers and of routers."""
    own = {"/backends", "/", "/v1/blocks"}
    return own | set(re.findall(r"^\| `(/[^`]*)` \|", read(Path("docs/api.md")), re.MULTILINE))


NAMES_FOREIGN = ("docs/migrate.md", "docs/router.md")
"""Pages that also name flags of other servers."""


@pytest.mark.parametrize("page", PAGES)
def test_flags_of_a_page_exist(page: str) -> None:
    named = set(FLAG.findall(read(Path(page))))
    known = flags() | (foreign() if page in NAMES_FOREIGN else set())
    assert named - known == set()


@pytest.mark.parametrize("page", PAGES)
def test_routes_of_a_page_exist(page: str) -> None:
    named = set(ROUTE.findall(read(Path(page))))
    assert named - routes() - PARTS == set()


def test_the_readers_see_something() -> None:
    assert len(flags()) > 150
    assert len(foreign()) > 100
    assert len(routes()) > 40
    assert FLAG.findall("`--tp-size 2`, -n, a--b, --hicache-*") == ["--tp-size"]
    assert ROUTE.findall("`/v1/loads`, `POST /backends {...}`, `GET /health`") == ["/v1/loads", "/health"]
