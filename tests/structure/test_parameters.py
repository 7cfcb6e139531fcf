"""The bound of a parameter is written once: in the line of a table, or in the constant that the line names."""

import re
from pathlib import Path

import pytest

from tests.structure.repository import files, inside, read

SOURCE = Path("crates/api/src")
ENGINE = ("limits", "parameter")
"""What compares values with bounds, whatever they are."""
BESIDE_TABLES = {
    ("apis/llama/mod.rs", "BIASES"),
    ("apis/ranking.rs", "PAIR_BYTES"),
    ("pooling.rs", "INPUTS"),
    ("preference.rs", "ROUTING_KEY_BYTES"),
    ("sampling.rs", "LOGPROBS"),
    ("sampling.rs", "TOTAL_CHOICES"),
    ("tools.rs", "WORD_BYTES"),
}
"""Files that compare something else with a limit: several parameters together, headers, parts of kept JSON."""
_IMPORT = re.compile(r"^(?:pub(?:\(crate\))? )?use .*?;\n", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"//.*")
_TABLE = re.compile(
    r"^ *(?:pub(?:\(\w+\))? )?const \w+:[^=;]*\b(?:Line<|Param\b|Parameter\b|Bound\b)[^=;]*=.*?;\n",
    re.DOTALL | re.MULTILINE,
)
_LIMIT = re.compile(r"^pub const (\w+):", re.MULTILINE)


def without_tables(text: str) -> str:
    """A file of product code without its tables, imports and comments."""
    code = _COMMENT.sub("", text.split("#[cfg(test)]\nmod tests")[0])
    return _TABLE.sub("", _IMPORT.sub("", code))


def sources() -> list[Path]:
    """The product files of the crate, but for what compares values with bounds."""
    found = [path for path in files() if path.suffix == ".rs" and inside(path, [str(SOURCE)]) and path.stem != "tests"]
    return [path for path in found if path.relative_to(SOURCE).parts[0] not in ENGINE]


def limits() -> list[str]:
    """The names of the limits."""
    return _LIMIT.findall(read(SOURCE / "limits/mod.rs"))


@pytest.mark.parametrize("path", sources(), ids=str)
def test_bounds_stand_in_tables(path: Path) -> None:
    assert "Bound::" not in without_tables(read(path))


def test_limits_are_compared_in_few_other_places() -> None:
    found = {
        (str(path.relative_to(SOURCE)), limit)
        for path in sources()
        for limit in limits()
        if re.search(rf"\b{limit}\b", without_tables(read(path)))
    }
    assert found == BESIDE_TABLES


def test_there_are_tables() -> None:
    assert len(limits()) > 20
    assert sum(len(_TABLE.findall(read(path))) for path in sources()) > 80


TABLE = """\
const LINES: &[Line<Request>] = &[
    own("a", Bound::Flag, "A; b.", |r, v| v.put(&mut r.a)),
];
pub(crate) const A: Bound = Bound::Text(7);
fn check() {}
"""


def test_a_bound_in_a_function_is_seen() -> None:
    assert "Bound::" not in without_tables(TABLE)
    assert "Bound::" in without_tables(TABLE.replace("{}", "{ let a = Bound::Text(7); }"))
    assert "Bound::" in without_tables(TABLE.replace("const A: Bound", "static A: Bound"))
