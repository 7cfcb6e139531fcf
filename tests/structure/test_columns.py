"""The columns of plans and results, and the words of their records, are declared only once.

The declarations are `columns!` and `record!` in crates/protocol. crates/protocol/tests/columns.rs compares the code
that these macros generate.
"""

import re
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from tests.structure.repository import files, inside, read

MADE = Path("python/forebay/protocol")
# Masks have their own frame, and its rows are not those of a plan.
MASKS = Path("crates/protocol/src/masks.rs")
# The code that writes or reads plans and results. Other code may use the same words for something else.
READERS = [*(f"crates/{name}/src" for name in ("protocol", "kvcache", "scheduler", "engine", "hand", "cpuhand"))]
READERS += ["python/forebay"]
GENERATED = {MADE / "columns.py", MADE / "constants.py"}
_BLOCK = re.compile(r"^(columns|record)! \{\n(.*?)^\}\n", re.MULTILINE | re.DOTALL)
_COLUMN = re.compile(r"^ +\d+ (?:pub )?(\w+): ", re.MULTILINE)
_WORD = re.compile(r"^ +(?:pub(?:\(crate\))? )?(\w+): [iuf]32,$", re.MULTILINE)


@cache
def declared() -> tuple[list[str], list[list[str]]]:
    """The names of all columns, and the words of each record."""
    blocks = [
        block
        for path in files()
        if path.suffix == ".rs" and inside(path, ["crates/protocol/src"])
        for block in _BLOCK.findall(read(path))
    ]
    columns = [name for kind, body in blocks if kind == "columns" for name in _COLUMN.findall(body)]
    return columns, [_WORD.findall(body) for kind, body in blocks if kind == "record"]


def second_spellings(code: str) -> list[str]:
    """Code in Rust or Python that repeats a column's type, or lists columns or words in their declared order."""
    columns, records = declared()
    code = _BLOCK.sub("", code)
    name = "|".join(sorted(set(columns)))
    lists = [columns, *(record for record in records if len(record) > 3)]
    following = {pair for names in lists for pair in pairwise(names)}
    found = re.findall(rf"^    (?:pub )?(?:{name}): (?:Vec<[^\n]*,|\w+ = (?:ints|floats)\([^\n]*)$", code, re.MULTILINE)
    found += re.findall(rf"\b(?:{name})\.to_vec\(\)", code)
    for listed in re.findall(r"\[((?:\s*\w+,){2,}\s*\w*\s*)\]|\(((?:\s*\"\w+\",){2,}\s*(?:\"\w+\")?\s*)\)", code):
        words = re.findall(r"\w+", "".join(listed))
        if sum(pair in following for pair in pairwise(words)) > 2:
            found.append(", ".join(words))
    for members in re.findall(r"\(IntEnum\):\n((?:.*\n)*?)(?:\n\n|\Z)", code):
        words = [word.lower() for word in re.findall(r"^    ([A-Z_]+) = \d+$", members, re.MULTILINE)]
        found += [", ".join(words)] * (words in records)
    return found


def test_columns_and_records_are_found() -> None:
    columns, records = declared()
    assert {"slots", "rows", "group", "row_errors", "prompt_values"} <= set(columns)
    assert ["ticket", "direction", "hot", "host"] in records
    assert all(records)


def test_a_column_is_declared_once_in_each_frame() -> None:
    # Only the column of tokens is in both a plan and a result.
    assert {name for name, count in Counter(declared()[0]).items() if count > 1} == {"tokens"}


def test_no_column_is_spelled_twice() -> None:
    found = {
        str(path): spellings
        for path in files()
        if path.suffix in {".rs", ".py"} and inside(path, READERS)
        if path not in {*GENERATED, MASKS} and path.stem != "tests"
        if (spellings := second_spellings(read(path)))
    }
    assert not found


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("    slot_floats: Vec<f32>,", True),
        ("    slots: Int32s = ints(0, 11)", True),
        ("    slots: slots.to_vec(),", True),
        ('COLUMNS = (\n    "slots",\n    "slot_floats",\n    "tokens",\n    "stop_ids",\n)', True),
        ("let [slot, index, page] = words;", False),
        ("let [slot, token_count, prompt_len, top_k] = words;", True),
        ("[image, first_layer, end_layer, grid_h]", True),
        ("class CopyWord(IntEnum):\n    TICKET = 0\n    DIRECTION = 1\n    HOT = 2\n    HOST = 3\n", True),
        ("SlotRecord { slot, token_count, prompt_len, top_k }", False),
        ("columns! {\n    1 slots: Vec<SlotRecord>,\n}\n", False),
        ('inputs.column("slots"); inputs.column("slot_floats")', False),
        ("for column in (self.page_writes, self.host_writes, self.hot_rows):", False),
        ("class Kind(IntEnum):\n    HELLO = 1\n    CONFIG = 2\n", False),
    ],
)
def test_the_scan_sees_second_spellings_only(code: str, found: bool) -> None:
    assert bool(second_spellings(code)) is found
