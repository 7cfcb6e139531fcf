"""Qwen2 and Qwen2.5 (Yang et al. 2024): a Llama whose query, key and value projections always have a bias."""

from __future__ import annotations

from forebay.attention.backend import AttentionBackend
from forebay.layers.decoder import Decoder, gated_block
from forebay.layers.params import Parameters
from forebay.weights.config import ModelConfig


def build(config: ModelConfig, params: Parameters, backend: AttentionBackend) -> Decoder:
    """A Qwen2 with its weights allocated in `params`."""
    blocks = [gated_block(config, params, index, qk_norm=False) for index in range(config.num_hidden_layers)]
    return Decoder(config, params, blocks, backend)
