"""The Hugging Face names of the weights that a GGUF file's tensors hold.

One tensor may hold the matrices of all experts of a layer, and one matrix may be two tensors. The names are those of
`gguf.constants.TENSOR_NAMES`. llama.cpp's `convert_hf_to_gguf.py` shows the changes to tensors before they are written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from forebay.weights.config import ModelConfig
from forebay.weights.errors import ModelError
from forebay.weights.gguf_file import GgufFiles, GgufTensor
from forebay.weights.parts import Experts, GroupedQuery

__all__ = ["PERMUTED", "LatentUp", "Part", "Stored", "stored_weights"]

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
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_OF_EXPERTS = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_down_exps": ("down_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
}
"""Tensors [experts, rows, columns], with the matrices of an expert that their rows hold, one after the other."""
_OF_LAYER = re.compile(r"blk\.(?P<layer>[0-9]{1,9})\.(?P<part>.+)")
_CORRECTION = "exp_probs_b.bias"
_FUSED_QKV, _FUSED_UP = "attn_qkv.weight", "ffn_up.weight"
_KEYS_UP, _VALUES_UP, _BOTH_UP = "attn_k_b.weight", "attn_v_b.weight", "attn_kv_b.weight"
# Tables for the rotary embedding: they are part of the config here (`gguf_config`), not weights.
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
PERMUTED = ("llama", "mistral3", "smollm3", "granite", "granitemoe", "ernie4_5", "ernie4_5-moe")
"""Architectures whose files have heads in which the rows of two halves alternate."""


@dataclass(frozen=True)
class Part:
    """A weight that is a range of rows of one tensor."""

    tensor: GgufTensor
    shape: tuple[int, ...]
    """The shape of the weight."""
    first: int = 0
    """The first row. Rows of all outer dimensions of the tensor are counted together."""

    @property
    def whole(self) -> bool:
        """True if the weight is the whole tensor."""
        return self.shape == self.tensor.shape


@dataclass(frozen=True)
class LatentUp:
    """The projection of latent rows to keys and values, in two tensors. Each has the form for an absorbed product."""

    keys: GgufTensor
    """The key part, [heads, rank, nope_dim], transposed."""
    values: GgufTensor
    """The value part, [heads, value_dim, rank]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight: a head's keys, then its values, [heads * (nope_dim + value_dim), rank]."""
        heads, rank, nope = self.keys.shape
        return heads * (nope + self.values.shape[1]), rank


Stored: TypeAlias = Part | LatentUp


def stored_weights(files: GgufFiles, config: ModelConfig) -> dict[str, Stored]:
    """Every weight of the model in the files, in their order.

    Raises ModelError for a tensor without a place in the model.

    A head that is tied to the embedding, and layers behind the last one, are left out.
    """
    found: dict[str, Stored] = {}
    for name, tensor in files.tensors.items():
        if name in _ROPE_TENSORS or (name == "output.weight" and config.tie_word_embeddings):
            continue
        for hf_name, stored in _weights_in(files, name, tensor, config):
            if hf_name in found:
                raise ModelError(f"the GGUF file has {hf_name} twice, once as {name!r}")
            found[hf_name] = stored
    return found


def _weights_in(files: GgufFiles, name: str, tensor: GgufTensor, config: ModelConfig) -> Iterator[tuple[str, Stored]]:
    found = _OF_LAYER.fullmatch(name)
    if found is None:
        stem, _, kind = name.rpartition(".")
        if stem not in _GLOBAL_NAMES or kind not in ("weight", "bias"):
            raise _no_place(name)
        yield f"{_GLOBAL_NAMES[stem]}.{kind}", Part(tensor, tensor.shape)
        return
    layer, part = found["layer"], found["part"]
    at = f"model.layers.{layer}."
    if not config.has_place_for(at):
        return
    stem, _, kind = part.rpartition(".")
    if files.architecture == "phi3" and part in (_FUSED_QKV, _FUSED_UP):
        yield from _fused(at, part, tensor, config)
    elif stem in _LAYER_NAMES and kind in ("weight", "bias"):
        yield f"{at}{_LAYER_NAMES[stem]}.{kind}", Part(tensor, tensor.shape)
    elif stem in _OF_EXPERTS and kind == "weight":
        yield from _experts(f"{at}mlp.experts", tensor, _OF_EXPERTS[stem], _expert_count(config, int(layer)))
    elif part == _CORRECTION:
        yield f"{at}mlp.gate.e_score_correction_bias", Part(tensor, tensor.shape)
    elif part in (_KEYS_UP, _VALUES_UP):
        # Some files have the matrix in both forms.
        if part == _KEYS_UP and f"blk.{layer}.{_BOTH_UP}" not in files.tensors:
            yield f"{at}self_attn.kv_b_proj.weight", _latent_up(files, layer)
    else:
        raise _no_place(name)


def _fused(at: str, part: str, tensor: GgufTensor, config: ModelConfig) -> Iterator[tuple[str, Part]]:
    """Queries, keys and values in one tensor, or gates and ups."""
    shape, (rows, columns) = config.attention, tensor.shape
    if part == _FUSED_UP:
        sizes = {"mlp.gate_proj": rows // 2, "mlp.up_proj": rows // 2}
    else:
        assert isinstance(shape, GroupedQuery)
        keys = shape.kv_heads * shape.head_dim
        sizes = {"self_attn.q_proj": shape.heads * shape.head_dim, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    if sum(sizes.values()) != rows:
        raise ModelError(f"the GGUF file has {tensor.name} of {list(tensor.shape)}, which its parts can't share")
    first = 0
    for name, size in sizes.items():
        yield f"{at}{name}.weight", Part(tensor, (size, columns), first)
        first += size


def _expert_count(config: ModelConfig, layer: int) -> int:
    feed = config.feeds[layer] if layer < len(config.feeds) else None
    return feed.count if isinstance(feed, Experts) else 0


def _experts(prefix: str, tensor: GgufTensor, kinds: tuple[str, ...], wanted: int) -> Iterator[tuple[str, Part]]:
    if len(tensor.shape) != 3 or tensor.shape[0] != wanted or tensor.shape[1] % len(kinds):
        raise ModelError(f"the GGUF file has {tensor.name} of {list(tensor.shape)}, and the layer has {wanted} experts")
    experts, rows, columns = tensor.shape
    of_one = rows // len(kinds)
    for expert in range(experts):
        for place, kind in enumerate(kinds):
            first = expert * rows + place * of_one
            yield f"{prefix}.{expert}.{kind}.weight", Part(tensor, (of_one, columns), first)


def _latent_up(files: GgufFiles, layer: str) -> LatentUp:
    keys, values = (files.tensors.get(f"blk.{layer}.{part}") for part in (_KEYS_UP, _VALUES_UP))
    if keys is None or values is None:
        raise ModelError(f"the GGUF file has one of blk.{layer}.{_KEYS_UP} and blk.{layer}.{_VALUES_UP} only")
    same = len(keys.shape) == len(values.shape) == 3 and keys.shape[:2] == (values.shape[0], values.shape[2])
    if not same:
        raise ModelError(
            f"{keys.name} of {list(keys.shape)} and {values.name} of {list(values.shape)} are not of the same heads"
        )
    return LatentUp(keys, values)


def _no_place(name: str) -> ModelError:
    return ModelError(f"the GGUF file has a tensor {name!r} that the model has no place for")
