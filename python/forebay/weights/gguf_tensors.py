"""The tensors of a GGUF file under their Hugging Face names, dequantised."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from forebay.weights import shards
from forebay.weights.config import ModelConfig
from forebay.weights.errors import UnsupportedModelError
from forebay.weights.gguf_blocks import as_blocks
from forebay.weights.gguf_file import GgufFiles, GgufTensor
from forebay.weights.gguf_names import PERMUTED, LatentUp, Part, stored_weights
from forebay.weights.parts import GroupedQuery
from forebay.weights.quantization import COMPUTED_AS
from forebay.weights.shards import WHOLE, Cut, Cuts

__all__ = [
    "EMBEDDING",
    "HEAD",
    "SUPPORTED_TYPES",
    "check_types",
    "dequantized",
    "hf_tensor_names",
    "iter_tensors",
    "stored_formats",
    "tensor_shapes",
]

SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_AT_ONCE = 1 << 20
"""Elements that are dequantised at a time. Temporary memory is a few times as much."""


def check_types(files: GgufFiles) -> None:
    """Raises UnsupportedModelError if a tensor is stored in a format that can't be dequantised."""
    unknown = sorted({tensor.type.name for tensor in files.tensors.values()} - set(SUPPORTED_TYPES))
    if unknown:
        raise UnsupportedModelError(
            f"tensors of type {', '.join(unknown)} are not supported; supported: {', '.join(SUPPORTED_TYPES)}"
        )


def hf_tensor_names(files: GgufFiles, config: ModelConfig) -> dict[str, str]:
    """GGUF name to Hugging Face name of every tensor that is one weight, in the file's order."""
    return {stored.tensor.name: name for name, stored in _whole(files, config).items()}


def stored_formats(files: GgufFiles, config: ModelConfig) -> dict[str, str]:
    """The types of matrices with products in blocks, by Hugging Face name. Each expert's matrices are among them.

    A tied head is the embedding's tensor under a name of its own.
    """
    weights = stored_weights(files, config)
    types = {name: stored.tensor.type.name for name, stored in weights.items() if isinstance(stored, Part)}
    if config.tie_word_embeddings and EMBEDDING in types:
        types[HEAD] = types[EMBEDDING]
    return {name: kind for name, kind in types.items() if kind in COMPUTED_AS and name != EMBEDDING}


def tensor_shapes(
    files: GgufFiles, config: ModelConfig, in_blocks: Mapping[str, str] | None = None
) -> dict[str, tuple[int, ...]]:
    """Shapes in elements of the results of `iter_tensors` without cuts. Only headers are read."""
    shapes = {name: stored.shape for name, stored in stored_weights(files, config).items()}
    if config.tie_word_embeddings and HEAD in (in_blocks or {}):
        shapes[HEAD] = shapes[EMBEDDING]
    return shapes


def iter_tensors(
    files: GgufFiles, config: ModelConfig, in_blocks: Mapping[str, str] | None = None, cuts: Cuts = WHOLE
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (Hugging Face name, float32 tensor) for each weight, one in memory at a time.

    Names in `in_blocks` come as blocks of that type, uint8 [rows, bytes], also a tied head if it is named. Names in
    `cuts` come in part, and only those rows and columns are read. No weight is in both.
    """
    in_blocks = in_blocks or {}
    check_types(files)
    # Llama's converter and its kin's reorder: they make the halves of a head alternate, as the original code did.
    attention = config.attention
    permuted = attention if files.architecture in PERMUTED and isinstance(attention, GroupedQuery) else None
    for name, stored in stored_weights(files, config).items():
        cut = cuts.parts.get(name)
        if name in cuts.others:
            continue
        if isinstance(stored, LatentUp):
            yield name, _both_up(stored, cut)
            continue
        if name == EMBEDDING and config.tie_word_embeddings and HEAD in in_blocks:
            yield HEAD, _blocks(stored, in_blocks[HEAD])
        # A row's blocks go where the row goes.
        if name in in_blocks:
            tensor = _blocks(stored, in_blocks[name])
        elif cut is None:
            tensor = dequantized(stored.tensor, stored.shape, stored.first)
        else:
            tensor = _part(stored, cut)
        if permuted and ".q_proj." in name:
            tensor = _halves(tensor, permuted.heads * len(tensor) // stored.shape[0])
        elif permuted and ".k_proj." in name:
            tensor = _halves(tensor, permuted.kv_heads * len(tensor) // stored.shape[0])
        yield name, tensor


def dequantized(
    tensor: GgufTensor, shape: tuple[int, ...] | None = None, first: int = 0, columns: shards.Part | None = None
) -> torch.Tensor:
    """Values of the tensor, float32 in `shape`, from row `first` on, or all of them. They have memory of their own.

    `columns` restricts each row, and only blocks with these columns are read. Nothing of the file stays in this
    process's memory, since the mapping of a whole model would be as large as the model.
    """
    shape = tensor.shape if shape is None else shape
    rows, width = math.prod(shape[:-1]), math.prod(shape[-1:])
    columns = shards.ALONE.of(width) if columns is None else columns
    of_row, inside = _blocks_of(tensor, columns)
    values = np.empty((rows, width), np.float32)
    step = max(1, _AT_ONCE // max(1, width))
    for at in range(0, rows, step):
        count = min(step, rows - at)
        data = np.ascontiguousarray(tensor.data[first + at : first + at + count, of_row])
        values[at : at + count] = dequantize(data, tensor.type)[:, inside]
        tensor.release(first + at, count)
    return torch.from_numpy(values.reshape(shape))


def _part(stored: Part, cut: Cut) -> torch.Tensor:
    """A part of a weight; a weight of one dimension is a row of the file."""
    if cut.columns is None:
        return dequantized(stored.tensor, (cut.rows.size,), stored.first, cut.rows)
    return dequantized(stored.tensor, (cut.rows.size, cut.columns.size), stored.first + cut.rows.first, cut.columns)


def _blocks_of(tensor: GgufTensor, columns: shards.Part) -> tuple[slice, slice]:
    """The place of these columns' blocks in the bytes of a row, and the columns' place in those blocks."""
    block, size = GGML_QUANT_SIZES[tensor.type]
    first, end = columns.first // block, -(-columns.end // block)
    return slice(first * size, end * size), slice(columns.first - first * block, columns.end - first * block)


def _whole(files: GgufFiles, config: ModelConfig) -> dict[str, Part]:
    """The weights that are a tensor of the file, as it is."""
    weights = stored_weights(files, config)
    return {name: stored for name, stored in weights.items() if isinstance(stored, Part) and stored.whole}


def _both_up(stored: LatentUp, cut: Cut | None) -> torch.Tensor:
    """The weight in the checkpoint's form, [heads * (nope_dim + value_dim), rank], or the heads of a part of it."""
    heads, rank, nope = stored.keys.shape
    first, count, values = 0, heads, stored.values.shape[1]
    if cut is not None:
        first, count = cut.rows.first // (nope + values), cut.rows.size // (nope + values)
    keys = dequantized(stored.keys, (count, rank, nope), first * rank).transpose(1, 2)
    return torch.cat((keys, dequantized(stored.values, (count, values, rank), first * values)), dim=1).flatten(0, 1)


def _blocks(stored: Part, kind: str) -> torch.Tensor:
    tensor, first, rows = stored.tensor, stored.first, math.prod(stored.shape[:-1])
    blocks = torch.from_numpy(as_blocks(replace(tensor, data=tensor.data[first : first + rows]), kind))
    tensor.release(first, rows)
    return blocks


def _halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """[heads * head_dim, ...]: in each head, from (0, h, 1, h + 1, ...) back to (0, 1, ..., h, h + 1, ...)."""
    pairs = tensor.view(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
