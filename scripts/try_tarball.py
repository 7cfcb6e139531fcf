"""Tries the archive like a machine without Python: unpacks it and serves one request, with no other program on PATH.

usage: try_tarball.py FOLDER_WITH_THE_ARCHIVE MODEL.gguf
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from trial import serve_one_request

MOST_MEGABYTES = 45
"""The largest size of the archive: the download besides the model."""
LIBRARIES = re.compile(r"lib(c|m|gcc_s)\.so\.\d+|ld-linux[\w.-]*\.so\.\d+")
"""The libraries that every Linux with glibc has."""


def check_libraries(binary: Path) -> None:
    """Exits this process if the binary needs a library that a machine may lack."""
    head = subprocess.run(["readelf", "--dynamic", binary], check=True, capture_output=True, text=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", head)
    if not needed or not all(LIBRARIES.fullmatch(name) for name in needed):
        sys.exit(f"error: the binary needs {needed}")


def main() -> None:
    """Runs every stage with the single archive in the folder."""
    (archive,) = Path(sys.argv[1]).glob("forebay-*.tar.gz")
    model = Path(sys.argv[2]).resolve()
    megabytes = archive.stat().st_size / 1e6
    if megabytes > MOST_MEGABYTES:
        sys.exit(f"error: {archive.name} has {megabytes:.1f} MB, and may have {MOST_MEGABYTES}")
    with tempfile.TemporaryDirectory() as made:
        with tarfile.open(archive) as packed:
            packed.extractall(made, filter="data")
        (folder,) = Path(made).iterdir()
        names = {path.name for path in folder.iterdir()}
        if names != {"forebay", "LICENSE", "README.md"}:
            sys.exit(f"error: {archive.name} holds {sorted(names)}")
        binary = folder / "forebay"
        check_libraries(binary)
        # No Python, and no other program: PATH has only a folder that does not exist.
        alone = {"PATH": str(folder / "nothing"), "HOME": made, "LANG": os.environ.get("LANG", "C.UTF-8")}
        serve_one_request([binary, "serve", model], folder, alone)
        command: list[str | Path] = [binary, "serve", model, "--hand", "torch"]
        ended = subprocess.run(command, env=alone, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
        if ended.returncode == 0 or "cannot run python3" not in ended.stderr:
            sys.exit(f"error: status {ended.returncode} without the reason: {ended.stderr}")
        print(ended.stderr.strip())


if __name__ == "__main__":
    main()
