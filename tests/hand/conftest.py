"""Fixtures that several tests of the hand use."""

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
"""Instruction levels with loops in the compiled kernels, and the feature that Linux lists for each."""


@cache
def features() -> set[str]:
    """The processor's features, under the names that Linux gives them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {word for line in lines if line.startswith("flags") for word in line.split()} | {""}


@pytest.fixture(params=LEVELS)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each instruction level of the processor, not only the fastest. Hands in Rust use the level of the test."""
    level: str = request.param
    if LEVELS[level] not in features():
        pytest.skip(f"the processor has no {LEVELS[level]}")
    monkeypatch.setenv("FOREBAY_KERNELS", level)
    return level
