"""Builds models from their parts."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from forebay.attention.backend import AttentionBackend
from forebay.attention.cpu import CpuAttention
from forebay.attention.whole import WholeAttention
from forebay.layers.blocks import decoder_blocks
from forebay.layers.decoder import Decoder
from forebay.layers.draft_heads import DraftHead
from forebay.layers.ops import Ops
from forebay.layers.params import Parameters
from forebay.layers.rotary import at_context
from forebay.models import gemma3, qwen2_5_vl, qwen3_vl
from forebay.models.bert import Bert
from forebay.models.called import CalledModel
from forebay.models.whole import WholeDecoder
from forebay.weights.called import CalledConfig
from forebay.weights.config import ModelConfig
from forebay.weights.encoder_config import EncoderConfig
from forebay.weights.errors import ModelError
from forebay.weights.heads import HeadConfig
from forebay.weights.pooling import Pooling

Model: TypeAlias = Decoder | CalledModel | Bert | WholeDecoder
"""A model of any kind."""
_TOWERS = {"windows": qwen2_5_vl.build, "table": qwen3_vl.build, "siglip": gemma3.build}
"""The builders of models with a vision tower, by the tower's kind."""


def build(config: ModelConfig, params: Parameters, backend: AttentionBackend, ops: Ops, context_length: int) -> Decoder:
    """Builds the model of `config`. Its weights are allocated, but not filled. Raises `UnsupportedModelError`."""
    config = _of_requests(config, context_length)
    if config.vision is not None:
        return _TOWERS[config.vision.kind](config, params, backend, ops)
    return Decoder(config, params, decoder_blocks(config, params), backend, ops)


def attach_head(model: Decoder, config: HeadConfig, params: Parameters, context_length: int) -> DraftHead:
    """Attaches a draft head. Its weights are allocated, but not filled. Raises `UnsupportedModelError`."""
    head = DraftHead(replace(config, shape=_of_requests(config.shape, context_length)), params, model)
    model.attach(head)
    return head


def _of_requests(config: ModelConfig, context_length: int) -> ModelConfig:
    """Returns the configuration for requests of at most `context_length` positions."""
    ropes = (replace(rope, scaling=at_context(rope.scaling, context_length)) for rope in config.ropes)
    # A window or a chunk that is as long as every request has no effect.
    kinds = (
        replace(kind, window=_below(kind.window, context_length), chunk=_below(kind.chunk, context_length))
        for kind in config.kinds
    )
    return replace(config, ropes=tuple(ropes), kinds=tuple(kinds))


def build_whole(
    config: ModelConfig, pooling: Pooling | None, params: Parameters, ops: Ops, context_length: int
) -> WholeDecoder:
    """Builds the bidirectional decoder of `config`. Raises `ModelError` unless it is a pooling model."""
    if pooling is None:
        raise ModelError(f"{config.architecture} can't generate, and the config has no `pooling`")
    return WholeDecoder(build(config, params, WholeAttention(), ops, context_length), pooling)


def _below(positions: int | None, context_length: int) -> int | None:
    return None if positions is None or positions >= context_length else positions


def build_called(
    config: CalledConfig, directory: str, params: Parameters, ops: Ops, context_length: int
) -> CalledModel:
    """Builds a folder's model in Transformers' code, without weights. Raises `UnsupportedModelError`."""
    return CalledModel(config, directory, params, CpuAttention(), ops, context_length)


def build_encoder(config: EncoderConfig, pooling: Pooling | None, params: Parameters) -> Bert:
    """Builds the encoder of `config`, without filling its weights. Raises `ModelError` unless it is a pooling model."""
    if pooling is None:
        raise ModelError(f"{config.architecture} can't generate, and the config has no `pooling`")
    return Bert(config, pooling, params)
