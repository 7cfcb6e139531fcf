"""Llama (Touvron et al. 2023) and what shares its blocks: Mistral, Qwen2 and Qwen3 (Yang et al. 2024, 2025).

Qwen2 has biases on three projections. Qwen3 normalises query and key heads before they are rotated.
"""

from __future__ import annotations

from forebay.attention.backend import AttentionBackend
from forebay.layers.blocks import feed_forward, grouped_attention, pre_norm
from forebay.layers.decoder import Decoder
from forebay.layers.ops import Ops
from forebay.layers.params import Parameters
from forebay.weights.config import ModelConfig


def build(config: ModelConfig, params: Parameters, backend: AttentionBackend, ops: Ops) -> Decoder:
    """A Llama with its weights allocated in `params`."""
    blocks = []
    for index in range(config.num_hidden_layers):
        attention = grouped_attention(config, params, index)
        blocks.append(pre_norm(config, params, index, attention, feed_forward(config, params, index)))
    return Decoder(config, params, blocks, backend, ops)
