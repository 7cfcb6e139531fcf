"""Products with codes against values that are multiplied out in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.gpu import kernels, reference
from forebay.gpu.interface import Kernels
from forebay.layers.ops import HostOps
from tests.gpu.support import BOTH, WATCHED, nan


@dataclass
class Codes:
    """A matrix of random codes."""

    codes: torch.Tensor
    scale: torch.Tensor
    zeros: torch.Tensor | None
    inputs: int
    group: int
    block_rows: int
    fold: int

    @classmethod
    def random(cls, rows: int, inputs: int, group: int, block_rows: int, fold: int, seed: int) -> Codes:
        generator = torch.Generator().manual_seed(seed)

        def bytes_(*shape: int, most: int = 256) -> torch.Tensor:
            return torch.randint(0, most, shape, dtype=torch.uint8, generator=generator)

        groups = -(-inputs // group)
        scale = torch.rand(-(-rows // block_rows), groups, generator=generator) * 0.1 + 0.01
        if fold:
            return cls(bytes_(rows, inputs // 2), scale, bytes_(rows, groups, most=16), inputs, group, 1, fold)
        codes = bytes_(rows, inputs)
        # Neither of the two is a number.
        codes[codes & 0x7F == 0x7F] = 0x01
        return cls(codes, scale, None, inputs, group, block_rows, fold)

    def values(self) -> torch.Tensor:
        """float64 [rows, inputs], one by one."""
        found = torch.empty(len(self.codes), self.inputs, dtype=torch.float64)
        floats = self.codes.view(torch.float8_e4m3fn).double() if self.zeros is None else None
        for i in range(self.inputs):
            if floats is None:
                begin, at = i // self.fold * self.fold, i % self.fold
                half = self.fold // 2
                byte = self.codes[:, begin // 2 + at % half]
                assert self.zeros is not None
                code = (byte >> (4 if at >= half else 0)) & 15
                column = code.double() - self.zeros[:, i // self.group].double()
            else:
                column = floats[:, i]
            rows = torch.arange(len(self.codes)) // self.block_rows
            found[:, i] = column * self.scale[rows, i // self.group].double()
        return found


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


def check(operators: Kernels, tokens: int, rows: int, shape: tuple[int, int, int, int], seed: int) -> None:
    matrix = Codes.random(rows, *shape, seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.cat((torch.randn(tokens, matrix.inputs, generator=generator), nan(tokens, 3)), dim=1)[:, : matrix.inputs]
    bias = torch.randn(rows, generator=generator) if seed % 2 else None
    expected = x.double() @ matrix.values().T
    if bias is not None:
        expected += bias.double()
    given_ = operators.product(x, matrix, bias)
    scale = x.double().abs() @ matrix.values().abs().T
    assert ((given_.double() - expected).abs() <= 2e-6 * scale + 1e-6).all()


@BOTH
@settings(max_examples=12, deadline=None)
@given(tokens=st.integers(1, 20), rows=st.sampled_from([1, 8, 33, 70]), shape=SHAPES, seed=st.integers(0, 99))
def test_product(operators: Kernels, tokens: int, rows: int, shape: tuple[int, int, int, int], seed: int) -> None:
    check(operators, tokens, rows, shape, seed)


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
    matrix = Codes.random(40, 64, 32, 1, fold, 0)
    x = torch.randn(5, 64).bfloat16()
    expected = x.double() @ matrix.values().T
    given_ = operators.product(x, matrix, torch.zeros(40, dtype=torch.bfloat16))
    assert given_.dtype == torch.bfloat16
    torch.testing.assert_close(given_.double(), expected, atol=0.02, rtol=0.01)


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
    shapes: tuple[tuple[int, int, int, int], tuple[int, int, int, int]],
    seed: int,
) -> None:
    check_experts(operators, tokens, each, count, shapes, seed)


def check_experts(
    operators: Kernels,
    tokens: int,
    each: int,
    count: int,
    shapes: tuple[tuple[int, int, int, int], tuple[int, int, int, int]],
    seed: int,
) -> None:
    hidden, inner = shapes[0][0], shapes[1][0]
    gate_up = Codes.random(count * 2 * inner, *shapes[0], seed)
    down = Codes.random(count * hidden, *shapes[1], seed + 1)
    # Small enough that gates do not all open or close.
    gate_up.scale *= 0.01
    down.scale *= 0.01
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator)
    ids = torch.stack([torch.randperm(count, generator=generator)[:each] for _ in range(tokens)]).sort(-1).values
    weights = torch.rand(tokens, each, generator=generator)
    both = gate_up.values().float().unflatten(0, (count, 2 * inner))
    expected = HostOps().experts(x, ids, weights, both, down.values().float().unflatten(0, (count, hidden)))
    given_ = operators.experts_of_codes(x, ids, weights, gate_up, down)
    torch.testing.assert_close(given_, expected, atol=2e-5, rtol=1e-4)


def test_one_expert_has_several_tiles() -> None:
    check_experts(kernels, 70, 2, 2, ((64, 32, 1, 32), (32, 32, 1, 32)), 0)


@settings(max_examples=8, deadline=None)
@given(tokens=st.integers(1, 5), inputs=st.sampled_from([1, 40, 130]), seed=st.integers(0, 99))
def test_activations_become_8_bit_floats(tokens: int, inputs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, inputs, generator=generator)
    # Some are far below the largest, where 8-bit floats have fewer bits and none.
    x *= 10.0 ** torch.randint(-6, 3, (tokens, inputs), generator=generator)
    x[0] = x[0] * (seed % 2)
    x = torch.cat((x, nan(tokens, 2)), dim=1)[:, :inputs]
    for given_, expected in zip(kernels.quantise(x), WATCHED.quantise(x), strict=True):
        assert given_.dtype == expected.dtype
        torch.testing.assert_close(given_.float(), expected.float(), atol=0, rtol=0)


def test_ties_go_to_even_ones() -> None:
    # 17 and 19 lie between 16, 18 and 20; 448 makes the scale 1.
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
        check(mutated, 5, 33, (64, 32, 1, 32), 1)
