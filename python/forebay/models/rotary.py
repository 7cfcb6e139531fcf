"""Rotary frequencies of models in Transformers' code."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["settle_rotary"]


@torch.no_grad()
def settle_rotary(model: torch.nn.Module, context_length: int) -> None:
    """Computes the frequencies from the context length, so that they are the same for all rows of all steps.

    Transformers computes them from the largest position of a call (`longrope`, `dynamic`). Here that position may
    belong to another request, and the cached keys would have the frequencies of an earlier call.
    """
    modules: Iterable[Any] = model.modules()
    for module in modules:
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _settled(module, kinds, None, context_length)
        elif isinstance(kinds, dict):
            module.rope_type = {layer: _settled(module, kind, layer, context_length) for layer, kind in kinds.items()}


def _settled(module: Any, kind: str, layer: str | None, context_length: int) -> str:
    """Sets the frequencies of a layer type; None: of all layers. Returns a RoPE type with constant frequencies."""
    if "dynamic" in kind:
        # These change frequencies only beyond the configuration's largest position, which no request reaches.
        return "default"
    if kind != "longrope":
        return kind
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = module.config.rope_parameters
    original = (settings if layer is None else settings[layer])["original_max_position_embeddings"]
    if context_length > original:
        buffer: torch.Tensor = getattr(module, "inv_freq" if layer is None else f"{layer}_inv_freq")
        more = {} if layer is None else {"layer_type": layer}
        found, _ = ROPE_INIT_FUNCTIONS[kind](module.config, buffer.device, seq_len=context_length, **more)
        buffer.copy_(found)
    return "default"
