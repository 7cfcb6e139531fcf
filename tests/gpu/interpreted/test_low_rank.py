"""Low-rank matrices of several adapters beside one product."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.gpu import kernels
from forebay.gpu.interface import Kernels
from tests.gpu.checks.low_rank import check_add_low_rank
from tests.gpu.checks.memory import CPU
from tests.gpu.support import BOTH


@BOTH
@settings(max_examples=8, deadline=None)
@given(
    places=st.lists(st.integers(0, 3), min_size=1, max_size=7),
    outputs=st.sampled_from([[40], [70, 33], [24, 8, 8]]),
    inputs=st.sampled_from([24, 130]),
    ranks=st.sampled_from([[4, 1, 8], [3, 3, 20]]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_add_low_rank(
    operators: Kernels,
    places: list[int],
    outputs: list[int],
    inputs: int,
    ranks: list[int],
    dtype: torch.dtype,
    seed: int,
) -> None:
    check_add_low_rank(operators, places, outputs, inputs, ranks, dtype, device=CPU, seed=seed)


@BOTH
def test_many_tokens_and_long_sums(operators: Kernels) -> None:
    """Tiles of many tokens, and sums in several parts."""
    check_add_low_rank(operators, [0] * 40 + [1] * 25 + [2] * 5, [24, 8], 40, [4, 2], torch.float32, seed=1)
    check_add_low_rank(operators, [0, 1, 1, 3, 2], [24], 2500, [40, 2, 9], torch.bfloat16, most=70, seed=2)


def test_a_step_without_adapters_changes_nothing() -> None:
    check_add_low_rank(kernels, [2, 2, 2], [24], 40, [4, 2], torch.float32)


MUTANTS = {
    "another's matrices": ("a_at = a + (place.to(tl.int64) * ranks", "a_at = a + (0 * place.to(tl.int64) * ranks"),
    "another module's sums": ("own = tl.program_id(1) * RANK + rank", "own = rank"),
    "a part that is left out": ("for part in range(parts)", "for part in range(1)"),
    "ranks that are left out": ("for rank in range(0, RANK, R)", "for rank in range(0, RANK - R, R)"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_adapter_is_seen(name: str, mutate: Callable[..., ModuleType]) -> None:
    mutated = mutate("low_rank", *MUTANTS[name])
    with pytest.raises(AssertionError):
        check_add_low_rank(mutated, [0, 1, 2, 1], [24, 40], 2100, [4, 8], torch.float32)
