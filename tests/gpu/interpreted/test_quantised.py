"""Products with codes, compared with dequantised values in float64."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.gpu import kernels, reference
from forebay.gpu.interface import Kernels
from tests.gpu.checks.codes import Codes, Shape, check_expand, check_experts_of_codes, check_product, check_quantise
from tests.gpu.checks.memory import nan
from tests.gpu.support import BOTH, WATCHED

TYPE = st.sampled_from([torch.float32, torch.bfloat16])
SHAPES = st.sampled_from(
    [
        # inputs, group, block_rows, fold
        (100, 100, 1, 0),
        (40, 16, 8, 0),
        (200, 128, 3, 0),
        (64, 32, 1, 32),
        (192, 192, 1, 64),
        (256, 128, 1, 128),
    ]
)


@BOTH
@settings(max_examples=12, deadline=None)
@given(tokens=st.integers(1, 20), rows=st.sampled_from([1, 8, 33, 70]), shape=SHAPES, seed=st.integers(0, 99))
def test_product(operators: Kernels, tokens: int, rows: int, shape: Shape, seed: int) -> None:
    check_product(operators, tokens, rows, shape, biased=bool(seed % 2), seed=seed)


@BOTH
@settings(max_examples=12, deadline=None)
@given(rows=st.sampled_from([1, 8, 33]), shape=SHAPES, dtype=TYPE, seed=st.integers(0, 99))
def test_expand(operators: Kernels, rows: int, shape: Shape, dtype: torch.dtype, seed: int) -> None:
    check_expand(operators, rows, shape, dtype, seed=seed)


@BOTH
def test_every_8_bit_float(operators: Kernels) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes & 0x7F != 0x7F][:, None].expand(-1, 16).contiguous()
    codes[:, 1:] = 0
    matrix = Codes(codes, torch.ones(len(codes), 1), None, 16, 16, 1, 0)
    x = torch.zeros(1, 16)
    x[0, 0] = 1
    assert operators.product(x, matrix, None)[0].equal(codes[:, 0].view(torch.float8_e4m3fn).float())


@BOTH
@pytest.mark.parametrize("fold", [0, 32])
def test_bfloat16(operators: Kernels, fold: int) -> None:
    check_product(operators, 5, 40, (64, 32, 1, fold), biased=True, dtype=torch.bfloat16)


@BOTH
@settings(max_examples=6, deadline=None)
@given(
    tokens=st.integers(1, 9),
    each=st.integers(1, 3),
    count=st.sampled_from([3, 5]),
    shapes=st.sampled_from([((64, 32, 1, 32), (32, 32, 1, 32)), ((40, 16, 8, 0), (24, 16, 8, 0))]),
    seed=st.integers(0, 99),
)
def test_experts(
    operators: Kernels,
    tokens: int,
    each: int,
    count: int,
    shapes: tuple[Shape, Shape],
    seed: int,
) -> None:
    check_experts_of_codes(operators, tokens, each, count, shapes, seed=seed)


def test_one_expert_has_several_tiles() -> None:
    check_experts_of_codes(kernels, 70, 2, 2, ((64, 32, 1, 32), (32, 32, 1, 32)))


@settings(max_examples=8, deadline=None)
@given(tokens=st.integers(1, 5), inputs=st.sampled_from([1, 40, 130]), seed=st.integers(0, 99))
def test_activations_become_8_bit_floats(tokens: int, inputs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, inputs, generator=generator)
    # Some inputs are far below the largest, where 8-bit floats have few bits or are zero.
    x *= 10.0 ** torch.randint(-6, 3, (tokens, inputs), generator=generator)
    x[0] = x[0] * (seed % 2)
    x = torch.cat((x, nan(tokens, 2)), dim=1)[:, :inputs]
    for given_, expected in zip(kernels.quantise(x), WATCHED.quantise(x), strict=True):
        assert given_.dtype == expected.dtype
        torch.testing.assert_close(given_.float(), expected.float(), atol=0, rtol=0)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_of_activations_are_the_nearest(operators: Kernels, dtype: torch.dtype) -> None:
    check_quantise(operators, 5, 130, dtype)


def test_ties_go_to_even_ones() -> None:
    # 17 and 19 are halfway between 16, 18 and 20. The 448 makes the scale 1.
    x = torch.tensor([[448.0, 17.0, 19.0, -17.0, 2.0**-10, 3 * 2.0**-10, 0.9 * 2.0**-10, 247.9, 248.0]])
    codes, scale = kernels.quantise(x)
    assert scale.item() == 1
    assert codes[0].float().tolist() == [448, 16, 20, -16, 0, 2.0**-8, 0, 240, 256]
    assert codes.view(torch.uint8).equal(reference.quantise(x)[0].view(torch.uint8))


MUTANTS = {
    "halves": ("x_at + 2 * begin + K,", "x_at + 2 * begin,"),
    "zero points": ("zeros + row * GROUPS + group", "zeros + row * GROUPS"),
    "scales of a group": ("part = tl.dot(b, tl.trans(high), part", "part = tl.dot(b, tl.trans(high), part * 0"),
    "rows of a block": ("(row // BLOCK_ROWS) * GROUPS", "row * 0"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_product_is_seen(name: str, mutate: Callable[..., ModuleType]) -> None:
    mutated = mutate("quantised", *MUTANTS[name])
    with pytest.raises(AssertionError):
        check_product(mutated, 5, 33, (64, 32, 1, 32), biased=True, seed=1)
