"""One process of the example `prepare` of crates/vision for all tests of a module."""

from collections.abc import Iterator

import pytest

from tests.vision.preparing import Preparing


@pytest.fixture(scope="module")
def vision() -> Iterator[Preparing]:
    with Preparing() as preparing:
        yield preparing
