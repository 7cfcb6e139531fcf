"""Runs the checks of GPU kernels on the PyTorch reference operators.

These pass on a CPU, and each operator is covered.
"""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import patch

import pytest
import torch

from forebay.gpu import reference
from forebay.gpu.interface import Kernels, PagedRows
from tests.gpu.checks.memory import CPU
from tests.gpu.checks.real import Case, cases

CASES = cases()
SMALL = [case for case in CASES if case.small]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_a_twin_holds(case: Case) -> None:
    case.check(reference, CPU, 0)


def test_every_operator_is_checked_at_real_shapes() -> None:
    """Each operator's name occurs in the name of a case."""
    operators = {name for name in reference.__all__ if callable(getattr(reference, name))}
    named = {word for case in CASES for word in case.name.replace(":", " ").split()}
    assert operators <= named
    assert len({case.name for case in CASES}) == len(CASES)


class Changed:
    """The reference operators, with some of them replaced."""

    def __init__(self, **others: Any) -> None:
        self._others = others

    def __getattr__(self, name: str) -> Any:
        return self._others.get(name) or getattr(reference, name)


def changed(**others: Any) -> Kernels:
    return cast(Kernels, Changed(**others))


def cut(x: torch.Tensor) -> torch.Tensor:
    """Keeps the bits that TensorFloat-32 has."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def attend_cut(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *more: Any) -> torch.Tensor:
    # 8-bit floats have fewer bits than TensorFloat-32, so they are not cut.
    return reference.attend(cut(q), keys if keys.dtype == torch.uint8 else cut(keys), values, *more)


def experts_cut(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, *more: Any
) -> torch.Tensor:
    return reference.experts(cut(x), ids, weights, cut(gate_up), cut(down), *more)


# Clamped experts (gpt-oss) have large biases. Their error bounds allow for these, and are too wide to detect fewer
# bits.
PRECISE = [case for case in SMALL if case.name.startswith(("attend ", "experts ")) and "float32" in case.name]


@pytest.mark.parametrize("case", [case for case in PRECISE if "experts gpt-oss" not in case.name], ids=str)
def test_fewer_bits_in_products_of_float32_show(case: Case) -> None:
    with pytest.raises(AssertionError, match="elements are wrong"):
        case.check(changed(attend=attend_cut, experts=experts_cut), CPU, 0)


def attend_rounded(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: PagedRows,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    softmax = torch.Tensor.softmax
    with patch.object(torch.Tensor, "softmax", lambda scores, dim: softmax(scores, dim).bfloat16().float()):
        return reference.attend(q, keys, values, rows, scale, window, cap, sinks)


@pytest.mark.parametrize(
    "case", [case for case in SMALL if case.name.startswith("attend ") and "bfloat16" in case.name], ids=str
)
def test_weights_in_bfloat16_are_allowed(case: Case) -> None:
    """A GPU multiplies values by attention weights in bfloat16.

    The reference operators use float32 for these weights.
    """
    case.check(changed(attend=attend_rounded), CPU, 0)
