"""Grouped products of experts against the layers' own operators."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.gpu import kernels
from forebay.gpu.interface import Kernels
from forebay.layers.ops import HostOps
from tests.gpu.support import BOTH, nan


def check(
    operators: Kernels,
    tokens: int,
    each: int,
    count: int,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    seed: int,
    first: int = 0,
) -> None:
    """`first`: the experts below it are another rank's."""
    hidden, inner = sizes
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    x = torch.cat((random(tokens, hidden), nan(tokens, 3)), dim=1).to(dtype)[:, :hidden]
    ids = torch.stack([torch.randperm(count, generator=generator)[:each] for _ in range(tokens)]).sort(-1).values
    weights = random(tokens, each).abs()
    gate_up, down = (random(count, *shape).to(dtype) * 0.3 for shape in ((2 * inner, hidden), (hidden, inner)))
    elsewhere = ids < first
    ids, weights = (ids - first).masked_fill(elsewhere, count - first), weights.masked_fill(elsewhere, 0)
    gate_up, down = gate_up[first:], down[first:]
    expected = HostOps().experts(x.contiguous(), ids, weights, gate_up, down)
    # Memory that nobody has written to is not a number.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        given = operators.experts(x, ids, weights, gate_up, down)
    finally:
        torch.use_deterministic_algorithms(False)
    narrow = dtype == torch.bfloat16
    torch.testing.assert_close(given, expected, atol=0.2 if narrow else 2e-5, rtol=0.05 if narrow else 1e-5)


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
    check(operators, tokens, each, count, sizes, torch.float32, seed)


@BOTH
def test_bfloat16(operators: Kernels) -> None:
    check(operators, 5, 2, 4, (40, 24), torch.bfloat16, 0)


@BOTH
@pytest.mark.parametrize("first", [1, 3])
def test_experts_of_another_rank_add_nothing(operators: Kernels, first: int) -> None:
    check(operators, 9, 3, 5, (24, 16), torch.float32, 0, first)


def test_one_expert_has_several_tiles() -> None:
    check(kernels, 70, 2, 2, (24, 16), torch.float32, 0)


def test_a_token_is_alone_what_it_is_in_a_batch() -> None:
    """Bit for bit, with the same tiles: neither neighbours nor their order decide."""
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
        check(mutated, 9, 3, 4, (24, 16), torch.float32, 0, first=1)
