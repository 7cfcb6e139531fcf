"""docs/decisions.md has one line, with a status, for each record of docs/adr."""

import re
from pathlib import Path

from tests.structure.repository import files, read

PAGE = Path("docs/decisions.md")
RECORDS = Path("docs/adr")
ROW = re.compile(r"^\| \[(\d{4})\]\(adr/([\w-]+\.md)\) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
STATUS = re.compile(r"(?:kept|partly|replaced)\b")


def records() -> list[str]:
    """The file names of all records."""
    return sorted(path.name for path in files() if path.parent == RECORDS and path.suffix == ".md")


def test_every_record_has_one_line() -> None:
    assert records()
    assert sorted(name for _, name, _, _ in ROW.findall(read(PAGE))) == records()


def test_lines_have_the_number_of_their_record_and_a_status() -> None:
    rows = ROW.findall(read(PAGE))
    assert [name for number, name, _, _ in rows if not name.startswith(f"{number}-")] == []
    assert [name for _, name, _, status in rows if not STATUS.match(status)] == []


def test_a_part_that_was_replaced_names_its_successor() -> None:
    for _, name, _, status in ROW.findall(read(PAGE)):
        if not status.startswith("kept"):
            assert "](" in status, name


def test_unused_numbers_are_named() -> None:
    numbers = {int(name[:4]) for name in records()}
    unused = set(range(1, max(numbers) + 1)) - numbers
    line = next(line for line in read(PAGE).splitlines() if "never used" in line)
    assert {int(number) for number in re.findall(r"\d{4}", line)} == unused
