"""The GGUF metadata of attention and experts, family by family, as keys of a Hugging Face `config.json`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from forebay.weights.errors import ModelError, UnsupportedModelError
from forebay.weights.gguf_file import GgufFiles

__all__ = ["ARCHITECTURES", "family_keys", "layer_count", "required", "shortest"]

_DENSE = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
_QWEN3_MOE, _GLM4_MOE, _DEEPSEEK = "qwen3moe", "glm4moe", "deepseek2"
_OF_EXPERTS = (_QWEN3_MOE, _GLM4_MOE, _DEEPSEEK)
ARCHITECTURES = (*_DENSE, *_OF_EXPERTS)
"""Supported values of `general.architecture`."""

_SOFTMAX, _SIGMOID = 1, 2
_SCORES = {_SOFTMAX: "softmax", _SIGMOID: "sigmoid"}
"""`gguf.ExpertGatingFuncType`"""
_GROUPS = {("softmax", 160): (8, 3), ("sigmoid", 256): (8, 4)}
"""Groups of experts, and kept groups, of DeepSeek V2 and V3. Older converters left them out."""
_NO_CHANGE = (None, False, 0, 1)
_CHANGES = (
    "attention.clamp_kqv",
    "attention.scale",
    "attention.temperature_scale",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_group_scale",
    "final_logit_softcapping",
    "interleave_moe_layer_step",
    "logit_scale",
    "moe_every_n_layers",
    "moe_latent_size",
    "residual_scale",
    "router_logit_softcapping",
    "swiglu_clamp_exp",
    "swiglu_clamp_shexp",
)
"""Keys of other families that share these architectures' names. They compute something else."""


def family_keys(files: GgufFiles) -> dict[str, Any]:
    """Keys of a `config.json` for the name, the attention and the experts. Raises UnsupportedModelError or ModelError.

    Raises for a model that would be computed wrongly, since GGUF has one name for architectures of several kinds.
    """
    family = files.architecture
    if family not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"the GGUF architecture {family!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    if family in _OF_EXPERTS:
        _refuse_changes(files)
    elif int(files.get("expert_count") or 0) > 0:
        raise UnsupportedModelError(f"mixtures of experts of the GGUF architecture {family!r} are not supported")
    if family == _DEEPSEEK:
        return _deepseek(files)
    attention = _grouped(files)
    if family == _QWEN3_MOE:
        return attention | _qwen3_moe(files)
    if family == _GLM4_MOE:
        return attention | _glm4_moe(files)
    if family == "llama" and files.get("attention.sliding_window"):
        return attention | _named("MistralForCausalLM", "mistral")
    return attention | _named(*_DENSE[family])


def layer_count(files: GgufFiles) -> int:
    """The number of computed layers. The layers behind them only predict further tokens."""
    return int(required(files, "block_count")) - int(files.get("nextn_predict_layers") or 0)


def required(files: GgufFiles, key: str) -> Any:
    """A value that the architecture's own metadata must have. Raises ModelError."""
    value = files.get(key)
    if value is None:
        raise ModelError(f"the GGUF file has no '{files.architecture}.{key}'")
    return value


def shortest(value: float) -> float:
    """The shortest decimal of this float32: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _named(architecture: str, model_type: str) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type}


def _refuse_changes(files: GgufFiles) -> None:
    for key in _CHANGES:
        value = files.get(key)
        values = value if isinstance(value, list) else [value]
        if any(one not in _NO_CHANGE for one in values):
            raise UnsupportedModelError(f"'{files.architecture}.{key}' {str(value)[:40]} is not supported")


def _heads(files: GgufFiles) -> tuple[int, int]:
    """Query heads, and heads of keys and values."""
    heads = required(files, "attention.head_count")
    kv_heads = files.get("attention.head_count_kv", heads)
    if isinstance(heads, list) or isinstance(kv_heads, list):
        raise UnsupportedModelError("a number of heads that differs between layers is not supported")
    return int(heads), int(kv_heads)


def _grouped(files: GgufFiles) -> dict[str, Any]:
    heads, kv_heads = _heads(files)
    head_dim = int(files.get("attention.key_length") or int(required(files, "embedding_length")) // heads)
    if int(files.get("attention.value_length") or head_dim) != head_dim:
        raise UnsupportedModelError("keys and values of different lengths are not supported")
    rotated = int(files.get("rope.dimension_count") or head_dim)
    keys = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "qkv_bias": "blk.0.attn_q.bias" in files.tensors,
        "attention_bias": "blk.0.attn_output.bias" in files.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in files.tensors,
    }
    if files.architecture == _GLM4_MOE and rotated <= head_dim:
        return keys | {"partial_rotary_factor": _factor(rotated, head_dim)}
    if rotated != head_dim:
        raise UnsupportedModelError(f"rotary embeddings over {rotated} of {head_dim} elements are not supported")
    return keys


def _factor(part: int, whole: int) -> float:
    """The factor for `whole` that gives `part`, rounded down."""
    factor = part / whole
    return factor if int(whole * factor) == part else math.nextafter(factor, math.inf)


def _qwen3_moe(files: GgufFiles) -> dict[str, Any]:
    if files.get("expert_weights_scale") not in _NO_CHANGE:
        raise UnsupportedModelError("weights of experts with a scale are not supported for qwen3moe")
    norm = files.get("expert_weights_norm")
    return _named("Qwen3MoeForCausalLM", "qwen3_moe") | {
        "num_experts": int(required(files, "expert_count")),
        "num_experts_per_tok": int(required(files, "expert_used_count")),
        "moe_intermediate_size": int(required(files, "expert_feed_forward_length")),
        # No file says it, and llama.cpp does it for all of them.
        "norm_topk_prob": True if norm is None else bool(norm),
        "scoring_func": _scores(files, "softmax"),
    }


def _glm4_moe(files: GgufFiles) -> dict[str, Any]:
    named = _named("Glm4MoeForCausalLM", "glm4_moe")
    norms = {"use_qk_norm": "blk.0.attn_q_norm.weight" in files.tensors}
    return named | norms | _routed(files, _scores(files, "sigmoid"))


def _deepseek(files: GgufFiles) -> dict[str, Any]:
    """The metadata of DeepSeek V2, V3 and GLM-4.7-Flash, which have one name.

    They differ only in the choice of experts.
    """
    heads, _ = _heads(files)
    rotary = int(required(files, "rope.dimension_count"))
    # Files with keys and values in two tensors describe the absorbed heads first, and these ones under other names.
    of_keys = int(files.get("attention.key_length_mla") or required(files, "attention.key_length"))
    of_values = int(files.get("attention.value_length_mla") or required(files, "attention.value_length"))
    if not 0 < rotary < of_keys:
        raise UnsupportedModelError(f"rotary embeddings over {rotary} of {of_keys} elements are not supported")
    query_rank = files.get("attention.q_lora_rank")
    # Files older than the key are of DeepSeek V2, but those whose choice is corrected.
    corrected = any(name.endswith(".exp_probs_b.bias") for name in files.tensors)
    scores = _scores(files, "sigmoid" if corrected else "softmax")
    named = _named("DeepseekV2ForCausalLM", "deepseek_v2")
    if scores == "sigmoid":
        named = _named("DeepseekV3ForCausalLM", "deepseek_v3")
    attention = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": int(query_rank) if query_rank else None,
        "kv_lora_rank": int(required(files, "attention.kv_lora_rank")),
        "qk_nope_head_dim": of_keys - rotary,
        "qk_rope_head_dim": rotary,
        "v_head_dim": of_values,
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in files.tensors,
        "rope_interleave": True,
    }
    return named | attention | _routed(files, scores)


def _scores(files: GgufFiles, default: str) -> str:
    kind = files.get("expert_gating_func")
    if not kind:
        return default
    if kind not in _SCORES:
        raise UnsupportedModelError(
            f"the function of experts' scores {kind} (expert_gating_func) is not supported; supported: "
            + ", ".join(f"{number} ({name})" for number, name in _SCORES.items())
        )
    return _SCORES[kind]


def _routed(files: GgufFiles, scores: str) -> dict[str, Any]:
    """Experts and their choice, under the names of DeepSeek's config. Every key is there: none has its default."""
    count = int(files.get("expert_count") or 0)
    groups, kept = _GROUPS.get((scores, count), (1, 1))
    groups = int(files.get("expert_group_count") or groups)
    kept = int(files.get("expert_group_used_count") or min(kept, groups))
    keys = {
        "n_routed_experts": count,
        "n_shared_experts": int(files.get("expert_shared_count") or 0),
        "num_experts_per_tok": int(required(files, "expert_used_count")) if count else 0,
        "moe_intermediate_size": int(required(files, "expert_feed_forward_length")),
        "first_k_dense_replace": int(files.get("leading_dense_block_count") or 0) if count else layer_count(files),
        "n_group": groups,
        "topk_group": kept,
        "scoring_func": scores,
        "norm_topk_prob": bool(files.get("expert_weights_norm", False)),
        "routed_scaling_factor": shortest(float(files.get("expert_weights_scale") or 1.0)),
    }
    if scores == "softmax":
        keys["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    return keys
