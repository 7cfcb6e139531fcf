"""Readers of a model's weights, one tensor at a time, with the names of the model's family."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from forebay.weights.codes import Raw
from forebay.weights.config import ModelConfig
from forebay.weights.encoder_config import EncoderConfig
from forebay.weights.manifest import Manifest
from forebay.weights.shards import WHOLE, Cuts

__all__ = ["iter_kept", "iter_weights", "kept_matrices", "spare_biases", "weight_shapes"]


def spare_biases(model: Mapping[str, Any]) -> frozenset[str]:
    """Returns the biases that may be left out: biases that are 0, and belong to matrices that GPTQ has quantised.

    GPTQ's tools write biases for all matrices.
    """
    return Manifest(model).zero_biases


def iter_weights(
    model: Mapping[str, Any], config: ModelConfig | EncoderConfig, cuts: Cuts = WHOLE
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each weight's name (`model.layers.0.self_attn.q_proj.weight`, ...) and value, on the CPU.

    `model` is from the handshake; its `files` and `manifest` are used. Values keep the type of the file. Quantised
    matrices and GGUF blocks are dequantised to float32. Of weights in `cuts`, only the given part is read.
    """
    for name, weight in iter_kept(model, config, lambda name: False, cuts):
        assert isinstance(weight, torch.Tensor)
        yield name, weight


def iter_kept(
    model: Mapping[str, Any],
    config: ModelConfig | EncoderConfig,
    keeps: Callable[[str], bool],
    cuts: Cuts = WHOLE,
) -> Iterator[tuple[str, torch.Tensor | Raw]]:
    """Yields weights like `iter_weights`, except that quantised matrices that `keeps` accepts are in stored form."""
    manifest = Manifest(model)
    for name, place in manifest.weights():
        if name not in cuts.others:
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
        # A part may begin inside a block that has one scale, so the whole matrix is dequantised.
        values = raw.codes().values()
        if not matrix.weights:
            yield matrix.name, values if cut is None else values[cut.places]
        for name, part in matrix.weights:
            if name in wanted:
                yield name, part.read(values, cuts.parts.get(name))


def weight_shapes(model: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes, in elements, of the weights of `iter_weights` without cuts. Reads no file."""
    manifest = Manifest(model)
    shapes = {name: place.shape for name, place in manifest.weights()}
    for matrix in manifest.matrices():
        shapes |= matrix.shapes
    return shapes


def kept_matrices(model: Mapping[str, Any]) -> frozenset[str]:
    """Returns the quantised matrices that can be kept in their stored format."""
    matrices = [matrix for matrix in Manifest(model).matrices() if not matrix.weights]
    return frozenset(matrix.name for matrix in matrices if matrix.format != "F8_E5M2")
