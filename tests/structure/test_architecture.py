"""The functions that ARCHITECTURE.md names exist."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.structure.repository import files, inside, read

PAGE = Path("ARCHITECTURE.md")
_CODE = re.compile(r"`([^`\n]+)`")
_RUST = re.compile(r"^(?:\w+::)*(\w+)::([a-z_]+)$")
_PYTHON = re.compile(r"^([A-Z]\w+)\.([a-z_]+)$")


@cache
def sources(suffix: str) -> dict[Path, str]:
    paths = [path for path in files() if path.suffix == suffix and inside(path, ["crates", "python"])]
    return {path: read(path) for path in paths if "tests" not in path.parts}


def naming(texts: Mapping[Path, str], *words: str) -> Mapping[Path, str]:
    """The texts that contain all of these words."""
    return {path: text for path, text in texts.items() if all(word in text for word in words)}


def is_rust(texts: Mapping[Path, str], owner: str, name: str) -> bool:
    """True if a type has this function or field, or a module has this function or module."""
    if owner[0].islower():
        declared = re.compile(rf"\b(?:fn|mod) {name}\b")
        places = (text for path, text in naming(texts, name).items() if owner in {path.stem, *path.parts})
        return any(declared.search(text) for text in places)
    of_type = re.compile(rf"^impl\b[^{{;]*\b{owner}\b|\b(?:struct|trait) {owner}\b", re.MULTILINE)
    declared = re.compile(rf"\bfn {name}\b|^    (?:pub(?:\(\w+\))? )?{name}: ", re.MULTILINE)
    return any(of_type.search(text) and declared.search(text) for text in naming(texts, owner, name).values())


def is_python(texts: Mapping[Path, str], owner: str, name: str) -> bool:
    """True if a class has this method or field."""
    declared = re.compile(rf"\bdef {name}\b|\b(?:self\.)?{name}\b.* = |^    {name}:", re.MULTILINE)
    of_class = re.compile(rf"^class {owner}\b", re.MULTILINE)
    return any(of_class.search(text) and declared.search(text) for text in naming(texts, owner, name).values())


def missing(page: str) -> Iterator[str]:
    """The names in a page that do not exist in the code."""
    for code in dict.fromkeys(_CODE.findall(page)):
        if (match := _RUST.match(code)) and not is_rust(sources(".rs"), *match.groups()):
            yield code
        if (match := _PYTHON.match(code)) and not is_python(sources(".py"), *match.groups()):
            yield code


def test_what_the_walk_names_is_there() -> None:
    assert list(missing(read(PAGE))) == []


@pytest.mark.parametrize(
    ("code", "there"),
    [
        ("`Scheduler::next_plan`", True),
        ("`routes::chat::chat_completions`", True),
        ("`SlotSpec::embeds`", True),
        ("`ModelRunner.launch`", True),
        ("`Scheduler::next_plans`", False),
        ("`Planner::next_plan`", False),
        ("`routes::talk::chat_completions`", False),
        ("`ModelRunner.launches`", False),
    ],
)
def test_a_name_that_nothing_has_is_seen(code: str, there: bool) -> None:
    assert (list(missing(code)) == []) is there
