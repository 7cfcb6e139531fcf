"""Products with codes, compared with dequantised values in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forebay.gpu.interface import Kernels
from tests.gpu.checks.experts import bound, mixture, routed
from tests.gpu.checks.memory import CPU, SINGLE, Numbers, poisoned, rounding, spaced, within

Shape = tuple[int, int, int, int]
"""Inputs, group, block_rows and fold of a matrix."""
_LARGEST = 448.0
_LEAST_EXPONENT = -6
_DIVISION = 2.0**-21
"""The error of a quotient in float32. A GPU's division is wrong by up to two units in the last place."""


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
    def random(cls, rows: int, shape: Shape, seed: int, device: torch.device = CPU) -> Codes:
        inputs, group, block_rows, fold = shape
        numbers, byte = Numbers(device, seed), torch.uint8
        groups = -(-inputs // group)
        scale = numbers.uniform(-(-rows // block_rows), groups) * 0.1 + 0.01
        if fold:
            codes = numbers.below(256, rows, inputs // 2, dtype=byte)
            return cls(codes, scale, numbers.below(16, rows, groups, dtype=byte), inputs, group, 1, fold)
        codes = numbers.below(256, rows, inputs, dtype=byte)
        # Both codes of NaN are replaced.
        codes[codes & 0x7F == 0x7F] = 0x01
        return cls(codes, scale, None, inputs, group, block_rows, fold)

    def values(self, rows: slice = slice(None)) -> torch.Tensor:
        """The values, float64 [rows, inputs]."""
        column = torch.arange(self.inputs, device=self.codes.device)
        row = torch.arange(len(self.codes), device=self.codes.device)[rows]
        scale = self.scale[row // self.block_rows][:, column // self.group].double()
        if self.zeros is None:
            return self.codes[rows].view(torch.float8_e4m3fn).double() * scale
        half, at = self.fold // 2, column % self.fold
        byte = self.codes[rows][:, (column - at) // 2 + at % half]
        code = torch.where(at >= half, byte >> 4, byte & 15)
        return (code.double() - self.zeros[rows][:, column // self.group].double()) * scale


def check_product(
    operators: Kernels,
    tokens: int,
    rows: int,
    shape: Shape,
    *,
    biased: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    seed: int = 0,
) -> None:
    """float32 and bfloat16 represent codes exactly, and sums and scales are float32. So only the result is rounded."""
    matrix, numbers = Codes.random(rows, shape, seed, device), Numbers(device, seed + 1)
    x = numbers.normal(tokens, matrix.inputs, dtype=dtype)
    bias = numbers.normal(rows, dtype=dtype) if biased else None
    with poisoned():
        given = operators.product(spaced(x), matrix, bias)
    assert given.dtype == dtype
    values = matrix.values()
    expected, size = x.double() @ values.T, x.double().abs() @ values.abs().T
    if bias is not None:
        expected, size = expected + bias.double(), size + bias.double().abs()
    within(given, expected, expected.abs() * rounding(dtype) + size * SINGLE)


def check_expand(
    operators: Kernels, rows: int, shape: Shape, dtype: torch.dtype, device: torch.device = CPU, seed: int = 0
) -> None:
    """A value is a code times a scale in float32, rounded once."""
    matrix = Codes.random(rows, shape, seed, device)
    with poisoned():
        given = operators.expand(matrix, dtype)
    assert given.dtype == dtype
    expected = matrix.values()
    within(given, expected, expected.abs() * rounding(dtype))


def check_experts_of_codes(
    operators: Kernels,
    tokens: int,
    each: int,
    count: int,
    shapes: tuple[Shape, Shape],
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    seed: int = 0,
) -> None:
    """`shapes`: the shape of gates and ups, and the shape of downs."""
    hidden, inner = shapes[0][0], shapes[1][0]
    gate_up = Codes.random(count * 2 * inner, shapes[0], seed, device)
    down = Codes.random(count * hidden, shapes[1], seed + 1, device)
    # Small scales, so that gates neither open nor close fully.
    gate_up.scale *= 0.1 * hidden**-0.5
    down.scale *= 0.1 * inner**-0.5
    numbers = Numbers(device, seed + 2)
    x = numbers.normal(tokens, hidden, dtype=dtype)
    ids, weights = routed(numbers, tokens, each, count)
    with poisoned():
        given = operators.experts_of_codes(x, ids, weights, gate_up, down)

    def expert(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        both = slice(number * 2 * inner, (number + 1) * 2 * inner)
        return gate_up.values(both), down.values(slice(number * hidden, (number + 1) * hidden))

    expected, size = mixture(x, ids, weights, count, expert)
    assert given.dtype == dtype
    within(given, expected, bound(size, dtype))


def check_quantise(
    operators: Kernels, tokens: int, inputs: int, dtype: torch.dtype, device: torch.device = CPU, seed: int = 0
) -> None:
    """Each code is nearest to its quotient (input / scale).

    Some quotients are so small that 8-bit floats have few bits.
    """
    numbers = Numbers(device, seed)
    x = (numbers.normal(tokens, inputs) * 10.0 ** (numbers.below(9, tokens, inputs) - 6)).to(dtype)
    x[0] = 0
    with poisoned():
        codes, scale = operators.quantise(spaced(x))
    largest = x.double().abs().amax(1, keepdim=True)
    within(scale, (largest / _LARGEST).clamp(min=1e-12), largest * _DIVISION / _LARGEST + 1e-18)
    quotient = x.double() / scale.double()
    exponent = quotient.abs().clamp(min=2.0**-100).log2().floor().clamp(min=_LEAST_EXPONENT)
    # An 8-bit float has four significant bits, so the error is half the last bit. In float32 a tie may round up or
    # down.
    within(codes.float(), quotient, 2.0 ** (exponent - 4) + quotient.abs() * _DIVISION)
