"""Prompts, and the tokens that transformers puts behind them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from tests.hand.support import TINY, greedy_reference, reference_model

COUNT = 12
"""Tokens behind each prompt in `expected`."""


@cache
def model_of(family: str) -> Any:
    """The `reference_model`, made once: nobody changes it."""
    return reference_model(family)


def prompts(count: int, longest: int = 60, seed: int = 3) -> list[list[int]]:
    """Prompts of fewer than `longest` tokens."""
    random = np.random.default_rng(seed)
    return [random.integers(0, TINY["vocab_size"], random.integers(1, longest)).tolist() for _ in range(count)]


@cache
def expected(family: str) -> list[list[int]]:
    """The greedy tokens of ten prompts."""
    return [greedy_reference(model_of(family), prompt, COUNT)[0] for prompt in prompts(10)]
