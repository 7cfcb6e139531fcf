"""Every test here needs a GPU, and says why it is skipped where there is none. The most telling tests come first."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from forebay.device import DeviceError
from forebay.device.cuda_open import require_gpu

FOLDER = Path(__file__).parent
ORDER = ("kernels", "steps", "graphs", "stored", "sparse", "memory", "ranks", "server", "sanitizer")
"""The files' names: time on a GPU is short, and a failure of an operator explains those of steps."""


@cache
def reason() -> str | None:
    """Why there is no GPU; None: there is one."""
    try:
        require_gpu()
    except DeviceError as error:
        return str(error)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if item.path.is_relative_to(FOLDER)]
    for item in mine:
        item.add_marker("gpu")
        missing = reason()
        if missing is not None:
            item.add_marker(pytest.mark.skip(reason=missing))
    mine.sort(key=lambda item: ORDER.index(item.path.stem.removeprefix("test_")))
    items[:] = [item for item in items if not item.path.is_relative_to(FOLDER)] + mine
