"""Prompts, and the tokens that transformers generates after them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.hand.support import TINY, greedy_reference, reference_model

COUNT = 12
"""The number of tokens after each prompt in `expected`."""


@cache
def model_of(family: str) -> Any:
    """The `reference_model`. It is built once, because no test changes it."""
    return reference_model(family)


def prompts(count: int, longest: int = 60, seed: int = 3) -> list[list[int]]:
    """Prompts of fewer than `longest` tokens."""
    random = np.random.default_rng(seed)
    return [random.integers(0, TINY["vocab_size"], random.integers(1, longest)).tolist() for _ in range(count)]


@cache
def expected(family: str) -> list[list[int]]:
    """The greedy tokens of ten prompts."""
    return [greedy_reference(model_of(family), prompt, COUNT)[0] for prompt in prompts(10)]


def greedy_of_8_bits(model: Any, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """`greedy_reference` of a model in which attention reads all keys and values as 8-bit floats."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)

    def attend(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **named: Any) -> Any:
        return sdpa_attention_forward(module, q, rounded(k), rounded(v), mask, **named)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", attend)
        return greedy_reference(model, prompt, count)
