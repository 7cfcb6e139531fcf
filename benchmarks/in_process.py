"""A hand's runner in this process, for what is measured without a server."""

from __future__ import annotations

from typing import Any

from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig

PAGE = 16
"""Positions a page."""


def runner(
    model: dict[str, Any],
    *,
    slots: int,
    context: int,
    tokens: int,
    threads: int,
    dtype: str = "bfloat16",
    quantization: str | None = None,
) -> ModelRunner:
    """A model on the CPU with its weights, and room for `tokens` positions; `model` is its description."""
    config = {
        "model": model,
        "load_format": "auto",
        "device": "cpu",
        "dtype": dtype,
        "quantization": quantization,
        "page_size": PAGE,
        "slots": slots,
        "context_length": context,
        "mem_fraction_static": 0.5,
        "max_total_tokens": tokens,
        "arena_bytes": 0,
        "rank": 0,
        "world_size": 1,
        "threads": threads,
        "seed": 0,
        "weight_cache_bytes": 0,
    }
    made = ModelRunner(RunnerConfig.from_dict(config))
    made.load(lambda done, total: None)
    return made
