"""Convolutions, recurrences and gated norms, compared with their definitions in float64."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.gpu import kernels
from forebay.gpu.interface import Kernels
from tests.gpu.checks.memory import CPU
from tests.gpu.checks.recurrent import Heads, check_convolve, check_gated_norm, check_recur
from tests.gpu.support import BOTH

DTYPE = st.sampled_from([torch.float32, torch.bfloat16])
SHAPES = {
    "delta": Heads(4, 2, 24, 40),
    "delta, tiled": Heads(4, 2, 8, 16, tiled=True),
    "decays of channels": Heads(2, 2, 20, 24, channel_decay=True),
    "mamba": Heads(2, 1, 24, 20, delta=False),
}


@BOTH
@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    channels=st.sampled_from([5, 70]),
    taps=st.sampled_from([2, 3, 4]),
    gated=st.booleans(),
    biased=st.booleans(),
    padding=st.sampled_from([(0, 0), (2, 3)]),
    dtype=DTYPE,
    seed=st.integers(0, 99),
)
def test_convolve(
    operators: Kernels,
    lengths: list[int],
    channels: int,
    taps: int,
    gated: bool,
    biased: bool,
    padding: tuple[int, int],
    dtype: torch.dtype,
    seed: int,
) -> None:
    sizes = lengths, channels, taps, dtype
    check_convolve(operators, *sizes, gated=gated, biased=biased, padding=padding, device=CPU, seed=seed)


@BOTH
@pytest.mark.parametrize("seed", range(3))
def test_convolve_decode_rows(operators: Kernels, seed: int) -> None:
    check_convolve(operators, [1] * 5, 300, 4, torch.bfloat16, biased=seed == 1, gated=seed == 2, seed=seed)


@pytest.fixture
def chunks_of_16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses chunks in float32 too, where small errors show."""
    monkeypatch.setattr(sys.modules["forebay.gpu.kernels.recur"], "chunk_of", lambda shape, dtype: 16)


@pytest.mark.usefixtures("chunks_of_16")
@BOTH
@pytest.mark.parametrize("name", SHAPES)
def test_recur_of_rows_of_all_lengths(operators: Kernels, name: str) -> None:
    """Rows of one token, one chunk and several chunks, states stored before the last position, and padding."""
    for seed, lengths in enumerate(([1, 35, 2], [16, 1, 17])):
        skip = name == "mamba"
        check_recur(operators, lengths, SHAPES[name], torch.float32, skip=skip, padding=(2, 5), seed=seed)


@pytest.mark.parametrize("name", SHAPES)
def test_recur_position_by_position(name: str) -> None:
    check_recur(kernels, [1, 5, 2], SHAPES[name], torch.float32, skip=name == "mamba", padding=(1, 2), seed=1)


@BOTH
@pytest.mark.parametrize("name", SHAPES)
def test_recur_of_decode_rows(operators: Kernels, name: str) -> None:
    for seed, dtype in enumerate((torch.float32, torch.bfloat16)):
        check_recur(operators, [1] * 4, SHAPES[name], dtype, skip=name == "mamba", seed=seed)


@BOTH
@pytest.mark.parametrize("name", SHAPES)
def test_recur_in_bfloat16(operators: Kernels, name: str) -> None:
    check_recur(operators, [70, 1, 5], SHAPES[name], torch.bfloat16, seed=3)


@pytest.mark.usefixtures("chunks_of_16")
def test_equal_keys_lose_nothing() -> None:
    """With equal keys, powers of the matrix that is inverted would have elements as large as binomial coefficients."""
    check_recur(kernels, [40], Heads(1, 1, 16, 16), torch.float32, seed=1, alike=True)


@BOTH
@settings(max_examples=10, deadline=None)
@given(
    tokens=st.integers(1, 3),
    groups=st.integers(1, 3),
    size=st.sampled_from([8, 40]),
    norm=st.sampled_from(["none", "before_gate", "after_gate"]),
    sigmoid=st.booleans(),
    shared=st.booleans(),
    nobody=st.sampled_from([0, 2]),
    dtype=DTYPE,
    seed=st.integers(0, 99),
)
def test_gated_norm(
    operators: Kernels,
    tokens: int,
    groups: int,
    size: int,
    norm: str,
    sigmoid: bool,
    shared: bool,
    nobody: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    sizes = tokens, groups * size, size
    check_gated_norm(operators, *sizes, norm, sigmoid, dtype, shared=shared, nobody=nobody, device=CPU, seed=seed)


def check_convolutions(operators: Any) -> None:
    for seed in range(4):
        check_convolve(operators, [5, 1, 3], 40, 4, torch.float32, seed=seed)


OF_CONVOLUTIONS = {
    "another row's inputs": ("(somebody & (at >= begin))[:, None]", "(somebody & (at >= 0))[:, None]"),
    "inputs that stay": ("begin, i + count, x_stride", "begin, i, x_stride"),
    "the state before the last": ("i + count - 1, x_stride", "i + count, x_stride"),
    "a state of nobody": ("source = tl.load(place).to(tl.int64)", "source = tl.load(place + 1).to(tl.int64)"),
}


@pytest.mark.parametrize("name", OF_CONVOLUTIONS)
def test_a_wrong_convolution_is_seen(name: str, mutate: Callable[..., ModuleType]) -> None:
    mutated = mutate("convolve", *OF_CONVOLUTIONS[name])
    with pytest.raises(AssertionError):
        check_convolutions(mutated)


def check_recurrences(operators: Any) -> None:
    for seed in range(2):
        check_recur(operators, [20, 1, 2, 3], SHAPES["delta, tiled"], torch.float32, seed=seed)


_SOURCE = "source = tl.load(places + row * place_stride).to(tl.int64)\n    state = "
OF_RECURRENCES = {
    "a state of nobody": (_SOURCE, _SOURCE.replace("place_stride)", "place_stride + 1)")),
    "scores of later positions": ("i[:, None] >= i[None, :], of_queries", "i[:, None] >= 0, of_queries"),
    "an inverse without its last line": ("for line in range(1, left)", "for line in range(1, left - 1)"),
    "a state that does not decay": ("state = state * tl.exp(last)[:, None]", "state = state * 1.0"),
    "the last position twice": ("count - apart.to(tl.int32)", "count"),
    "a state that is not kept": (
        "kept * size + cells, state, mask=state_mask",
        "kept * size + cells, 0.0, mask=state_mask",
    ),
}


@pytest.mark.parametrize("name", OF_RECURRENCES)
def test_a_wrong_recurrence_is_seen(name: str, mutate: Callable[..., ModuleType]) -> None:
    mutated: Any = mutate("recur", *OF_RECURRENCES[name])
    mutated.chunk_of = lambda shape, dtype: 16
    with pytest.raises(AssertionError):
        check_recurrences(mutated)
