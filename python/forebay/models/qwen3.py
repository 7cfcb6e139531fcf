"""Qwen3 dense models (Yang et al. 2025): query and key heads are normalised before they are rotated."""

from __future__ import annotations

from forebay.attention.backend import AttentionBackend
from forebay.layers.decoder import Decoder, gated_block
from forebay.layers.ops import Ops
from forebay.layers.params import Parameters
from forebay.weights.config import ModelConfig


def build(config: ModelConfig, params: Parameters, backend: AttentionBackend, ops: Ops) -> Decoder:
    """A Qwen3 with its weights allocated in `params`."""
    blocks = [gated_block(config, params, index, qk_norm=True) for index in range(config.num_hidden_layers)]
    return Decoder(config, params, blocks, backend, ops)
