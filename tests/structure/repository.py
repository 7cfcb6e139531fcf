"""The files that the structure tests read."""

import re
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Strings and comments of Rust, so that a scan sees only code. A lifetime is not a character literal.
_RUST_NOISE = re.compile(
    r"""
    /\*.*?\*/ | //[^\n]*
    | b?r(?P<hashes>\#*)".*?"(?P=hashes)
    | b?"(?:\\.|[^"\\])*"
    | b?'(?:\\[^']+|[^'\\])'
    """,
    re.VERBOSE | re.DOTALL,
)


@cache
def files() -> tuple[Path, ...]:
    """Every file of the checkout that git tracks or would track, relative to its root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = sorted(set(listed.split("\0")) - {""})
    return tuple(Path(name) for name in names if (ROOT / name).is_file())


@cache
def read(path: Path) -> str:
    """The text of a file of the checkout. Empty if the file is not text."""
    try:
        return (ROOT / path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def inside(path: Path, folders: list[str]) -> bool:
    """Whether `path` is one of `folders` or below one."""
    return any(path.is_relative_to(folder) for folder in folders)


def rust_code(text: str) -> str:
    """`text` without comments and without the contents of string and character literals."""
    return _RUST_NOISE.sub(lambda match: "\n" * match[0].count("\n") + " ", text)
