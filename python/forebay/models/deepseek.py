"""DeepSeek V2 and V3 (2024), with latent attention and mixtures of experts. Kimi K2 (2025) is a V3 of other sizes.

DeepSeek V3.2 (2025) and GLM-5 (2026) have indexers besides, in all layers or in some.
"""

from __future__ import annotations

from forebay.attention.backend import AttentionBackend
from forebay.layers.blocks import block_of, feed_forward, latent_attention
from forebay.layers.decoder import Decoder
from forebay.layers.ops import Ops
from forebay.layers.params import Parameters
from forebay.weights.config import ModelConfig


def build(config: ModelConfig, params: Parameters, backend: AttentionBackend, ops: Ops) -> Decoder:
    """A DeepSeek with its weights allocated in `params`; its first layers may be dense."""
    blocks = []
    for index in range(config.num_hidden_layers):
        attention = latent_attention(config, params, index)
        blocks.append(block_of(config, params, index, attention, feed_forward(config, params, index)))
    return Decoder(config, params, blocks, backend, ops)
