"""Waits with a deadline until a condition is true."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.02


def eventually(check: Callable[[], T], what: str, seconds: float = 30) -> T:
    """The first true value of `check`; fails if there is none within `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := check()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(POLL_SECONDS)
    return value


async def eventually_async(check: Callable[[], T], what: str, seconds: float = 60) -> T:
    """Like `eventually`, but lets other tasks run."""
    deadline = time.monotonic() + seconds
    while not (value := check()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        await asyncio.sleep(POLL_SECONDS)
    return value
