"""A hand without a server: its configuration, and the runner of PyTorch's hand in this process."""

from __future__ import annotations

from typing import Any

from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig

PAGE = 16
"""Positions of a page."""


def hand_config(
    model: dict[str, Any],
    *,
    slots: int,
    context: int,
    tokens: int | None,
    threads: int,
    dtype: str = "bfloat16",
    quantization: str | None = None,
    kv_cache_dtype: str | None = None,
    device: str = "cpu",
    attention_backend: str | None = None,
    memory: float = 0.5,
    step_tokens: int = 1024,
    dummy: bool = False,
) -> dict[str, Any]:
    """The `config` of a hand with room for `tokens` positions. `model` is the model's description.

    With `tokens` None, there is room for as many positions as fit into the share `memory` of the memory. With `dummy`,
    weights are made up.
    """
    return {
        "model": model,
        "load_format": "dummy" if dummy else "auto",
        "device": device,
        "dtype": dtype,
        "quantization": quantization,
        "kv_cache_dtype": kv_cache_dtype,
        "page_size": PAGE,
        "slots": slots,
        "context_length": context,
        "chunked_prefill_size": step_tokens,
        "max_running_requests": slots,
        "attention_backend": attention_backend,
        "graph_rows": slots if device == "cuda" else 0,
        "mem_fraction_static": memory,
        "max_total_tokens": tokens,
        "arena_bytes": 0,
        "rank": 0,
        "world_size": 1,
        "expert_parallel": False,
        "step_group": False,
        "threads": threads,
        "seed": 0,
        "weight_cache_bytes": 0,
        "host_bytes": None,
        "host_ratio": None,
        "host_pages": None,
        "host_share": 0.8,
        "copy_gbps": None,
        "kv_checksum": False,
        "hot_row_tokens": None,
        "sparse_top_k": None,
        "image_pool_tokens": None,
        "kv_save_order": "behind",
    }


def runner(model: dict[str, Any], **settings: Any) -> ModelRunner:
    """A runner with a model and its weights; `settings` are those of `hand_config`."""
    made = ModelRunner(RunnerConfig.from_dict(hand_config(model, **settings)))
    made.load(lambda done, total: None)
    return made
