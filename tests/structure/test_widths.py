"""Lines of comments are as narrow as lines of code, which ruff and rustfmt check."""

from pathlib import Path

from tests.structure.repository import files, read

RUST = 100


def too_wide(text: str, limit: int = RUST) -> list[int]:
    """The numbers of Rust comment lines that are too wide. Tables, addresses and code blocks may be wider."""
    found, in_code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        comment = line.strip()
        if not comment.startswith("//"):
            in_code = False
            continue
        words = comment.lstrip("/! ")
        if words.startswith("```"):
            in_code = not in_code
        elif len(line) > limit and not in_code and not words.startswith("|") and "://" not in words:
            found.append(number)
    return found


def test_comments_are_not_wider_than_code() -> None:
    found = {path: lines for path in files() if path.suffix == ".rs" if (lines := too_wide(read(path)))}
    assert not found


def test_a_wide_comment_is_seen() -> None:
    wide = "word " * 30
    code = f"    /// ```text\n    /// {wide}\n    /// ```\n"
    assert too_wide(f"// {wide}\nfn main() {{}} \n    //! {wide}\n") == [1, 3]
    assert too_wide(f"{code}/// {wide}\n") == [4]
    assert too_wide(f'/// | {wide} |\n/// https://example.com/{"x" * 100}\nlet x = "{wide}";\n') == []
    assert Path("crates/hand/src/lib.rs") in set(files())
