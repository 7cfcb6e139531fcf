"""Llama (Touvron et al. 2023) and what shares its blocks: Mistral, and Qwen2 (Yang et al. 2024) with its biases."""

from __future__ import annotations

from forebay.attention.backend import AttentionBackend
from forebay.layers.decoder import Decoder, gated_block
from forebay.layers.ops import Ops
from forebay.layers.params import Parameters
from forebay.weights.config import ModelConfig


def build(config: ModelConfig, params: Parameters, backend: AttentionBackend, ops: Ops) -> Decoder:
    """A Llama with its weights allocated in `params`."""
    blocks = [gated_block(config, params, index, qk_norm=False) for index in range(config.num_hidden_layers)]
    return Decoder(config, params, blocks, backend, ops)
