"""The readers of a model's weights, one tensor at a time, under the names of the family."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from forebay.weights.codes import Raw
from forebay.weights.config import ModelConfig
from forebay.weights.encoder_config import EncoderConfig
from forebay.weights.manifest import Manifest
from forebay.weights.quantization import COMPUTED_AS
from forebay.weights.shards import WHOLE, Cuts

__all__ = [
    "EMBEDDING",
    "HEAD",
    "iter_kept",
    "iter_weights",
    "kept_matrices",
    "spare_biases",
    "stored_formats",
    "weight_shapes",
]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def spare_biases(model: Mapping[str, Any]) -> frozenset[str]:
    """Biases that a model need not have. They are 0, of matrices that GPTQ has quantised.

    Its tools write some for all.
    """
    return Manifest(model).zero_biases


def stored_formats(model: Mapping[str, Any], config: ModelConfig) -> dict[str, str]:
    """The types of matrices with products in blocks, by name. Each expert's matrices are among them.

    A tied head is the embedding's tensor under a name of its own.
    """
    types = {name: place.format for name, place in Manifest(model).weights() if place.is_blocks}
    if config.tie_word_embeddings and EMBEDDING in types:
        types[HEAD] = types[EMBEDDING]
    return {name: kind for name, kind in types.items() if kind in COMPUTED_AS and name != EMBEDDING}


def iter_weights(
    model: Mapping[str, Any],
    config: ModelConfig | EncoderConfig,
    in_blocks: Mapping[str, str] | None = None,
    cuts: Cuts = WHOLE,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each weight's name (`model.layers.0.self_attn.q_proj.weight`, ...) and value, on the CPU.

    `model` is the handshake's, of which `files` and `manifest` are used. Numbers keep the type of the file. Quantised
    matrices are multiplied out to float32. GGUF's blocks are dequantised to float32, except those in `in_blocks`, which
    come as blocks of that type, also a tied head if it is named. Weights in `cuts` come in part, and only that part is
    read. No weight is in both.
    """
    for name, weight in iter_kept(model, config, in_blocks, lambda name: False, cuts):
        assert isinstance(weight, torch.Tensor)
        yield name, weight


def iter_kept(
    model: Mapping[str, Any],
    config: ModelConfig | EncoderConfig,
    in_blocks: Mapping[str, str] | None,
    keeps: Callable[[str], bool],
    cuts: Cuts = WHOLE,
) -> Iterator[tuple[str, torch.Tensor | Raw]]:
    """Weights as in `iter_weights`. Quantised matrices that `keeps` knows come in stored form."""
    in_blocks = in_blocks or {}
    manifest = Manifest(model)
    tied = isinstance(config, ModelConfig) and config.tie_word_embeddings
    for name, place in manifest.weights():
        if name in cuts.others:
            continue
        if name == EMBEDDING and tied and HEAD in in_blocks:
            yield HEAD, place.blocks(in_blocks[HEAD])
        if name in in_blocks:
            yield name, place.blocks(in_blocks[name])
        else:
            yield name, place.read(cuts.parts.get(name))
    stored = config.stored if isinstance(config, ModelConfig) else None
    for matrix in manifest.matrices():
        wanted = [name for name in matrix.shapes if name not in cuts.others]
        if not wanted:
            continue
        assert stored is not None
        raw, cut = matrix.raw(stored.scheme), cuts.parts.get(matrix.name)
        if not matrix.weights and cut is None and keeps(matrix.name):
            yield matrix.name, raw
            continue
        # Scales are of blocks that a part may begin inside of: all of it is multiplied out.
        values = raw.codes().values()
        if not matrix.weights:
            yield matrix.name, values if cut is None else values[cut.places]
        for name, part in matrix.weights:
            if name in wanted:
                yield name, part.read(values, cuts.parts.get(name))


def weight_shapes(
    model: Mapping[str, Any], config: ModelConfig | EncoderConfig, in_blocks: Mapping[str, str] | None = None
) -> dict[str, tuple[int, ...]]:
    """Shapes in elements of the results of `iter_weights` without cuts. No file is read."""
    manifest = Manifest(model)
    shapes = {name: place.shape for name, place in manifest.weights()}
    for matrix in manifest.matrices():
        shapes |= matrix.shapes
    tied = isinstance(config, ModelConfig) and config.tie_word_embeddings
    if tied and HEAD in (in_blocks or {}):
        shapes[HEAD] = shapes[EMBEDDING]
    return shapes


def kept_matrices(model: Mapping[str, Any]) -> frozenset[str]:
    """Quantised matrices that can be kept in their bits."""
    matrices = [matrix for matrix in Manifest(model).matrices() if not matrix.weights]
    return frozenset(matrix.name for matrix in matrices if matrix.format != "F8_E5M2")
