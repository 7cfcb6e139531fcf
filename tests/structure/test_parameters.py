"""The bound of a parameter is written once: in a row of a table, or in the constant that the row names."""

import re
from pathlib import Path

import pytest

from tests.structure.repository import files, inside, read

SOURCE = Path("crates/api/src")
ENGINE = ("limits", "parameter")
"""The modules that compare values with bounds in general."""
SHARED = SOURCE / "parameter/generation.rs"
"""The file with the parameters that several APIs share."""
BESIDE_TABLES = {
    ("apis/llama/mod.rs", "BIAS"),
    ("apis/llama/mod.rs", "BIASES"),
    ("apis/ranking.rs", "PAIR_BYTES"),
    ("pooling.rs", "INPUTS"),
    ("preference.rs", "ROUTING_KEY_BYTES"),
    ("sampling.rs", "LOGPROBS"),
    ("sampling.rs", "TOTAL_CHOICES"),
    ("tools.rs", "WORD_BYTES"),
}
"""Files that compare other values with a limit: several parameters together, headers, or parts of stored JSON."""
_IMPORT = re.compile(r"^(?:pub(?:\(crate\))? )?use .*?;\n", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"//.*")
_TABLE = re.compile(
    r"^ *(?:pub(?:\(\w+\))? )?const \w+:[^=;]*\b(?:Line<|Param\b|Parameter\b|Bound\b)[^=;]*=.*?;\n",
    re.DOTALL | re.MULTILINE,
)
_LIMIT = re.compile(r"^pub const (\w+):", re.MULTILINE)
_COMPARISON = re.compile(r"(?<![<>=:-])[<>]=?\s*-?(\d[\d_.]*)\b(?!\s*>)|(\d[\d_.]*)\s*\.\.=?\s*-?\d")
_STRUCT = re.compile(r"^(?:pub(?:\(\w+\))? )?struct (\w+) \{\n(.*?)^\}", re.DOTALL | re.MULTILINE)
_FIELD = re.compile(r"^    (?:pub(?:\(\w+\))? )?(\w+): (Option<.*>),", re.MULTILINE)
POOLED = {"ClassifyRequest", "EmbeddingRequest", "RerankRequest", "ScoreRequest"}
"""Requests that generate no tokens, and so have only some of the parameters."""


def without_tables(text: str) -> str:
    """The text of a file without tables, imports, comments and tests."""
    code = _COMMENT.sub("", text.split("#[cfg(test)]\nmod tests")[0])
    return _TABLE.sub("", _IMPORT.sub("", code))


def sources() -> list[Path]:
    """The source files of the crate, except the modules that compare values with bounds."""
    found = [path for path in files() if path.suffix == ".rs" and inside(path, [str(SOURCE)]) and path.stem != "tests"]
    return [path for path in found if path == SHARED or path.relative_to(SOURCE).parts[0] not in ENGINE]


def limits() -> list[str]:
    """The names of all limits."""
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


def literal_bounds(code: str) -> list[str]:
    """Comparisons and ranges with a number other than 0 and 1."""
    found = ((match[0], (match[1] or match[2]).rstrip(".")) for match in _COMPARISON.finditer(code))
    return [text for text, number in found if float(number) not in (0, 1)]


def test_no_bound_is_a_number_in_code() -> None:
    found = {str(path): bounds for path in sources() if (bounds := literal_bounds(without_tables(read(path))))}
    assert not found


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("if temperature > 2.0 {", True),
        ("(-100.0..=100.0).contains(&bias)", True),
        ("if count <= 4_096 {", True),
        ("if start < -1 || count > 0 {", False),
        ("let z = z ^ (z >> 30) << 16;", False),
        ("values.as_chunks::<16>() -> [u8; 4]", False),
        ("(-BIAS..=BIAS).contains(&bias)", False),
    ],
)
def test_a_literal_bound_is_seen(code: str, found: bool) -> None:
    assert bool(literal_bounds(code)) is found


def fields(code: str) -> dict[str, set[tuple[str, str]]]:
    """The optional fields of each struct, with their types."""
    return {name: set(_FIELD.findall(body)) for name, body in _STRUCT.findall(code)}


def test_a_parameter_of_several_apis_is_a_field_of_one_type() -> None:
    shared = fields(read(SHARED))["GenerationParameters"]
    assert len(shared) > 20
    requests = [path for path in sources() if inside(path, [str(SOURCE / "apis")])]
    found = {name for path in requests for name, own in fields(read(path)).items() if own & shared}
    assert {name for name in found if not name.startswith("Valid")} == POOLED
    assert fields("struct A {\n    top_k: Option<i32>,\n}\n")["A"] & shared


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
