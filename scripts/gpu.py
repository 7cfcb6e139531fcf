"""Tests and measures the hand on an NVIDIA GPU, on a host without a network and without this project's environment.

usage: gpu.py test [PYTEST ARGUMENTS]   the tests of tests/gpu_device
       gpu.py bench [ARGUMENTS]         benchmarks/gpu
       gpu.py peers [ARGUMENTS]         benchmarks/gpu/peers.py
       gpu.py visit first|second        the parts of both that matter most, each with its limit (5 and 6 minutes)
       gpu.py pack [--binary FILE]      makes .gpu: packages that such a host lacks, and the server's binary

Where there is no GPU, the first four say why, and end with status 0. They run with the interpreter
that runs this file, which needs PyTorch, and pytest for `test`.
"""

from __future__ import annotations

import argparse
import io
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACK = ROOT / ".gpu"
SITE, BINARY, COMMIT = PACK / "site.tar.xz", PACK / "forebay.xz", PACK / "commit"
DESCRIBE = PACK / "describe.xz"
"""The example of `crates/weights` that reads the shapes of models (`benchmarks/described.py`)."""
MOST_BYTES = 20 << 20
"""Of the package: what can be copied at once, with the sources beside it."""
PRESET = 9 | lzma.PRESET_EXTREME
"""Of packed programs: a minute or a few, for 4 % less than the default."""
PACKAGES = ("gguf", "transformers")
"""What PyTorch's own environments lack, or have in versions that lack models of the tests. Both are pure Python."""


def main() -> int:
    """Runs a command; gives the exit status."""
    command, *arguments = sys.argv[1:] or [""]
    commands = {"test": test, "bench": bench, "peers": peers, "visit": visit, "pack": pack}
    if command not in commands:
        print(__doc__)
        return 2
    return commands[command](arguments)


def test(arguments: list[str]) -> int:
    """The tests; those that the GPU's absence skips are no failure."""
    with tempfile.TemporaryDirectory(prefix="forebay-gpu-") as folder:
        pytest = [sys.executable, "-m", "pytest", "-v", "--maxfail=60", "--durations=15", "-p", "no:cacheprovider"]
        # A worker that a failure of the GPU ends is replaced, and the other tests go on.
        pytest += ["-n", "1"] if find_spec("xdist") else []
        command = [*pytest, *([] if any("tests/" in word for word in arguments) else ["tests/gpu_device"]), *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment(Path(folder)), check=False).returncode


def bench(arguments: list[str]) -> int:
    """The measurements."""
    return module("benchmarks.gpu", arguments)


def peers(arguments: list[str]) -> int:
    """Others on the same GPU."""
    return module("benchmarks.gpu.peers", arguments)


def visit(arguments: list[str]) -> int:
    """A short visit, in parts."""
    return module("benchmarks.gpu.visit", arguments)


def module(name: str, arguments: list[str]) -> int:
    """Runs a module with the sources and what was packed."""
    with tempfile.TemporaryDirectory(prefix="forebay-gpu-") as folder:
        command = [sys.executable, "-m", name, *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment(Path(folder)), check=False).returncode


def environment(folder: Path) -> dict[str, str]:
    """Variables with which the sources and what was packed are found; unpacks that into `folder`."""
    paths = [str(ROOT / "python"), str(ROOT)]
    variables = dict(os.environ)
    if COMMIT.is_file() and "FOREBAY_COMMIT" not in variables:
        variables["FOREBAY_COMMIT"] = COMMIT.read_text().strip()
    if SITE.is_file():
        with tarfile.open(SITE) as archive:
            archive.extractall(folder / "site", filter="data")
        paths.append(str(folder / "site"))
    if BINARY.is_file() and "FOREBAY_TEST_BINARY" not in variables:
        unpack_binary(BINARY, folder / "forebay")
        if DESCRIBE.is_file():
            unpack_binary(DESCRIBE, folder / "examples/describe")
        variables["FOREBAY_TEST_BINARY"] = str(folder / "forebay")
    return {**variables, "PYTHONPATH": os.pathsep.join(paths)}


def pack(arguments: list[str]) -> int:
    """Makes the package and prints its size; 1 if it is too large."""
    parser = argparse.ArgumentParser(prog="gpu.py pack")
    parser.add_argument("--binary", type=Path, help="the server; without it the test of a server is skipped")
    options = parser.parse_args(arguments)
    shutil.rmtree(PACK, ignore_errors=True)
    PACK.mkdir()
    pack_site()
    pack_commit()
    if options.binary is not None and options.binary.is_file():
        pack_binary(options.binary, BINARY)
        describe = options.binary.with_name("examples") / "describe"
        if describe.is_file():
            pack_binary(describe, DESCRIBE)
        else:
            print(f"no {describe}, which tests and measurements need: `make build-tests` or `make bench-build` first")
    else:
        print("no binary: `make build` first, if the server is to be tested there too")
    sizes = {file.name: file.stat().st_size for file in sorted(PACK.iterdir())}
    total = sum(sizes.values())
    for name, size in {**sizes, "in all": total}.items():
        print(f"{size / 2**20:8.1f} MiB  {name}")
    if total > MOST_BYTES:
        print(f"error: more than {MOST_BYTES >> 20} MiB", file=sys.stderr)
        return 1
    return 0


def pack_site() -> None:
    """Packages at the lock's versions, with its hashes."""
    with tempfile.TemporaryDirectory(prefix="forebay-gpu-") as folder:
        pins, site = Path(folder, "pins.txt"), Path(folder, "site")
        pins.write_text("\n".join(locked((ROOT / "requirements/dev.txt").read_text())))
        uv = str(Path(sys.executable).parent / "uv")
        install = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--target", str(site), "--no-deps"]
        subprocess.run([*install, "--only-binary", ":all:", "--require-hashes", "-r", str(pins)], check=True)
        native = [path.name for path in site.rglob("*.so")]
        if native:
            sys.exit(f"error: compiled for this interpreter only: {', '.join(native)}")
        shutil.rmtree(site / "bin", ignore_errors=True)
        with tarfile.open(SITE, "w:xz", preset=9) as archive:
            for path in sorted(site.iterdir()):
                archive.add(path, path.name, filter=lambda info: None if "__pycache__" in info.name else info)


def locked(lock: str) -> list[str]:
    """The lines of a lock that pin `PACKAGES`."""
    entries = re.findall(r"^\S.*(?:\n[ ].*)*", lock, flags=re.MULTILINE)
    return [entry for entry in entries if re.split(r"[=\[ ]", entry)[0] in PACKAGES]


def pack_commit() -> None:
    """The commit that is packed, for results on a host that gets no repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True).stdout.strip()
    COMMIT.write_text(f"{found or 'unknown'}\n")


def unpack_binary(packed: Path, binary: Path) -> None:
    """A packed program, to be run."""
    binary.parent.mkdir(exist_ok=True)
    with lzma.open(packed) as source, binary.open("wb") as file:
        shutil.copyfileobj(source, file)
    binary.chmod(0o755)


def pack_binary(binary: Path, to: Path) -> None:
    """A program without its symbols."""
    with tempfile.TemporaryDirectory(prefix="forebay-gpu-") as folder:
        small = Path(folder, "forebay")
        if shutil.which("strip"):
            subprocess.run(["strip", "-o", str(small), str(binary)], check=True)
        else:
            shutil.copyfile(binary, small)
        with lzma.open(to, "wb", preset=PRESET) as packed:
            shutil.copyfileobj(io.BytesIO(small.read_bytes()), packed)


if __name__ == "__main__":
    sys.exit(main())
