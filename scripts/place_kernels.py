"""Puts the built CPU kernels beside the Python code that loads them. The argument is cargo's output folder."""

import os
import shutil
import sys
from pathlib import Path

NAME = "libforebay_kernels.dylib" if sys.platform == "darwin" else "libforebay_kernels.so"


def main() -> None:
    """Copies when the built file is newer; a running hand keeps the file that it has mapped."""
    built = Path(sys.argv[1], NAME)
    target = Path(__file__).resolve().parents[1] / "python" / "forebay" / "kernels" / NAME
    if target.exists() and target.stat().st_mtime_ns == built.stat().st_mtime_ns:
        return
    fresh = target.with_suffix(".new")
    shutil.copy2(built, fresh)
    os.replace(fresh, target)


if __name__ == "__main__":
    main()
