"""The readers of a model's weights, one tensor at a time, under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from forebay.weights.codes import Raw
from forebay.weights.config import ModelConfig
from forebay.weights.encoder_config import EncoderConfig
from forebay.weights.errors import ModelError
from forebay.weights.gguf_file import GgufFiles
from forebay.weights.gguf_tensors import EMBEDDING, HEAD, iter_tensors, tensor_shapes
from forebay.weights.index import placed
from forebay.weights.matrices import Matrices
from forebay.weights.named import Piece, pieces
from forebay.weights.shards import WHOLE, Cuts

__all__ = ["iter_kept", "iter_weights", "quantised_matrices", "spare_biases", "weight_shapes"]

_MAPPED = 16 << 20
"""Bytes of a file that are read before it is mapped anew. The read part of a mapping stays in this process's memory."""


def quantised_matrices(model: dict[str, Any], config: ModelConfig | EncoderConfig) -> Matrices:
    """The quantised matrices of safetensors, found in their headers. Raises ModelError for parts that do not fit."""
    files = _safetensors(model)
    stored = config.stored if isinstance(config, ModelConfig) else None
    return Matrices.find(files, stored, _Names.read(files, config).wanted)


def spare_biases(model: dict[str, Any], config: ModelConfig) -> frozenset[str]:
    """Biases that a model need not have. They are 0, of matrices that GPTQ has quantised.

    Its tools write some for all.
    """
    if model["format"] == "gguf" or config.stored is None or config.stored.method != "gptq":
        return frozenset()
    return quantised_matrices(model, config).zero_biases


def iter_weights(
    model: dict[str, Any],
    config: ModelConfig | EncoderConfig,
    in_blocks: Mapping[str, str] | None = None,
    cuts: Cuts = WHOLE,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each weight's name (`model.layers.0.self_attn.q_proj.weight`, ...) and value, on the CPU.

    `model` is the output of `forebay.weights.describe`, of which `format` and `files` are used. Safetensors keep the
    type of the file and lie in its memory map, so copy values that outlive a step of the iteration. Quantised matrices
    are multiplied out to float32. GGUF tensors are dequantised to float32, except those in `in_blocks`, which come as
    blocks of that type. A tied `lm_head.weight`, buffers that the model computes itself and layers behind the last one
    are left out. Weights in `cuts` come in part.
    """
    for name, weight in iter_kept(model, config, in_blocks, lambda name: False, cuts):
        assert isinstance(weight, torch.Tensor)
        yield name, weight


def iter_kept(
    model: dict[str, Any],
    config: ModelConfig | EncoderConfig,
    in_blocks: Mapping[str, str] | None,
    keeps: Callable[[str], bool],
    cuts: Cuts = WHOLE,
) -> Iterator[tuple[str, torch.Tensor | Raw]]:
    """Weights as in `iter_weights`. Quantised matrices that `keeps` knows come in stored form."""
    if model["format"] == "gguf":
        yield from iter_tensors(GgufFiles.open(model["files"]), _of_gguf(config), in_blocks, cuts)
        return
    matrices = quantised_matrices(model, config)
    own = _Names.read(_safetensors(model), config)
    for path in _safetensors(model):
        with safe_open(path, framework="pt", device="cpu") as file:
            names = [name for name in file.keys() if own.wanted(path, name) and name not in matrices.beside][::-1]
            names = [name for name in names if own.renamed(matrices.name_of(name)) not in cuts.others]
        while names:
            mapped = 0
            with safe_open(path, framework="pt", device="cpu") as file:
                while names and mapped < _MAPPED:
                    name = names.pop()
                    matrix = matrices.by_codes.get(name)
                    if matrix is None:
                        found = own.pieces(name, tuple(file.get_slice(name).get_shape()))
                        cut = cuts.parts.get(found[0].name) if len(found) == 1 and found[0].name == name else None
                        tensor = file.get_tensor(name) if cut is None else file.get_slice(name)[cut.places]
                        mapped += tensor.nbytes
                        for piece in found:
                            if piece.name in cuts.others:
                                continue
                            part = cuts.parts.get(piece.name)
                            values = tensor if cut is not None else piece.read(tensor)
                            yield piece.name, values if cut is not None or part is None else values[part.places]
                        continue
                    weight = own.renamed(matrix.name)
                    cut = cuts.parts.get(weight)
                    raw = matrices.raw(matrix, path, file)
                    mapped += raw.nbytes
                    if cut is None and keeps(weight) and own.is_whole(matrix.name, matrix.shape):
                        yield weight, raw
                        continue
                    # Scales are of blocks that a part may begin inside of: all of it is multiplied out.
                    whole = raw.codes().values()
                    for piece in own.pieces(matrix.name, matrix.shape):
                        part = cuts.parts.get(piece.name)
                        if piece.name not in cuts.others:
                            values = piece.read(whole)
                            yield piece.name, values if part is None else values[part.places]
                # The mapping goes with its last tensor.
                tensor = raw = None  # type: ignore[assignment]


def weight_shapes(
    model: dict[str, Any],
    config: ModelConfig | EncoderConfig,
    in_blocks: Mapping[str, str] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Shapes in elements of the results of `iter_weights` without cuts. Only headers are read."""
    if model["format"] == "gguf":
        return tensor_shapes(GgufFiles.open(model["files"]), _of_gguf(config), in_blocks)
    matrices = quantised_matrices(model, config)
    own = _Names.read(_safetensors(model), config)
    shapes: dict[str, tuple[int, ...]] = {}
    for matrix in matrices.by_codes.values():
        shapes |= {piece.name: piece.shape for piece in own.pieces(matrix.name, matrix.shape)}
    for path in _safetensors(model):
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():
                if own.wanted(path, name) and name not in matrices.beside and name not in matrices.by_codes:
                    shape = tuple(file.get_slice(name).get_shape())
                    shapes |= {piece.name: piece.shape for piece in own.pieces(name, shape)}
    return shapes


def _safetensors(model: dict[str, Any]) -> list[str]:
    if model["format"] != "safetensors":
        raise ModelError(f"unknown model format {model['format']!r}; known: safetensors, gguf")
    return [str(path) for path in model["files"]]


def _of_gguf(config: ModelConfig | EncoderConfig) -> ModelConfig:
    if isinstance(config, EncoderConfig):
        raise ModelError(f"{config.architecture} is read from safetensors only")
    return config


@dataclass(frozen=True)
class _Names:
    """The tensors of safetensors that are weights of a model."""

    config: ModelConfig | EncoderConfig
    placed: Mapping[str, str] | None
    """Tensor to shard; None: every file counts."""
    embeds_by_head: bool
    """True if a tied pair is saved under the head's name alone."""

    @classmethod
    def read(cls, files: list[str], config: ModelConfig | EncoderConfig) -> _Names:
        """Reads the files' headers, and the index beside them. Raises ModelError."""
        shards = placed(files)
        if not (isinstance(config, ModelConfig) and config.tie_word_embeddings):
            return cls(config, shards, embeds_by_head=False)
        names = set()
        for path in files:
            with safe_open(path, framework="pt", device="cpu") as file:
                names |= {name for name in file.keys() if shards is None or shards.get(name) == Path(path).name}
        embeds = any(name.endswith("embed_tokens.weight") for name in names)
        return cls(config, shards, embeds_by_head=not embeds and HEAD in names)

    def weight(self, tensor: str) -> str:
        """The name of the weight in a tensor."""
        return EMBEDDING if self.embeds_by_head and tensor == HEAD else tensor

    def pieces(self, tensor: str, shape: tuple[int, ...]) -> list[Piece]:
        """The weights in a tensor, none behind the last layer."""
        name = self.weight(tensor)
        if not isinstance(self.config, ModelConfig):
            return [Piece(name, shape, lambda values: values)]
        return [piece for piece in pieces(self.config, name, shape) if self.config.has_place_for(piece.name)]

    def renamed(self, tensor: str) -> str:
        """The name of the weight in a tensor with one; that of the tensor if it has several, or none."""
        found = self.pieces(tensor, (1, 1))
        return found[0].name if len(found) == 1 else tensor

    def is_whole(self, tensor: str, shape: tuple[int, ...]) -> bool:
        """True if a tensor is one weight."""
        found = self.pieces(tensor, shape)
        return len(found) == 1 and found[0].shape == shape

    def wanted(self, path: str, name: str) -> bool:
        """True if a tensor of the file at `path` is a weight of the model."""
        if self.placed is not None and self.placed.get(name) != Path(path).name:
            return False
        if isinstance(self.config, ModelConfig):
            if name == HEAD and self.config.tie_word_embeddings:
                return self.embeds_by_head
            if not self.config.has_place_for(name):
                return False
        # Old Llama checkpoints carry the inverse frequencies of the rotary embedding as a buffer.
        return not name.endswith(".rotary_emb.inv_freq")
