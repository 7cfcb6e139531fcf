"""The way from a `config.json` to the parts of a model, family by family."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from forebay.weights.errors import UnsupportedModelError
from forebay.weights.parts import Dense, Experts, GroupedQuery, Indexer, Latent, Routing
from forebay.weights.sizes import MOST_EXPERTS, MOST_HEADS, real, size, size_or

__all__ = [
    "EXPERT_ARCHITECTURES",
    "PARTIAL_ROTARY_ARCHITECTURES",
    "attention_of",
    "feeds_of",
    "indexer_of",
]

_QWEN3_MOE = "Qwen3MoeForCausalLM"
_GLM4_MOE = "Glm4MoeForCausalLM"
_DEEPSEEK_V2 = "DeepseekV2ForCausalLM"
_DEEPSEEK_V3 = "DeepseekV3ForCausalLM"
_DEEPSEEK_V32 = "DeepseekV32ForCausalLM"
_GLM_DSA = "GlmMoeDsaForCausalLM"
_INDEXED_ARCHITECTURES = (_DEEPSEEK_V32, _GLM_DSA)
_LATENT_ARCHITECTURES = (_DEEPSEEK_V2, _DEEPSEEK_V3, *_INDEXED_ARCHITECTURES)

EXPERT_ARCHITECTURES = (_QWEN3_MOE, _GLM4_MOE, *_LATENT_ARCHITECTURES)
PARTIAL_ROTARY_ARCHITECTURES = (_GLM4_MOE,)
"""Architectures whose `partial_rotary_factor` may differ from 1."""
_OF_DEEPSEEK_V3 = {
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    _QWEN3_MOE: {},
    _GLM4_MOE: {"first_k_dense_replace": 1, "n_shared_experts": 1, "norm_topk_prob": True},
    _DEEPSEEK_V2: {"n_shared_experts": 2, "q_lora_rank": 1536},
    _DEEPSEEK_V3: _OF_DEEPSEEK_V3,
    _DEEPSEEK_V32: {**_OF_DEEPSEEK_V3, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64},
    _GLM_DSA: {
        **_OF_DEEPSEEK_V3,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 2048,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 32,
    },
}
"""The defaults of transformers for absent keys of a config."""
_PARTIAL_ROTARY_FACTOR = 0.5
_MOST_SHARED = 1 << 10
"""The largest number of shared experts."""


def attention_of(d: Mapping[str, Any], architecture: str, scaling: Mapping[str, Any] | None) -> GroupedQuery | Latent:
    """The attention of the layers; `scaling` as in `ModelConfig.rope_scaling`. Raises UnsupportedModelError."""
    d = {**_DEFAULTS.get(architecture, {}), **d}
    if architecture in _LATENT_ARCHITECTURES:
        return _latent(d, scaling)
    heads = size(d, "num_attention_heads", most=MOST_HEADS)
    kv_heads = size_or(d, "num_key_value_heads", heads, most=MOST_HEADS)
    if heads % kv_heads:
        raise UnsupportedModelError(
            f"{heads} query heads (num_attention_heads) can't share {kv_heads} heads of keys and values "
            "(num_key_value_heads) equally"
        )
    all_biases = bool(d.get("attention_bias", False))
    qwen2 = architecture == "Qwen2ForCausalLM"
    hidden = size(d, "hidden_size")
    head_dim = size_or(d, "head_dim", 128 if architecture == "Qwen3ForCausalLM" else hidden // heads, most=MOST_HEADS)
    if head_dim < 1:
        raise UnsupportedModelError(
            f"{hidden} elements (hidden_size) can't be shared by {heads} heads (num_attention_heads), "
            "and the model's config has no 'head_dim'"
        )
    rotary_dim = _rotary_dim(d, head_dim) if architecture in PARTIAL_ROTARY_ARCHITECTURES else head_dim
    return GroupedQuery(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        # Rebuilt from a GGUF the key `qkv_bias` is there, because tensors tell what this format has no key for.
        qkv_bias=bool(d.get("qkv_bias", True if qwen2 else all_biases)),
        # Llama and Qwen3 have biases on all four projections or none, Qwen2 and GLM-4 on three.
        output_bias=all_biases and architecture not in ("Qwen2ForCausalLM", _GLM4_MOE),
        qk_norm=architecture in ("Qwen3ForCausalLM", _QWEN3_MOE)
        or (architecture == _GLM4_MOE and bool(d.get("use_qk_norm", False))),
    )


def feeds_of(d: Mapping[str, Any], architecture: str, layers: int) -> tuple[Dense | Experts, ...]:
    """The feed-forward part behind the attention of each layer. Raises UnsupportedModelError."""
    d = {**_DEFAULTS.get(architecture, {}), **d}
    sparse = [_is_sparse(d, architecture, layer) for layer in range(layers)]
    experts = _experts(d, architecture) if any(sparse) else None
    if experts is not None and experts.count * sum(sparse) > MOST_EXPERTS:
        raise UnsupportedModelError(
            f"{experts.count} experts in each of {sum(sparse)} layers are not supported: at most {MOST_EXPERTS} in all"
        )
    # A model of experts alone needs no size of a dense layer.
    dense = None if all(sparse) and sparse else Dense(size(d, "intermediate_size"), bool(d.get("mlp_bias", False)))
    feeds = [experts if is_sparse else dense for is_sparse in sparse]
    return tuple(feed for feed in feeds if feed is not None)


def indexer_of(d: Mapping[str, Any], architecture: str, layers: int) -> Indexer | None:
    """The indexer of the layers' positions; None: layers attend to all positions. Raises UnsupportedModelError."""
    if architecture not in _INDEXED_ARCHITECTURES:
        return None
    d = {**_DEFAULTS[architecture], **d}
    for key in ("index_init_tokens", "index_local_tokens"):
        if d.get(key):
            raise UnsupportedModelError(f"positions that are always kept ({key} {d[key]}) are not supported")
    if d.get("q_lora_rank") is None:
        raise UnsupportedModelError("an indexer without a low-rank query (q_lora_rank) is not supported")
    heads, head_dim = (size(d, key, most=MOST_HEADS) for key in ("index_n_heads", "index_head_dim"))
    top_k = size(d, "index_topk")
    rotary = size(d, "qk_rope_head_dim", most=MOST_HEADS)
    if head_dim < rotary:
        raise UnsupportedModelError(
            f"index keys of {head_dim} elements (index_head_dim) have no {rotary} to rotate (qk_rope_head_dim)"
        )
    return Indexer(
        heads=heads,
        head_dim=head_dim,
        # transformers goes by the family alone; other engines read this key, which GLM's configs have.
        interleaved=bool(d.get("indexer_rope_interleave", architecture == _GLM_DSA)),
        top_k=top_k,
        layers=_indexed_layers(d, layers),
    )


def _indexed_layers(d: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The layers that have an indexer of their own: a list of kinds, a pattern of letters, or every so many layers."""
    kinds, pattern = d.get("indexer_types"), d.get("index_topk_pattern")
    if kinds is None and pattern is not None:
        kinds = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    if kinds is None:
        every, offset = size_or(d, "index_topk_freq", 1), d.get("index_skip_topk_offset")
        first = 2 if offset is None else size(d, "index_skip_topk_offset", least=0)
        kinds = ["shared" if max(layer - first + 1, 0) % every else "full" for layer in range(layers)]
    # A list may go on with the layers that predict further tokens.
    kinds = list(kinds[:layers])
    unknown = set(kinds) - {"full", "shared"}
    if unknown or len(kinds) < layers:
        raise UnsupportedModelError(
            f"indexer_types (index_topk_pattern) wants `full` or `shared` for each of {layers} layers: it has {kinds}"
        )
    if kinds and kinds[0] == "shared":
        raise UnsupportedModelError("the first layer shares its indexer (indexer_types), and none is before it")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "full")


def _rotary_dim(d: Mapping[str, Any], head_dim: int) -> int:
    """Elements of a head that are rotated: transformers 5 keeps the factor beside the base."""
    key = "partial_rotary_factor"
    factor = real(d.get("rope_parameters") or {}, key, 0.0) or real(d, key, _PARTIAL_ROTARY_FACTOR)
    rotary_dim = int(head_dim * factor)
    if not 1 <= rotary_dim <= head_dim:
        raise UnsupportedModelError(f"heads of {head_dim} elements have no {rotary_dim} to rotate ({key})")
    return rotary_dim


def _latent(d: Mapping[str, Any], scaling: Mapping[str, Any] | None) -> Latent:
    nope = size(d, "qk_nope_head_dim", most=MOST_HEADS)
    rotary = size(d, "qk_rope_head_dim", most=MOST_HEADS)
    scale = float(nope + rotary) ** -0.5
    weight = (scaling or {}).get("mscale_all_dim")
    if scaling is not None and weight:
        # Yarn (Peng et al. 2023) sharpens the softmax of lengthened contexts; here not on cosine and sine alone.
        factor = float(scaling["factor"])
        scale *= (0.1 * float(weight) * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0
    return Latent(
        heads=size(d, "num_attention_heads", most=MOST_HEADS),
        query_rank=None if d.get("q_lora_rank") is None else size(d, "q_lora_rank"),
        rank=size(d, "kv_lora_rank"),
        nope_dim=nope,
        rotary_dim=rotary,
        value_dim=size(d, "v_head_dim", most=MOST_HEADS),
        bias=bool(d.get("attention_bias", False)),
        interleaved=bool(d.get("rope_interleave", True)),
        scale=scale,
    )


def _is_sparse(d: Mapping[str, Any], architecture: str, layer: int) -> bool:
    """True if a layer has experts."""
    if architecture == _QWEN3_MOE:
        if size(d, "num_experts", "num_local_experts", least=0) == 0 or layer in (d.get("mlp_only_layers") or []):
            return False
        return (layer + 1) % size_or(d, "decoder_sparse_step", 1) == 0
    if architecture not in EXPERT_ARCHITECTURES:
        return False
    if d.get("moe_layer_freq") not in (None, 1):
        raise UnsupportedModelError(
            f"experts in one of {d['moe_layer_freq']} layers (moe_layer_freq) are not supported"
        )
    kinds = d.get("mlp_layer_types")
    if kinds is not None and architecture in _INDEXED_ARCHITECTURES:
        if layer >= len(kinds) or kinds[layer] not in ("dense", "sparse"):
            raise UnsupportedModelError(f"mlp_layer_types wants `dense` or `sparse` for each layer: it has {kinds}")
        return bool(kinds[layer] == "sparse")
    return layer >= size_or(d, "first_k_dense_replace", 0)


def _experts(d: Mapping[str, Any], architecture: str) -> Experts:
    if d.get("mlp_bias"):
        raise UnsupportedModelError("experts with biases (mlp_bias) are not supported")
    count = size(d, "n_routed_experts", "num_experts", "num_local_experts")
    per_token = size(d, "num_experts_per_tok")
    inner = size(d, "moe_intermediate_size")
    shared = 0 if architecture == _QWEN3_MOE else size_or(d, "n_shared_experts", 0, most=_MOST_SHARED)
    if per_token > count:
        raise UnsupportedModelError(f"a token has {per_token} experts (num_experts_per_tok), and there are {count}")
    routing = _routing(d, architecture)
    if count % routing.groups:
        raise UnsupportedModelError(f"{count} experts can't be split into {routing.groups} groups (n_group)")
    of_group = count // routing.groups
    choice = routing.kept_groups * of_group
    if not 1 <= routing.kept_groups <= routing.groups or of_group < routing.best_of_group:
        raise UnsupportedModelError(
            f"{routing.kept_groups} groups (topk_group) can't be kept of {routing.groups} with {of_group} experts each"
        )
    if per_token > choice:
        raise UnsupportedModelError(
            f"a token has {per_token} experts (num_experts_per_tok), and its groups have {choice}"
        )
    return Experts(count, per_token, inner, shared * inner, routing)


def _routing(d: Mapping[str, Any], architecture: str) -> Routing:
    """The rule of a family, with the parts that its config can change, and those that it can't."""
    method, scoring = d.get("topk_method"), d.get("scoring_func")
    normalise = d.get("norm_topk_prob")
    scaling = real(d, "routed_scaling_factor", 1.0)
    groups, kept = size_or(d, "n_group", 1), size_or(d, "topk_group", 1)
    if architecture == _QWEN3_MOE:
        _known(scoring, "scoring_func", "softmax")
        return Routing("softmax", False, False, 1, 1, 1, bool(normalise), 1.0)
    if architecture == _DEEPSEEK_V2:
        _known(scoring, "scoring_func", "softmax")
        _known(method, "topk_method", "greedy", "group_limited_greedy")
        if normalise:
            raise UnsupportedModelError("DeepSeek V2 with norm_topk_prob is not supported: no such model is known")
        if method != "group_limited_greedy":
            groups = kept = 1
        return Routing("softmax", True, False, groups, kept, 1, False, scaling)
    _known(scoring, "scoring_func", "sigmoid")
    _known(method, "topk_method", "noaux_tc")
    return Routing("sigmoid", True, True, groups, kept, 2, bool(normalise), scaling)


def _known(value: Any, key: str, *supported: str) -> None:
    if value is not None and value not in supported:
        raise UnsupportedModelError(f"{key} {value!r} is not supported; supported here: {', '.join(supported)}")
