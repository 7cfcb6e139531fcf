"""Keys and values as 8-bit codes in the hand in Rust: against rounding in PyTorch, their memory, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.layers.ops import TorchOps
from tests.hand.test_quantised import checkpoint, distance, of_torch, told
from tests.hand.test_rust_hand import rust

FAMILY = "qwen3"
"""A family whose tiny model has heads of 32 elements."""


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rounds groups of 32 numbers to 8 bits. The bfloat16 scale is rounded up, so that the largest number fits."""
    parts = x.float().unflatten(-1, (-1, 32))
    exact = parts.abs().amax(-1, keepdim=True) / 127
    # Rounds up: a bfloat16 is the upper half of a float.
    scale = (exact.view(torch.int32) + 0xFFFF >> 16 << 16).view(torch.float32)
    return (scale * (parts / scale.clamp_min(1e-30)).round()).flatten(-2).to(x.dtype)


def rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes PyTorch's operators store and read keys and values as their codes represent them."""
    exact = TorchOps.rotate_and_keep

    def keep(self: TorchOps, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = exact(self, *arguments)
        kv, writes = arguments[-2:]
        k, v = rounded(k), rounded(v)
        kv.keys.index_copy_(0, writes, k)
        kv.values.index_copy_(0, writes, v)
        return q, k, v

    monkeypatch.setattr(TorchOps, "rotate_and_keep", keep)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_are_those_of_torch_that_rounds(
    tmp_path: Path, dtype: str, instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = checkpoint(tmp_path, FAMILY, dtype=dtype, kv_cache_dtype="int8")
    with rust(tmp_path, values) as runner:
        found = told(runner)
    exact = told(of_torch(values))
    rounds(monkeypatch)
    wanted = told(of_torch(values))
    assert distance(found, exact) < 0.05
    if dtype == "float32":
        # A code may differ by one if a number is halfway between two.
        assert distance(found, wanted) < 0.005 < distance(wanted, exact)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_page_takes_17_bytes_for_16_numbers(tmp_path: Path, dtype: str) -> None:
    found = []
    for kept in (None, "int8"):
        with rust(tmp_path, checkpoint(tmp_path, FAMILY, dtype=dtype, kv_cache_dtype=kept)) as runner:
            found.append(runner.facts)
    plain, coded = found
    size = {"float32": 4, "bfloat16": 2}[dtype]
    assert coded["page_bytes"] * 16 * size == plain["page_bytes"] * 17
    assert coded["kv_bytes"] == coded["page_count"] * coded["page_bytes"]


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (FAMILY, {"page_size": 8}, "multiple of 16 tokens and heads of a multiple of 32: there are 8 and 32"),
        ("llama-head-dim", {}, "there are 16 and 24"),
        (FAMILY, {"kv_cache_dtype": "fp8_e4m3"}, "is for a GPU's kernels"),
    ],
)
def test_what_can_not_have_codes_says_so(tmp_path: Path, family: str, changes: dict[str, Any], message: str) -> None:
    values = checkpoint(tmp_path, family, **{"kv_cache_dtype": "int8", **changes})
    with pytest.raises(AssertionError, match=message), rust(tmp_path, values):
        pass
