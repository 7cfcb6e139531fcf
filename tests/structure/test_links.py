"""Links in pages lead to existing files and headings."""

import re
from pathlib import Path

import pytest

from tests.structure.repository import ROOT, files, read

LINK = re.compile(r"\]\(([^()\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def pages() -> list[Path]:
    """Every page of the checkout."""
    return [path for path in files() if path.suffix == ".md"]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page. Repeated ones get numbers."""
    found: dict[str, int] = {}
    names = set()
    for heading in HEADING.findall(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        count = found.get(name, 0)
        found[name] = count + 1
        names.add(f"{name}-{count}" if count else name)
    return names


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere. Links to other hosts are not checked."""
    lost = []
    for link in LINK.findall(CODE.sub("", read(page))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page.parent / name) if name else ROOT / page
        there = target.exists()
        if there and anchor and target.suffix == ".md":
            there = anchor in anchors(target.read_text(encoding="utf-8"))
        if not there:
            lost.append(link)
    return lost


@pytest.mark.parametrize("page", pages(), ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_headings_have_the_names_of_github() -> None:
    text = "# The `plan`, by name: one\n\n```sh\n# no heading\n```\n\n## Same\n\n## Same\n"
    assert anchors(text) == {"the-plan-by-name-one", "same", "same-1"}
    assert Path("README.md") in pages()
