"""Runs kernels in Triton's interpreter, which must be chosen before Triton is imported. So these tests run alone."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.gpu.support import counted, mutate

__all__ = ["mutate"]

MOST_PROGRAMS = 600
"""The limit of programs in a test. A program takes the interpreter 1 to 10 ms, and all tests together have 90 s."""

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("kernels are interpreted only where TRITON_INTERPRET is 1: make test-triton")


@pytest.fixture(autouse=True)
def _few_programs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        programs = counted(monkeypatch)
        yield
        assert programs.count <= MOST_PROGRAMS


def pytest_configure(config: pytest.Config) -> None:
    # The interpreter also computes elements that a mask excludes.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton")
