"""The binary that the tests run: the one with debug assertions, where cargo leaves it."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def binary() -> Path:
    """Its path. What it starts in Python runs in the tests' own environment."""
    # No interpreter lies beside it.
    os.environ.setdefault("FOREBAY_PYTHON", sys.executable)
    folder = ROOT / os.environ.get("CARGO_TARGET_DIR", "target")
    return Path(os.environ.get("FOREBAY_TEST_BINARY", folder / "fast/forebay"))
