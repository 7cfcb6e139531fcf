"""Tests and measures the hand on an NVIDIA GPU, on a host without a network and without this project's environment.

usage: gpu.py test [PYTEST ARGUMENTS]   runs the tests of tests/gpu_device
       gpu.py bench [ARGUMENTS]         runs benchmarks/gpu
       gpu.py peers [ARGUMENTS]         runs benchmarks/gpu/peers.py
       gpu.py visit first|second        runs the most important parts of both, each with a limit (5 and 6 minutes)
       gpu.py pack [--binary FILE]      makes .gpu: the packages that such a host lacks, and the server's binary

Without a GPU, the first four print the reason and exit with status 0. They use the interpreter that runs this file,
which needs PyTorch, and for `test` also pytest.
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
"""The example program of `crates/weights` that reads the shapes of models (`benchmarks/described.py`)."""
MOST_BYTES = 20 << 20
"""The largest size of the package: what can be copied at once, together with the sources."""
PRESET = 9 | lzma.PRESET_EXTREME
"""The compression preset of packed programs: takes a minute or more, and saves 4 % compared with the default."""
PACKAGES = ("gguf", "transformers")
"""Packages that PyTorch's environments lack, or have in versions too old for the tests. Both are pure Python."""


def main() -> int:
    """Runs a command. Returns the exit status."""
    command, *arguments = sys.argv[1:] or [""]
    commands = {"test": test, "bench": bench, "peers": peers, "visit": visit, "pack": pack}
    if command not in commands:
        print(__doc__)
        return 2
    return commands[command](arguments)


def test(arguments: list[str]) -> int:
    """Runs the tests. Tests that are skipped because there is no GPU are no failure."""
    with tempfile.TemporaryDirectory(prefix="forebay-gpu-") as folder:
        pytest = [sys.executable, "-m", "pytest", "-v", "--maxfail=60", "--durations=15", "-p", "no:cacheprovider"]
        # If a GPU failure kills a worker of xdist, it is replaced, and the other tests continue.
        pytest += ["-n", "1"] if find_spec("xdist") else []
        command = [*pytest, *([] if any("tests/" in word for word in arguments) else ["tests/gpu_device"]), *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment(Path(folder)), check=False).returncode


def bench(arguments: list[str]) -> int:
    """Runs the measurements."""
    return module("benchmarks.gpu", arguments)


def peers(arguments: list[str]) -> int:
    """Measures other servers on the same GPU."""
    return module("benchmarks.gpu.peers", arguments)


def visit(arguments: list[str]) -> int:
    """Runs the parts of a short visit."""
    return module("benchmarks.gpu.visit", arguments)


def module(name: str, arguments: list[str]) -> int:
    """Runs a module with the sources and the packed packages."""
    with tempfile.TemporaryDirectory(prefix="forebay-gpu-") as folder:
        command = [sys.executable, "-m", name, *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment(Path(folder)), check=False).returncode


def environment(folder: Path) -> dict[str, str]:
    """Returns variables for the sources and the packed packages, which are unpacked into `folder`."""
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
    """Makes the package and prints its size. Returns 1 if it is too large."""
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
    """Packs `PACKAGES` at the lock file's versions, with its hashes."""
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
    """Returns the lines of a lock file that pin `PACKAGES`."""
    entries = re.findall(r"^\S.*(?:\n[ ].*)*", lock, flags=re.MULTILINE)
    return [entry for entry in entries if re.split(r"[=\[ ]", entry)[0] in PACKAGES]


def pack_commit() -> None:
    """Records the packed commit, for results from a host without the repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True).stdout.strip()
    COMMIT.write_text(f"{found or 'unknown'}\n")


def unpack_binary(packed: Path, binary: Path) -> None:
    """Unpacks an executable program."""
    binary.parent.mkdir(exist_ok=True)
    with lzma.open(packed) as source, binary.open("wb") as file:
        shutil.copyfileobj(source, file)
    binary.chmod(0o755)


def pack_binary(binary: Path, to: Path) -> None:
    """Packs a program without its symbols."""
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
