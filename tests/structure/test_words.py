"""Sentences in doc comments and pages are short."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.structure.repository import ROOT, files, inside, read

LONGEST = 30
"""The most words of a sentence. The rule is 25, and the rest allows for a list of names."""
NO_PAGES = ("CHANGELOG.md", "cli.md")
"""The list of changes consists of names, and the commands print the other page."""
_DOC_LINE = re.compile(r"\s*(///|//!)(?!/) ?(.*)")
_ITEM = re.compile(r"- |\* |\d+\. ")
_REMARK = re.compile(r"<!--.*?-->", re.DOTALL)
_END = re.compile(r"(?<=[.!?])\s+|(?<=[.!?]\))\s+")

Place = tuple[int, list[str]]
"""A doc comment: the number of its first line, and its lines."""


def rust_docs(text: str) -> Iterator[Place]:
    """The doc comments of a Rust file, including private ones. Neighbouring lines of one kind are one comment."""
    kind, first, found = "", 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        match = _DOC_LINE.match(line)
        if match and match[1] == kind:
            found.append(match[2].strip())
            continue
        if found:
            yield first, found
        kind, first, found = (match[1], number, [match[2].strip()]) if match else ("", 0, [])


def python_docs(text: str) -> Iterator[Place]:
    """The docstrings of a Python file: of modules, classes, functions and attributes."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for before, statement in zip([None, *node.body], node.body, strict=False):
            if before is not None and not isinstance(before, ast.Assign | ast.AnnAssign):
                continue
            if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
                continue
            if isinstance(value := statement.value.value, str):
                yield statement.lineno, [line.strip() for line in value.splitlines()]


def paragraphs(lines: list[str]) -> list[str]:
    """The prose of a comment without code, tables and headings. Each item of a list is a paragraph."""
    found, code = [""], False
    for line in lines:
        if line.startswith("```"):
            code = not code
        if code or not line or line.startswith(("```", "|", "#")):
            found.append("")
        elif _ITEM.match(line):
            found.append(_ITEM.sub("", line, count=1))
        else:
            found[-1] = f"{found[-1]} {line}".strip()
    return [paragraph for paragraph in found if paragraph]


def long_sentences(lines: list[str]) -> list[str]:
    """The sentences of more than LONGEST words, each with its number of words."""
    return [
        f"{words} words: {sentence[:100]}"
        for paragraph in paragraphs(lines)
        for sentence in _END.split(paragraph)
        if (words := len(sentence.split())) > LONGEST
    ]


def prose(text: str) -> list[str]:
    """The lines of a page, without comments for programs and without indented code."""
    found = [""]
    for line in _REMARK.sub("\n", text).splitlines():
        indented = line.startswith("    ") and not found[-1]
        found.append("" if indented else line.strip())
    return found


def pages() -> list[Path]:
    """The pages of the root and of docs, except records, history and generated text."""
    folders = (Path(), Path("docs"), Path("docs/design"), Path("docs/performance"))
    return [path for path in files() if path.suffix == ".md" and path.parent in folders and path.name not in NO_PAGES]


def documents(path: Path) -> Iterator[Place]:
    """The doc comments of a file, or none if the rule does not apply to the file."""
    if path.suffix == ".rs" and path.parts[0] == "crates" and path.parts[2] == "src":
        yield from rust_docs(read(path))
    elif path.suffix == ".py" and inside(path, ["python/forebay", "benchmarks"]):
        yield from python_docs(read(path))


def folders() -> list[str]:
    """The crates, and the folders of Python code."""
    crates = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "crates").iterdir() if (path / "src").is_dir())
    return [*crates, "python/forebay", "benchmarks"]


@pytest.mark.parametrize("folder", folders())
def test_comments_read_once(folder: str) -> None:
    found = [
        f"{path}:{number}: {fault}"
        for path in files()
        if inside(path, [folder])
        for number, lines in documents(path)
        for fault in long_sentences(lines)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", pages(), ids=str)
def test_pages_read_once(page: Path) -> None:
    assert long_sentences(prose(read(page))) == []


LONG = " ".join(["word"] * (LONGEST + 1))
RUST = f"""\
//! {LONG}

/// A thing.
pub struct Thing {{
    /// {LONG}
    size: u32,
}}
"""
PYTHON = f'''\
"""{LONG}"""

SIZE = 1
"""{LONG}"""


def size() -> int:
    """The size.

    {LONG}
    """
    "{LONG}"
    return SIZE
'''


def test_every_kind_of_comment_is_seen() -> None:
    assert len([fault for _, lines in rust_docs(RUST) for fault in long_sentences(lines)]) == 2
    assert len([fault for _, lines in python_docs(PYTHON) for fault in long_sentences(lines)]) == 3


def test_words_are_counted_by_sentence() -> None:
    def words(count: int) -> str:
        return " ".join(["word"] * count)

    assert long_sentences([f"{words(LONGEST)}. {words(LONGEST)}"]) == []
    assert long_sentences([words(LONGEST), words(1)]) != []
    assert long_sentences(["- " + words(LONGEST), "- " + words(LONGEST)]) == []
    assert long_sentences(["```", words(2 * LONGEST), "```", "| " + words(2 * LONGEST)]) == []


def test_prose_of_a_page_is_seen_and_its_code_is_not() -> None:
    long = " ".join(["word"] * (LONGEST + 1))
    assert len(long_sentences(prose(f"# Page\n\n{long}\n\n- {long}\n  {long}\n"))) == 2
    assert long_sentences(prose(f"    {long}\n    {long}\n\n<!-- {long}\n{long} -->\n\n| {long} |\n")) == []
    assert Path("README.md") in pages()
    assert Path("docs/performance/cpu.md") in pages()
    assert Path("docs/design/seam.md") in pages()
