"""Compiles kernels for GPUs that the machine lacks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import triton

from tests.gpu.compiled.compiling import Compiler

if os.environ.get("TRITON_INTERPRET") == "1":
    raise pytest.UsageError("kernels are compiled only where TRITON_INTERPRET is not 1: make test-triton")


def pytest_report_header() -> str:
    return f"triton: {triton.__version__}"


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiler]:
    """Compiles the kernels that operators launch, each variant once in a run."""
    with Compiler.begin(tmp_path_factory.mktemp("triton")) as begun:
        yield begun
