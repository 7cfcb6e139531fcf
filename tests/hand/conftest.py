"""Fixtures that several tests of the hand use."""

from __future__ import annotations

import pytest

from tests.hand.levels import LEVELS, built, features


@pytest.fixture(params=LEVELS)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test at each instruction level of the processor, not only the fastest. Hands in Rust use that level."""
    level: str = request.param
    if LEVELS[level] not in features():
        pytest.skip(f"the processor has no {LEVELS[level]}")
    if level not in built():
        pytest.skip(f"the program has no kernels of the level {level}")
    monkeypatch.setenv("FOREBAY_KERNELS", level)
    return level
