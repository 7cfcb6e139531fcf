"""Llama (Touvron et al. 2023) and families with its blocks: Mistral, Qwen2, Qwen3 (Yang et al. 2024, 2025), GLM-4 MoE.

Qwen2 has biases on three projections. Qwen3 normalises query and key heads before they are rotated. Qwen3-MoE has
experts in place of most dense layers. GLM-4 MoE (GLM-4.5, 2025) routes like DeepSeek-V3, and rotates half a head.
"""

from __future__ import annotations

from forebay.attention.backend import AttentionBackend
from forebay.layers.blocks import grouped_blocks
from forebay.layers.decoder import Decoder
from forebay.layers.ops import Ops
from forebay.layers.params import Parameters
from forebay.weights.config import ModelConfig


def build(config: ModelConfig, params: Parameters, backend: AttentionBackend, ops: Ops) -> Decoder:
    """A decoder with grouped-query attention, its weights allocated in `params`."""
    return Decoder(config, params, grouped_blocks(config, params), backend, ops)
