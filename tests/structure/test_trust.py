"""docs/trust.md names tests, and every one of them is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.structure.repository import ROOT, read

PAGE = Path("docs/trust.md")
NAMED = re.compile(r"`((?:crates|tests)/[^`:]+\.(?:rs|py))(?:::(\w+))?`")


def named() -> list[tuple[str, str]]:
    """Files and the tests in them; the name is empty where all of a file is meant."""
    return sorted(set(NAMED.findall(read(PAGE))))


@pytest.mark.parametrize("file", sorted({file for file, _ in named()}))
def test_every_test_that_the_page_names_is_there(file: str) -> None:
    assert (ROOT / file).is_file()
    text = read(Path(file))
    missing = [name for where, name in named() if where == file and not re.search(rf"\b(fn|def) {name}\b", text)]
    assert not missing


def test_the_page_names_tests_of_every_line() -> None:
    rows = [line for line in read(PAGE).splitlines() if re.match(r"\| [A-J]\d+ \|", line)]
    assert len(rows) > 90
    assert all(NAMED.search(row) for row in rows)
