"""Kernels in Triton's interpreter. It has to be chosen before Triton is imported, so these tests have their own run."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.gpu.support import counted, mutate

__all__ = ["mutate"]

MOST_PROGRAMS = 600
"""A program takes the interpreter 1 to 10 ms: more of them say little more, and all tests have 90 s."""

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("kernels are interpreted only where TRITON_INTERPRET is 1: make test-triton")


@pytest.fixture(autouse=True)
def _few_programs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        programs = counted(monkeypatch)
        yield
        assert programs.count <= MOST_PROGRAMS


def pytest_configure(config: pytest.Config) -> None:
    # The interpreter computes what a mask leaves out too.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton")
