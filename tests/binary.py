"""The programs that the tests run: those with debug assertions, where cargo leaves them."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def binary() -> Path:
    """The path of `forebay`. Its Python processes use the interpreter of the tests."""
    # There is no interpreter beside the binary.
    os.environ.setdefault("FOREBAY_PYTHON", sys.executable)
    folder = ROOT / os.environ.get("CARGO_TARGET_DIR", "target")
    return Path(os.environ.get("FOREBAY_TEST_BINARY", folder / "fast/forebay"))


def example(name: str) -> Path:
    """The path of an example of a crate, which cargo leaves beside the binary."""
    return binary().with_name("examples") / name
