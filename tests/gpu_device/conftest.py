"""Every test here needs a GPU, and says why it is skipped where there is none."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from forebay.device import DeviceError
from forebay.device.cuda_open import require_gpu

FOLDER = Path(__file__).parent


@cache
def reason() -> str | None:
    """Why there is no GPU; None: there is one."""
    try:
        require_gpu()
    except DeviceError as error:
        return str(error)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker("gpu")
            missing = reason()
            if missing is not None:
                item.add_marker(pytest.mark.skip(reason=missing))
