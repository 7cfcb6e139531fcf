"""docs/decisions.md has a line for each decision, with its number, its status and a link to its reasons."""

import re
from pathlib import Path

import pytest

from tests.structure.repository import ROOT, files, read
from tests.structure.test_links import anchors

PAGE = Path("docs/decisions.md")
DESIGN = Path("docs/design")
ROW = re.compile(r"^\| \[(\d{4})\]\(([^)\s]+)\) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
STATUS = re.compile(r"(?:kept|partly|replaced)\b")
MENTION = re.compile(r"\bADRs? (\d{1,4})\b(?!-)")
CODE = {".rs", ".py", ".toml", ".md", ".ts", ".tsx", ".js", ".mk", ".sh", ".yaml", ".yml"}


def rows() -> list[tuple[str, str, str, str]]:
    """The number, target, decision and status of each line."""
    return ROW.findall(read(PAGE))


def names(folder: Path) -> list[str]:
    """The file names of a folder's pages."""
    return sorted(path.name for path in files() if path.parent == folder and path.suffix == ".md")


def reasons(target: str) -> bool:
    """True if `target` is an existing section of a page of docs/design."""
    page, _, anchor = target.partition("#")
    path = PAGE.parent / page
    if path.name not in names(path.parent):
        return False
    return path.parent == DESIGN and anchor in anchors((ROOT / path).read_text(encoding="utf-8"))


def test_every_number_has_one_line() -> None:
    numbers = [number for number, *_ in rows()]
    assert numbers
    assert sorted(numbers) == sorted(set(numbers))
    unused = next(line for line in read(PAGE).splitlines() if "never used" in line)
    never = re.findall(r"\d{4}", unused)
    assert sorted([*numbers, *never]) == [f"{number:04}" for number in range(1, int(max(numbers)) + 1)]


def test_every_line_leads_to_reasons_and_has_a_status() -> None:
    assert [number for number, target, _, _ in rows() if not reasons(target)] == []
    assert [number for number, _, _, status in rows() if not STATUS.match(status)] == []


def test_every_page_of_the_design_has_a_line() -> None:
    targets = [target.partition("#")[0] for _, target, _, _ in rows()]
    assert {f"design/{name}" for name in names(DESIGN)} <= set(targets)


def test_a_part_that_was_replaced_names_its_successor() -> None:
    for number, _, _, status in rows():
        if not status.startswith("kept"):
            assert "](" in status, number


def test_numbers_in_code_and_documents_have_a_line() -> None:
    known = {int(number) for number, *_ in rows()}
    lost = [
        f"{path}: ADR {number}"
        for path in files()
        if path.suffix in CODE and (ROOT / path).is_file()
        for number in MENTION.findall(read(path))
        if int(number) not in known
    ]
    assert lost == []


@pytest.mark.parametrize(
    "target", ["design/seam.md", "design/seam.md#nothing", "adr/0069.md", "memory.md#tiers", "no.md"]
)
def test_a_target_without_reasons_is_found(target: str) -> None:
    assert not reasons(target)
