"""What several tests of the hand need."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

LEVELS = {
    "amx": "amx_tile",
    "avx512bf16": "avx512_bf16",
    "avx512vnni": "avx512_vnni",
    "avx512": "avx512dq",
    "avxvnni": "avx_vnni",
    "avx2": "avx2",
    "baseline": "",
}
"""Levels of instructions that the compiled kernels have loops for, and what Linux calls the processor's feature."""


@cache
def features() -> set[str]:
    """The processor's, as Linux calls them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {word for line in lines if line.startswith("flags") for word in line.split()} | {""}


@pytest.fixture(params=LEVELS)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every level that the processor has, the fastest or not. Hands in Rust that are started compute with it."""
    level: str = request.param
    if LEVELS[level] not in features():
        pytest.skip(f"the processor has no {LEVELS[level]}")
    monkeypatch.setenv("FOREBAY_KERNELS", level)
    return level
