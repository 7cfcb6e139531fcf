"""Reading the weights of a model, one tensor at a time, under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors import safe_open

from forebay.weights.config import ModelConfig
from forebay.weights.encoder_config import EncoderConfig
from forebay.weights.errors import ModelError
from forebay.weights.gguf_file import GgufFiles
from forebay.weights.gguf_tensors import iter_tensors, tensor_shapes
from forebay.weights.scales import SCALE_SUFFIX, Scales
from forebay.weights.shards import WHOLE, Cuts

__all__ = ["iter_weights", "weight_shapes"]

_MAPPED = 16 << 20
"""Bytes that are read of a file before it is mapped anew: what was read of a mapping stays in this process's memory."""


def iter_weights(
    model: dict[str, Any],
    config: ModelConfig | EncoderConfig,
    in_blocks: Mapping[str, str] | None = None,
    cuts: Cuts = WHOLE,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each weight's name (`model.layers.0.self_attn.q_proj.weight`, ...) and value, on the CPU.

    `model` is what `forebay.weights.fetch` prints; its `format` and `files` are used. Safetensors keep the type of the
    file and lie in its memory map: copy what outlives the step of the iteration. 8-bit floats are
    multiplied out to float32. GGUF tensors are dequantised to float32, but those named in `in_blocks`: of these it is
    blocks of that type. A tied `lm_head.weight`, buffers that the model computes itself and layers behind the last one
    are left out. Of weights in `cuts` only these parts are read.
    """
    if model["format"] == "gguf":
        yield from iter_tensors(GgufFiles.open(model["files"]), _of_gguf(config), in_blocks, cuts)
        return
    scales = Scales(_safetensors(model), config)
    for path in _safetensors(model):
        with safe_open(path, framework="pt", device="cpu") as file:
            names = [name for name in file.keys() if _wanted(name, config) and name not in cuts.others]
        names.reverse()
        while names:
            mapped = 0
            with safe_open(path, framework="pt", device="cpu") as file:
                while names and mapped < _MAPPED:
                    name = names.pop()
                    cut = cuts.parts.get(name)
                    if cut is None:
                        tensor, first = file.get_tensor(name), (0, 0)
                    else:
                        tensor, first = file.get_slice(name)[cut.places], cut.first
                    mapped += tensor.nbytes
                    yield name, scales.applied(name, tensor, first)
                # The mapping goes with its last tensor.
                del tensor


def weight_shapes(
    model: dict[str, Any],
    config: ModelConfig | EncoderConfig,
    in_blocks: Mapping[str, str] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Shapes in elements of what `iter_weights` will yield without cuts, read from the files' headers only."""
    if model["format"] == "gguf":
        return tensor_shapes(GgufFiles.open(model["files"]), _of_gguf(config), in_blocks)
    shapes = {}
    for path in _safetensors(model):
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():
                if _wanted(name, config):
                    shapes[name] = tuple(file.get_slice(name).get_shape())
    return shapes


def _safetensors(model: dict[str, Any]) -> list[str]:
    if model["format"] != "safetensors":
        raise ModelError(f"unknown model format {model['format']!r}; known: safetensors, gguf")
    return [str(path) for path in model["files"]]


def _of_gguf(config: ModelConfig | EncoderConfig) -> ModelConfig:
    if isinstance(config, EncoderConfig):
        raise ModelError(f"{config.architecture} is read from safetensors only")
    return config


def _wanted(name: str, config: ModelConfig | EncoderConfig) -> bool:
    if name == "lm_head.weight" and isinstance(config, ModelConfig) and config.tie_word_embeddings:
        return False
    if isinstance(config, ModelConfig) and not config.has_place_for(name):
        return False
    if name.endswith(SCALE_SUFFIX) and isinstance(config, ModelConfig) and config.scale_block is not None:
        return False
    # Old Llama checkpoints carry the inverse frequencies of the rotary embedding as a buffer.
    return not name.endswith(".rotary_emb.inv_freq")
