"""What several tests of the hand need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay.kernels import library as binding
from forebay.kernels.library import level


@pytest.fixture(params=binding.LEVELS)
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every level that the processor has, the fastest or not."""
    assert binding.library().fb_limit(request.param.encode())
    try:
        if level() != request.param:
            pytest.skip(f"the processor has {level()} only")
        yield request.param
    finally:
        binding.library().fb_limit(None)
