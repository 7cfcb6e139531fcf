"""Tests that need a GPU. Without one each is skipped with the reason. Files that find the most mistakes run first."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from functools import cache
from pathlib import Path

import pytest

from benchmarks.gpu.failures import lost
from forebay.device import DeviceError
from forebay.device.cuda_open import require_gpu

FOLDER = Path(__file__).parent
ORDER = ("kernels", "steps", "graphs", "states", "stored", "sparse", "memory", "ranks", "server", "sanitizer")
"""The files in their order. Time on a GPU is short, and a failing operator explains failing steps."""


@cache
def reason() -> str | None:
    """Why no GPU can be used, or None if one can."""
    try:
        require_gpu()
    except DeviceError as error:
        return str(error)
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Ends a process whose GPU has failed, because all later tests in it would fail. xdist starts a new process."""
    report = yield
    if call.excinfo is not None and lost(str(call.excinfo.value)):
        if "PYTEST_XDIST_WORKER" in os.environ:
            print(report.longreprtext, file=sys.__stderr__, flush=True)
            os._exit(70)
        pytest.exit(f"the GPU has failed in {report.nodeid}: {call.excinfo.value}", returncode=1)
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if item.path.is_relative_to(FOLDER)]
    for item in mine:
        item.add_marker("gpu")
        missing = reason()
        if missing is not None:
            item.add_marker(pytest.mark.skip(reason=missing))
    mine.sort(key=lambda item: ORDER.index(item.path.stem.removeprefix("test_")))
    items[:] = [item for item in items if not item.path.is_relative_to(FOLDER)] + mine
