"""Grouped products of experts, compared with float64."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.gpu import kernels
from forebay.gpu.interface import Kernels
from tests.gpu.checks.experts import check_experts
from tests.gpu.support import BOTH


@BOTH
@settings(max_examples=5, deadline=None)
@given(
    tokens=st.integers(1, 9),
    each=st.integers(1, 3),
    count=st.sampled_from([3, 4, 9]),
    sizes=st.sampled_from([(8, 8), (40, 24), (70, 33)]),
    seed=st.integers(0, 99),
)
def test_experts(operators: Kernels, tokens: int, each: int, count: int, sizes: tuple[int, int], seed: int) -> None:
    check_experts(operators, tokens, each, count, sizes, seed=seed)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [0, 2])
def test_experts_with_biases_and_clamped_gates(operators: Kernels, dtype: torch.dtype, first: int) -> None:
    check_experts(operators, 9, 3, 5, (40, 24), dtype, first=first, clamped=True)


@BOTH
def test_bfloat16(operators: Kernels) -> None:
    check_experts(operators, 5, 2, 4, (40, 24), torch.bfloat16)


@BOTH
@pytest.mark.parametrize("first", [1, 3])
def test_experts_of_another_rank_add_nothing(operators: Kernels, first: int) -> None:
    check_experts(operators, 9, 3, 5, (24, 16), first=first)


def test_one_expert_has_several_tiles() -> None:
    check_experts(kernels, 70, 2, 2, (24, 16))


def test_a_token_is_alone_what_it_is_in_a_batch() -> None:
    """Results are equal to the bit with the same tiles, whatever the neighbours and their order are."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 40, generator=generator)
    ids = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(6)]).sort(-1).values
    weights = torch.rand(6, 2, generator=generator)
    gate_up, down = torch.randn(5, 48, 40, generator=generator), torch.randn(5, 40, 24, generator=generator)
    together = kernels.experts(x, ids, weights, gate_up, down)
    backwards = kernels.experts(x.flip(0), ids.flip(0), weights.flip(0), gate_up, down).flip(0)
    alone = torch.cat(
        [kernels.experts(x[i : i + 1], ids[i : i + 1], weights[i : i + 1], gate_up, down) for i in range(6)]
    )
    assert together.equal(backwards)
    assert together.equal(alone)


MUTANTS = {
    "a copy left out": ("inside = copy < end\n    token =", "inside = copy < end - 1\n    token ="),
    "weights of another": ("tl.load(weights + copy)", "tl.load(weights + token * EACH)"),
    "what is not there": ("tl.where(weight != 0, term * weight, 0.0)", "term * weight"),
    "places of copies": ("outputs + place[:, None] * HIDDEN", "outputs + copy.to(tl.int64)[:, None] * HIDDEN"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_group_is_seen(name: str, mutate: Callable[..., ModuleType]) -> None:
    mutated = mutate("grouped", *MUTANTS[name])
    with pytest.raises(AssertionError):
        check_experts(mutated, 9, 3, 4, (24, 16), first=1)
