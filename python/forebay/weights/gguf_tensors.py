"""The tensors of a GGUF file under their Hugging Face names, dequantised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from forebay.weights.config import ModelConfig
from forebay.weights.errors import ModelError, UnsupportedModelError
from forebay.weights.gguf_blocks import as_blocks
from forebay.weights.gguf_file import GgufFiles, GgufTensor
from forebay.weights.parts import GroupedQuery
from forebay.weights.quantization import COMPUTED_AS

__all__ = ["SUPPORTED_TYPES", "check_types", "hf_tensor_names", "iter_tensors", "stored_formats"]

SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Tables for the rotary embedding: they are part of the config here (`gguf_config`), not weights.
_ROPE_TENSORS = ("rope_freqs.weight",)


def check_types(files: GgufFiles) -> None:
    """Raises UnsupportedModelError if a tensor is stored in a format that can't be dequantised."""
    unknown = sorted({tensor.type.name for tensor in files.tensors.values()} - set(SUPPORTED_TYPES))
    if unknown:
        raise UnsupportedModelError(
            f"tensors of type {', '.join(unknown)} are not supported; supported: {', '.join(SUPPORTED_TYPES)}"
        )


def hf_tensor_names(files: GgufFiles, config: ModelConfig) -> dict[str, str]:
    """GGUF name to Hugging Face name of every tensor that `iter_tensors` yields, in the file's order."""
    names = {}
    for name in files.tensors:
        if name in _ROPE_TENSORS or (name == "output.weight" and config.tie_word_embeddings):
            continue
        names[name] = _hf_name(name)
    return names


def stored_formats(files: GgufFiles, config: ModelConfig) -> dict[str, str]:
    """Hugging Face name to type of the matrices that can be computed with in blocks.

    A tied head is the embedding's tensor under a name of its own.
    """
    names = hf_tensor_names(files, config)
    if config.tie_word_embeddings:
        names["token_embd.weight"] = _HEAD
    types = {hf_name: files.tensors[name].type.name for name, hf_name in names.items()}
    return {name: kind for name, kind in types.items() if kind in COMPUTED_AS and name != _EMBEDDING}


def iter_tensors(
    files: GgufFiles, config: ModelConfig, in_blocks: Mapping[str, str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (Hugging Face name, float32 tensor) for each weight, one in memory at a time.

    Of the names in `in_blocks` it is blocks of that type, uint8 [rows, bytes]; a tied head's as well, if it is named.
    """
    in_blocks = in_blocks or {}
    check_types(files)
    # Only the llama converter reorders: it makes the two halves of a head alternate, as the original Llama code did.
    attention = config.attention
    permuted = attention if files.architecture == "llama" and isinstance(attention, GroupedQuery) else None
    for name, hf_name in hf_tensor_names(files, config).items():
        stored = files.tensors[name]
        if hf_name == _EMBEDDING and config.tie_word_embeddings and _HEAD in in_blocks:
            yield _HEAD, torch.from_numpy(as_blocks(stored, in_blocks[_HEAD]))
        # A row's blocks go where the row goes.
        kind = in_blocks.get(hf_name)
        tensor = dequantized(stored) if kind is None else torch.from_numpy(as_blocks(stored, kind))
        if permuted and ".attn_q." in name:
            tensor = _halves(tensor, permuted.heads)
        elif permuted and ".attn_k." in name:
            tensor = _halves(tensor, permuted.kv_heads)
        yield hf_name, tensor


def dequantized(tensor: GgufTensor) -> torch.Tensor:
    """The tensor's values, float32, in its shape; memory of its own."""
    if tensor.type == GGMLQuantizationType.F32:
        values = tensor.data.view(np.float32).copy()
    else:
        values = dequantize(tensor.data, tensor.type)
    return torch.from_numpy(values.reshape(tensor.shape))


def _halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """[heads * head_dim, ...]: in each head, from (0, h, 1, h + 1, ...) back to (0, 1, ..., h, h + 1, ...)."""
    pairs = tensor.view(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _hf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if kind in ("weight", "bias"):
        if stem in _GLOBAL_NAMES:
            return f"{_GLOBAL_NAMES[stem]}.{kind}"
        prefix, _, rest = stem.partition(".")
        layer, _, part = rest.partition(".")
        if prefix == "blk" and layer.isdigit() and part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    raise ModelError(f"the GGUF file has a tensor {name!r} that the model has no place for")
