"""Norms, rotations, gates and stores of rows, compared with float64."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.gpu import kernels
from forebay.gpu.interface import Kernels
from forebay.layers.ops import GATES, Heads
from tests.gpu.checks.eight_bits import check_8_bits, check_kept
from tests.gpu.checks.layers import (
    check_gate,
    check_index_keys,
    check_latent,
    check_norm,
    check_one_row,
    check_one_row_gated,
    check_rotate,
)
from tests.gpu.checks.memory import CPU
from tests.gpu.support import BOTH

DTYPE = st.sampled_from([torch.float32, torch.bfloat16])


@BOTH
@settings(max_examples=12, deadline=None)
@given(tokens=st.integers(1, 5), hidden=st.integers(1, 300), added=st.booleans(), dtype=DTYPE, seed=st.integers(0, 99))
def test_norm(operators: Kernels, tokens: int, hidden: int, added: bool, dtype: torch.dtype, seed: int) -> None:
    check_norm(operators, tokens, hidden, added, dtype, CPU, seed)


@BOTH
@settings(max_examples=12, deadline=None)
@given(rows=st.integers(1, 40), inputs=st.sampled_from([1, 7, 64, 300, 2500]), dtype=DTYPE, seed=st.integers(0, 99))
def test_one_row(operators: Kernels, rows: int, inputs: int, dtype: torch.dtype, seed: int) -> None:
    check_one_row(operators, rows, inputs, bool(seed % 2), dtype, CPU, seed)


@BOTH
@settings(max_examples=12, deadline=None)
@given(
    inner=st.integers(1, 40),
    inputs=st.sampled_from([1, 7, 64, 300, 2500]),
    dtype=DTYPE,
    seed=st.integers(0, 99),
    activation=st.sampled_from(sorted(GATES)),
)
def test_one_row_gated(
    operators: Kernels, inner: int, inputs: int, dtype: torch.dtype, seed: int, activation: str
) -> None:
    check_one_row_gated(operators, inner, inputs, bool(seed % 2), dtype, CPU, seed, activation)


OF_GATES = {
    "gates as ups": ("(n + N).to(tl.int64)", "n.to(tl.int64)"),
    "a bias of gates for ups": ("bias + N + n", "bias + n"),
    "the first inputs alone": ("of_ups += tl.load(ups + at, ", "of_ups += 0 * tl.load(ups + at, "),
}


@pytest.mark.parametrize("name", OF_GATES)
def test_a_wrong_gate_of_one_row_is_seen(name: str, mutate: Callable[..., ModuleType]) -> None:
    mutated = mutate("one_row", *OF_GATES[name])
    operators = SimpleNamespace(add_norm=kernels.add_norm, one_row_gated=mutated.one_row_gated)
    with pytest.raises(AssertionError):
        check_one_row_gated(cast(Kernels, operators), 9, 2500, True, torch.float32)


@BOTH
@settings(max_examples=8, deadline=None)
@given(
    tokens=st.integers(1, 4),
    inner=st.integers(1, 1500),
    dtype=DTYPE,
    seed=st.integers(0, 99),
    activation=st.sampled_from(sorted(GATES)),
)
def test_gate(operators: Kernels, tokens: int, inner: int, dtype: torch.dtype, seed: int, activation: str) -> None:
    check_gate(operators, tokens, inner, dtype, CPU, seed, activation)


@BOTH
@settings(max_examples=12, deadline=None)
@given(
    tokens=st.integers(1, 4),
    heads=st.builds(Heads, st.sampled_from([1, 4, 9]), st.sampled_from([1, 3]), st.sampled_from([4, 24, 64, 80])),
    share=st.sampled_from([1.0, 0.5]),
    normed=st.booleans(),
    dtype=DTYPE,
    seed=st.integers(0, 99),
)
def test_rotate_and_keep(
    operators: Kernels, tokens: int, heads: Heads, share: float, normed: bool, dtype: torch.dtype, seed: int
) -> None:
    check_rotate(operators, tokens, heads, int(heads.dim * share), normed, dtype, CPU, seed)


@BOTH
@settings(max_examples=10, deadline=None)
@given(
    tokens=st.integers(1, 3),
    heads=st.builds(Heads, st.sampled_from([1, 4]), st.sampled_from([1, 3]), st.sampled_from([24, 64])),
    share=st.sampled_from([1.0, 0.5]),
    normed=st.booleans(),
    dtype=DTYPE,
    size=st.sampled_from([0.01, 1.0, 300.0]),
    seed=st.integers(0, 99),
)
def test_keys_and_values_of_8_bits(
    operators: Kernels,
    tokens: int,
    heads: Heads,
    share: float,
    normed: bool,
    dtype: torch.dtype,
    size: float,
    seed: int,
) -> None:
    check_8_bits(operators, tokens, heads, int(heads.dim * share), normed, dtype, size, CPU, seed)


@BOTH
def test_ties_large_numbers_and_nan_in_8_bits(operators: Kernels) -> None:
    check_kept(operators)


def test_more_heads_than_a_program_takes() -> None:
    check_rotate(kernels, 2, Heads(40, 8, 128), 128, True, torch.float32)


@BOTH
@settings(max_examples=10, deadline=None)
@given(
    tokens=st.integers(1, 4),
    rank=st.integers(1, 70),
    turned=st.sampled_from([2, 8, 24]),
    pairs=st.booleans(),
    dtype=DTYPE,
    seed=st.integers(0, 99),
)
def test_latent_rows(
    operators: Kernels, tokens: int, rank: int, turned: int, pairs: bool, dtype: torch.dtype, seed: int
) -> None:
    check_latent(operators, tokens, rank, turned, pairs, dtype, CPU, seed)


@BOTH
@settings(max_examples=10, deadline=None)
@given(
    tokens=st.integers(1, 4),
    sizes=st.sampled_from([(16, 16), (16, 8), (128, 64), (24, 10)]),
    pairs=st.booleans(),
    dtype=DTYPE,
    seed=st.integers(0, 99),
)
def test_index_keys(
    operators: Kernels, tokens: int, sizes: tuple[int, int], pairs: bool, dtype: torch.dtype, seed: int
) -> None:
    check_index_keys(operators, tokens, *sizes, pairs, dtype, CPU, seed)


MUTANTS = {
    "half of a head": ("cosine - b * sine", "cosine + b * sine"),
    "values that turn": ("b * cosine + a * sine, b)", "b * cosine + a * sine, a)"),
    "another's entry": ("keys + entry * key_stride", "keys + (entry + 1) * key_stride"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_rotation_is_seen(name: str, mutate: Callable[..., ModuleType]) -> None:
    mutated = mutate("rotate", *MUTANTS[name])
    with pytest.raises(AssertionError):
        check_rotate(mutated, 3, Heads(4, 2, 16), 16, True, torch.float32)


OF_8_BITS = {
    "ties": ("+ 0x7FFFF + ((size >> 20) & 1)", "+ 0x80000"),
    "signs": ("((bits >> 24) & 0x80)", "((bits >> 24) & 0)"),
    "largest": ("tl.minimum(tl.maximum(x, -LARGEST), LARGEST)", "tl.minimum(x, LARGEST)"),
    "NaN": ("tl.where(x == x, code, _NO_NUMBER)", "code"),
}


@pytest.mark.parametrize("name", OF_8_BITS)
def test_a_wrong_8_bit_float_is_seen(name: str, mutate: Callable[..., ModuleType]) -> None:
    mutate("eight_bits", *OF_8_BITS[name], "kept", ("rotate",))
    with pytest.raises(AssertionError):
        check_kept(kernels)
