"""Every kernel on a GPU, at real shapes, beside its twin in float32."""

from __future__ import annotations

import pytest
import torch

from forebay.gpu import kernels, reference
from tests.gpu import cases
from tests.gpu.shapes import IN_8_BITS, MODELS, Model

NAMES = ("Qwen3-0.6B", "Qwen3-0.6B in float32", "Llama-3.1-8B", "SmolLM2-135M", "GLM-4.5-Air")
"""Each takes half a minute of a compiler's time. Qwen3-8B's heads are those of Llama."""


def check(made: cases.Made, dtype: torch.dtype) -> None:
    """All cases; memory of the last is free for the next."""
    torch.manual_seed(torch.seed() % (1 << 32))
    print("seed", torch.initial_seed())
    with torch.inference_mode():
        for case in made(cases.Place(torch.device("cuda"), dtype)):
            cases.compare(case, kernels, reference, dtype)
            del case
            torch.cuda.empty_cache()


@pytest.mark.parametrize("model", [model for model in MODELS if model.name in NAMES], ids=lambda model: model.name)
@pytest.mark.parametrize("make", cases.OF_MODELS, ids=lambda make: make.__name__)
def test_operators_of_models(make: cases.OfModel, model: Model) -> None:
    check(lambda place: make(place, model), model.dtype)


@pytest.mark.parametrize("make", [cases.attention, cases.layers], ids=lambda make: make.__name__)
def test_operators_of_8_bit_pages(make: cases.OfModel) -> None:
    check(lambda place: make(place, IN_8_BITS), IN_8_BITS.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("make", cases.OF_FAMILIES, ids=lambda make: make.__name__)
def test_operators_of_families(make: cases.Made, dtype: torch.dtype) -> None:
    check(make, dtype)
