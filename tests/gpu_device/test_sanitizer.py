"""compute-sanitizer finds no wrong address in steps of tiny hands, and no race in shared memory."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.gpu_device import sanitized, sanitizer

MODULE = ["tests.gpu_device.sanitized", "--device", "cuda"]
SECONDS = 40
"""The time for both tests. A run may take three times as long, because the first run compiles every kernel."""
RACES = ("rotate_kernel", "draw_kernel", "resolve_kernel")
"""Kernels that read memory to which other threads have written."""


@pytest.fixture(scope="module")
def began() -> float:
    return time.monotonic()


@pytest.fixture
def tool() -> Path:
    found = sanitizer.find()
    if found is None:
        pytest.skip(f"{sanitizer.NAME} is neither on PATH nor in CUDA's folders")
    return found


def test_no_address_is_wrong(tool: Path, began: float) -> None:
    try:
        sanitizer.check(tool, "memcheck", MODULE, sanitized.LAST_WORDS, 3 * SECONDS)
    except sanitizer.UnusableError as error:
        pytest.skip(f"{tool} can't look at programs here: {error}")


def test_no_thread_overtakes_another_in_shared_memory(tool: Path, began: float) -> None:
    left = SECONDS - (time.monotonic() - began)
    if left < 0:
        pytest.skip(f"memcheck has taken the {SECONDS} seconds that there are")
    try:
        sanitizer.check(tool, "racecheck", MODULE, sanitized.LAST_WORDS, left, RACES)
    except sanitizer.UnusableError as error:
        pytest.skip(f"{tool} can't look at programs here: {error}")
    except subprocess.TimeoutExpired:
        pytest.skip(f"racecheck is not done in the {left:.0f} seconds that are left")
