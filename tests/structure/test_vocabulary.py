"""The code uses no word that vocabulary.md in this folder forbids, and one name for each thing."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.structure.repository import files, inside, read

DOCUMENT = Path("docs/vocabulary.md")
TABLES = Path("tests/structure/vocabulary.md")
SUFFIXES = {".rs", ".py", ".md", ".toml"}
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_JOINS = re.compile(r"[\s_-]+")


@dataclass(frozen=True)
class Rule:
    """A word that must not be used in `where`, except in `but_not_in`."""

    word: str
    instead: str
    where: list[str]
    but_not_in: list[str]


def table(heading: str, page: Path = TABLES) -> list[list[str]]:
    """The rows of the table below a heading of a page, without the table's head."""
    section = read(page).split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def paths(text: str) -> list[str]:
    return [path.strip() for path in text.split(",") if path.strip()]


def rules() -> list[Rule]:
    found = []
    for word, instead, where in table("Words not used"):
        included, _, excluded = where.partition(" not ")
        found.append(Rule(word, instead, paths(included), paths(excluded)))
    return found


@cache
def spoken(text: str) -> str:
    """`text` in lower case, with joined words split. Lines stay lines."""
    return "\n".join(_JOINS.sub(" ", _CAMEL.sub(" ", line)).lower() for line in text.splitlines())


def occurrences(word: str, text: str) -> list[int]:
    """The numbers of the lines that contain `word` or its plural."""
    pattern = re.compile(rf"\b{re.escape(word)}(?:s|es)?\b")
    return [number for number, line in enumerate(spoken(text).split("\n"), 1) if pattern.search(line)]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.word)
def test_word_is_not_used(rule: Rule) -> None:
    found = [
        f"{path}:{number}"
        for path in files()
        if path.suffix in SUFFIXES and inside(path, rule.where) and not inside(path, rule.but_not_in)
        if path != TABLES
        for number in occurrences(rule.word, read(path))
    ]
    assert not found, f"say {rule.instead!r} and not {rule.word!r} in {', '.join(found)}"


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.word)
def test_rule_names_places_that_can_be(rule: Rule) -> None:
    tops = {"crates", "python", "docs", "tests"}
    assert rule.where
    assert {Path(path).parts[0] for path in [*rule.where, *rule.but_not_in]} <= tops


@pytest.mark.parametrize("text", ["block_table", "BlockTable", "block-tables", "a Block table.", "x.block_table()"])
def test_every_way_to_join_words_is_seen(text: str) -> None:
    assert occurrences("block table", f"first line\n{text}") == [2]


def test_a_word_inside_another_is_not_seen() -> None:
    assert occurrences("tick", "a ticket; sticky") == []


def test_no_word_is_both_used_and_not_used() -> None:
    assert not {word for row in table("Words", DOCUMENT) for word in row[0].split(", ")} & {
        rule.word for rule in rules()
    }


# Also finds the types that a macro of the step protocol declares.
PUBLIC_TYPE = re.compile(
    r"^(?:(?:record|columns)! \{\n(?: +(?:///|#\[).*\n)* +)?pub (?:struct|enum|trait|type|union) (\w+)", re.MULTILINE
)
TESTS = re.compile(r"^#\[cfg\(test\)\]\nmod \w+ \{", re.MULTILINE)


def crates_by_public_name() -> dict[str, set[str]]:
    """The crates that have a public type of each name. Tests and examples are left out."""
    found: dict[str, set[str]] = {}
    for path in files():
        if path.suffix == ".rs" and path.parts[0] == "crates" and path.parts[2] == "src" and path.stem != "tests":
            for name in PUBLIC_TYPE.findall(TESTS.split(read(path))[0]):
                found.setdefault(name, set()).add(path.parts[1])
    return found


def test_a_public_name_means_one_thing_or_is_on_the_list() -> None:
    several = {name: crates for name, crates in crates_by_public_name().items() if len(crates) > 1}
    listed = {name: set(re.findall(r"\b\w+(?=[:,] )", text)) for name, text in table("Names of several things")}
    assert several.keys() == listed.keys()
    assert all(crates <= listed[name] for name, crates in several.items())
