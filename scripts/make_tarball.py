"""Packs the binary for machines without Python: the program, the licence and the README, in one folder.

usage: make_tarball.py BINARY FOLDER

The binary in the archive has no symbols, like the one in the wheel. `strip` of binutils removes them.
"""

import platform
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Writes FOLDER/forebay-VERSION-linux-PROCESSOR.tar.gz, and prints its name and size."""
    binary, folder = Path(sys.argv[1]), Path(sys.argv[2])
    said = subprocess.run([binary, "--version"], check=True, capture_output=True, text=True).stdout.split()
    name = f"forebay-{said[1]}-linux-{platform.machine()}"
    folder.mkdir(exist_ok=True)
    target = folder / f"{name}.tar.gz"
    with tempfile.TemporaryDirectory() as made, tarfile.open(target, "w:gz") as archive:
        stripped = Path(made, "forebay")
        subprocess.run(["strip", "-o", stripped, binary], check=True)
        archive.add(stripped, f"{name}/forebay")
        for text in ("LICENSE", "README.md"):
            archive.add(ROOT / text, f"{name}/{text}")
    print(f"{target.name}: {target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
