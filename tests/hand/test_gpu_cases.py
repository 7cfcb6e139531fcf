"""The cases of a GPU's operators, small, with the twins in the place of kernels: they pass, and what is wrong shows."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from forebay.gpu import reference
from forebay.gpu.interface import Kernels
from forebay.gpu.products import GpuProducts
from tests.gpu import cases
from tests.gpu.shapes import IN_8_BITS, MODELS, QWEN3_0_6B

SMOLLM2 = next(model for model in MODELS if model.name.startswith("SmolLM2"))
MAKE: dict[str, cases.Made] = {
    **{
        f"{make.__name__} of {model.name}": lambda place, make=make, model=model: make(place, model)  # type: ignore[misc]
        for make in cases.OF_MODELS
        for model in (QWEN3_0_6B, SMOLLM2)
    },
    **{
        f"{make.__name__} of 8-bit pages": lambda place, make=make: make(place, IN_8_BITS)  # type: ignore[misc]
        for make in (cases.attention, cases.layers)
    },
    **{make.__name__: make for make in cases.OF_FAMILIES},
}
CASES = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


def small(dtype: torch.dtype) -> cases.Place:
    return cases.Place(torch.device("cpu"), dtype, 1 / 64)


@CASES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_the_twins_pass(make: cases.Made, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for case in make(small(dtype)):
        cases.compare(case, reference, reference, dtype)


@pytest.mark.parametrize("kind", ["rows", "blocks", "4 bits"])
def test_only_a_scale_a_row_goes_to_pytorchs_product(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block may be as wide as its matrix, and is of many rows still."""
    place = small(torch.bfloat16)
    made, x, called = cases.matrix(place, 256, 128, kind), place.random(5, 128), []
    monkeypatch.setattr(torch, "_scaled_mm", lambda *_, **__: called.append(kind))
    order: Any = as_layers_have_it(made)
    given = GpuProducts(reference, floats=True).product(x, order, None)
    assert bool(called) == (kind == "rows")
    if not called:
        torch.testing.assert_close(given, reference.product(x, made, None), atol=0, rtol=0)


def as_layers_have_it(made: cases.Matrix) -> SimpleNamespace:
    """The matrix as layers have it: no column has another place."""
    return SimpleNamespace(**vars(made), order=None)


class Wrong:
    """The twins, of which each spoils one element of its largest result, or of what it overwrites."""

    def __getattr__(self, name: str) -> Any:
        operator = getattr(reference, name)
        if not callable(operator):
            return operator

        def call(*args: Any, **kwargs: Any) -> Any:
            given = operator(*args, **kwargs)
            results = [*_tensors(given), *_tensors(args[::-1])]
            wrong = next(result for result in results if result.numel())
            at = tuple(size // 2 for size in wrong.shape)
            wrong[at] = wrong[at] + 1 if wrong.dtype != torch.bool else ~wrong[at]
            return given

        return call


def _tensors(given: Any) -> list[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        return [given]
    parts = given if isinstance(given, tuple | list) else getattr(given, "__dict__", {}).values()
    return [tensor for part in parts for tensor in _tensors(part)]


@CASES
def test_a_wrong_element_is_seen(make: Callable[[cases.Place], Any]) -> None:
    torch.manual_seed(0)
    for case in make(small(torch.float32)):
        with pytest.raises(AssertionError, match="result"):
            cases.compare(case, cast(Kernels, Wrong()), reference, torch.float32)
