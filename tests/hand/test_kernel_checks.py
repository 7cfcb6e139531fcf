"""The checks of a GPU's kernels, with the operators' twins on a CPU: they hold, and they cover every operator."""

from __future__ import annotations

import pytest

from forebay.gpu import reference
from tests.gpu.checks.memory import CPU
from tests.gpu.checks.real import Case, cases

CASES = cases()
SMALL = [case for case in CASES if case.small]


@pytest.mark.parametrize("case", SMALL, ids=[case.name for case in SMALL])
def test_a_twin_holds(case: Case) -> None:
    case.check(reference, CPU, 0)


def test_every_operator_is_checked_at_real_shapes() -> None:
    """By the names of the cases, each of which calls what it is named after."""
    operators = {name for name in reference.__all__ if callable(getattr(reference, name))}
    named = {word for case in CASES for word in case.name.replace(":", " ").split()}
    assert operators <= named
    assert len({case.name for case in CASES}) == len(CASES)
