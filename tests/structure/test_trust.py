"""Each line of docs/trust.md has tests in trust.json, and all of them exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.structure.repository import ROOT, read

PAGE = Path("docs/trust.md")
TESTS: dict[str, list[str]] = json.loads(read(Path("tests/structure/trust.json")))
"""The tests of each line of docs/trust.md. Each is a file, or a file and the name of a test."""
LINE = re.compile(r"^\| ([A-Z]\d+) \|", re.MULTILINE)
NAMED = re.compile(r"((?:crates|tests)/[^`:]+\.(?:rs|py))(?:::(\w+))?")


def named() -> list[tuple[str, str]]:
    """Files and the tests in them. The name is empty if the whole file is meant."""
    on_page = re.findall(rf"`{NAMED.pattern}`", read(PAGE))
    matches = [(name, NAMED.fullmatch(name)) for names in TESTS.values() for name in names]
    assert [name for name, match in matches if match is None] == []
    return sorted({*on_page, *((match[1], match[2] or "") for _, match in matches if match)})


@pytest.mark.parametrize("file", sorted({file for file, _ in named()}))
def test_every_test_that_is_named_is_there(file: str) -> None:
    assert (ROOT / file).is_file()
    text = read(Path(file))
    missing = [name for where, name in named() if where == file and not re.search(rf"\b(fn|def) {name}\b", text)]
    assert not missing


def test_every_line_has_tests_and_no_tests_lack_a_line() -> None:
    lines = set(LINE.findall(read(PAGE)))
    assert len(lines) > 80
    assert lines == set(TESTS)
    assert [line for line, names in TESTS.items() if not names] == []
