"""Families that are others with further names, factors or small parts.

A config becomes one of a known family, and what differs is replaced. `RULES` has the weights in tensors of other names.
`crates/weights/src/families` has the same, and more: this file goes when the resolved shape travels to this hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from forebay.weights.errors import UnsupportedModelError
from forebay.weights.parts import Experts, GroupedQuery, QueryScale, Routing, Scales
from forebay.weights.sizes import MOST_POSITIONS, real, size, size_or
from forebay.weights.vision import QWEN3_VL_MOE, own_name

if TYPE_CHECKING:
    import torch

ModelConfig: TypeAlias = Any
"""`config.ModelConfig`, which imports this file."""

__all__ = ["MODEL_TYPES", "NAMED", "Piece", "pieces", "resolve", "same_name", "with_sum_1"]

Config = dict[str, Any]
Change = Callable[["ModelConfig", Config], "ModelConfig"]

_KIMI = "KimiK25ForConditionalGeneration"
_MISTRAL3 = "Mistral3ForConditionalGeneration"


def same_name(name: str) -> str:
    """The hub's name of an architecture that transformers writes with further underscores."""
    return _KIMI if name == "Kimi_K25ForConditionalGeneration" else name


def _text(d: Config) -> Config:
    """The config of a decoder in a repository that also has a tower; the whole decides if the head is tied."""
    text = d.get("text_config") or {}
    flat = {key: value for key, value in d.items() if key not in ("text_config", "vision_config")}
    flat |= {key: value for key, value in text.items() if value is not None}
    return flat | ({"tie_word_embeddings": d["tie_word_embeddings"]} if "tie_word_embeddings" in d else {})


def _same(config: ModelConfig, d: Config) -> ModelConfig:
    return config


def _grouped(config: ModelConfig, **changes: Any) -> ModelConfig:
    assert isinstance(config.attention, GroupedQuery)
    return replace(config, attention=replace(config.attention, **changes))


def _with_experts(config: ModelConfig, **changes: Any) -> ModelConfig:
    return replace(
        config, feeds=tuple(replace(feed, **changes) if isinstance(feed, Experts) else feed for feed in config.feeds)
    )


def _query_scale(d: Config) -> QueryScale | None:
    rope = d.get("rope_parameters") or d.get("rope_scaling") or {}
    if not rope.get("llama_4_scaling_beta"):
        return None
    every = size(rope, "original_max_position_embeddings", most=MOST_POSITIONS)
    return QueryScale(real(rope, "llama_4_scaling_beta", 0.0), every)


def _growing(config: ModelConfig, d: Config) -> ModelConfig:
    return replace(config, attention=replace(config.attention, query_scale=_query_scale(d)))


def _of_mistral3(d: Config) -> tuple[str, Config, Change]:
    kind = (d.get("text_config") or {}).get("model_type", "mistral")
    if kind == "mistral":
        return "MistralForCausalLM", _text(d), _same
    if kind == "ministral3":
        return "MistralForCausalLM", _text(d), _growing
    if kind == "mistral4":
        return _of_mistral4(_text(d))
    raise UnsupportedModelError(f"text of the model_type {kind} in {_MISTRAL3} is not supported")


def _of_mistral4(d: Config) -> tuple[str, Config, Change]:
    d = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "q_lora_rank": 1024, **d}
    d |= {"routed_scaling_factor": d.get("routed_scaling_factor", 1.0)}
    if d.get("rope_parameters"):
        d["rope_parameters"] = {k: v for k, v in d["rope_parameters"].items() if k != "partial_rotary_factor"}

    def change(config: ModelConfig, d: Config) -> ModelConfig:
        of = next((feed.routing for feed in config.feeds if isinstance(feed, Experts)), None)
        if of is not None:
            best = 2 if of.groups > 1 else 1
            routing = replace(of, scores="softmax", in_float32=False, corrected=False, best_of_group=best)
            config = _with_experts(config, routing=routing)
        return _growing(config, d)

    return "DeepseekV3ForCausalLM", d, change


def _of_phi3(d: Config) -> tuple[str, Config, Change]:
    rope = dict(d.get("rope_parameters") or d.get("rope_scaling") or {})
    plain = {key: value for key, value in rope.items() if key == "rope_theta"}
    factor = real(rope, "partial_rotary_factor", 0.0) or real(d, "partial_rotary_factor", 1.0)

    def change(config: ModelConfig, d: Config) -> ModelConfig:
        assert isinstance(config.attention, GroupedQuery)
        rotary = int(config.attention.head_dim * factor)
        config = _grouped(config, rotary_dim=rotary)
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in ("longrope", "su"):
            return config
        return replace(config, rope_scaling=_longrope(d, rope, rotary))

    return "MistralForCausalLM", {**d, "rope_parameters": plain, "rope_scaling": None}, change


def _longrope(d: Config, rope: Mapping[str, Any], rotary: int) -> Config:
    original = rope.get("original_max_position_embeddings") or d.get("original_max_position_embeddings")
    original = size({"original": original}, "original", most=MOST_POSITIONS)
    for key in ("short_factor", "long_factor"):
        if len(rope.get(key) or ()) != rotary // 2:
            raise UnsupportedModelError(f"rope scaling 'longrope' whose {key} is not {rotary // 2} numbers above 0")
    longest = size(d, "max_position_embeddings", most=MOST_POSITIONS)
    return {
        "rope_type": "longrope",
        "factor": real(rope, "factor", longest / original),
        "short_factor": list(rope["short_factor"]),
        "long_factor": list(rope["long_factor"]),
        "original_max_position_embeddings": original,
        "attention_factor": rope.get("attention_factor"),
    }


def with_sum_1(config: ModelConfig) -> ModelConfig:
    """Experts whose weights have the sum 1, whatever the config says."""
    routings = [feed.routing for feed in config.feeds if isinstance(feed, Experts)]
    return _with_experts(config, routing=replace(routings[0], normalise=True)) if routings else config


def _scaled(config: ModelConfig, d: Config) -> ModelConfig:
    scales = Scales(
        real(d, "embedding_multiplier", 1.0),
        real(d, "residual_multiplier", 1.0),
        1.0 / real(d, "logits_scaling", 1.0),
    )
    return replace(_grouped(config, scale=real(d, "attention_multiplier", 1.0)), scales=scales)


def _of_granite_hybrid(d: Config) -> tuple[str, Config, Change]:
    layers = size(d, "num_hidden_layers")
    kinds = d.get("layer_types") or d.get("layers_block_type") or []
    if len(kinds) != layers or set(kinds) - {"attention", "full_attention"}:
        raise UnsupportedModelError("recurrent layers (layer_types) are not supported")
    if d.get("num_local_experts", 8):
        raise UnsupportedModelError("experts in GraniteMoeHybridForCausalLM are not supported")
    bare = frozenset() if d.get("position_embedding_type") == "rope" else frozenset(range(layers))
    values = {**d, "intermediate_size": d.get("shared_intermediate_size")}
    return "LlamaForCausalLM", values, lambda config, d: replace(_scaled(config, d), unrotated=bare)


def _of_granite_moe(d: Config) -> tuple[str, Config, Change]:
    base, values, _ = _of_mixtral(d)

    def change(config: ModelConfig, d: Config) -> ModelConfig:
        shared = int(d.get("shared_intermediate_size") or 0)
        return _with_experts(_scaled(_grouped(config, qk_norm=False), d), shared_size=shared)

    return base, values, change


def _of_smollm3(d: Config) -> tuple[str, Config, Change]:
    layers, every = size(d, "num_hidden_layers"), size_or(d, "no_rope_layer_interval", 4)
    if d.get("use_sliding_window"):
        raise UnsupportedModelError("a sliding window in some layers is not supported")
    listed = d.get("no_rope_layers")
    if listed is not None and len(listed) < layers:
        raise UnsupportedModelError(f"no_rope_layers names {len(listed)} of {layers} layers")
    rotated = [bool(it) for it in listed] if listed is not None else [(at + 1) % every != 0 for at in range(layers)]
    bare = frozenset(layer for layer in range(layers) if not rotated[layer])
    return "LlamaForCausalLM", d, lambda config, d: replace(config, unrotated=bare)


def _of_minimax(d: Config) -> tuple[str, Config, Change]:
    rope = dict(d.get("rope_parameters") or {})
    part = rope.pop("partial_rotary_factor", None) or d.get("partial_rotary_factor")
    base, values, _ = _of_mixtral({**d, "rope_parameters": rope})

    def change(config: ModelConfig, d: Config) -> ModelConfig:
        assert isinstance(config.attention, GroupedQuery)
        head = config.attention.head_dim
        rotary = int(head * part) if part else size_or(d, "rotary_dim", head)
        config = _grouped(config, qk_norm=False, row_norms=bool(d.get("use_qk_norm", True)), rotary_dim=rotary)
        return _with_experts(config, routing=Routing("sigmoid", False, True, 1, 1, 1, True, 1.0))

    return base, {**values, "scoring_func": None}, change


def _of_seed_oss(d: Config) -> tuple[str, Config, Change]:
    biases = {"qkv_bias": d.get("attention_bias", True), "attention_bias": bool(d.get("attention_out_bias"))}
    return "LlamaForCausalLM", {"head_dim": 128, **d, **biases}, _same


def _of_ernie(d: Config) -> tuple[str, Config, Change]:
    # Rebuilt from a GGUF, a config has a key for each kind of biases.
    biases = {"attention_bias": bool(d["use_bias"]), "mlp_bias": bool(d["use_bias"])} if "use_bias" in d else {}
    return "LlamaForCausalLM", {**d, **biases}, _same


def _of_mixtral(d: Config) -> tuple[str, Config, Change]:
    d = {**d, "moe_intermediate_size": d.get("intermediate_size"), "norm_topk_prob": True}
    return "Qwen3MoeForCausalLM", d, lambda config, d: _grouped(config, qk_norm=False)


def _of_qwen2_moe(d: Config) -> tuple[str, Config, Change]:
    def change(config: ModelConfig, d: Config) -> ModelConfig:
        config = _grouped(config, qk_norm=False, qkv_bias=bool(d.get("qkv_bias", True)), output_bias=False)
        return _with_experts(config, shared_size=size(d, "shared_expert_intermediate_size"), shared_gate=True)

    return "Qwen3MoeForCausalLM", d, change


def _of_ernie_moe(d: Config) -> tuple[str, Config, Change]:
    layers = size(d, "num_hidden_layers")
    first, every = int(d.get("moe_layer_start_index", 1) or 0), size_or(d, "moe_layer_interval", 1)
    last = d.get("moe_layer_end_index", -1)
    last = layers if last in (None, -1) else int(last)
    dense = [layer for layer in range(layers) if not first <= layer <= last or (layer + 1) % every]
    _, values, _ = _of_ernie(d)
    values |= {
        "num_experts": d.get("moe_num_experts", d.get("num_experts")),
        "num_experts_per_tok": d.get("moe_k", d.get("num_experts_per_tok")),
        "norm_topk_prob": True,
        "mlp_only_layers": dense,
        "decoder_sparse_step": 1,
    }

    def change(config: ModelConfig, d: Config) -> ModelConfig:
        routing = Routing("softmax", True, True, 1, 1, 1, True, 1.0)
        shared = int(d.get("moe_num_shared_experts", 2) or 0) * size(d, "moe_intermediate_size")
        return _with_experts(_grouped(config, qk_norm=False), routing=routing, shared_size=shared)

    return "Qwen3MoeForCausalLM", values, change


def _with_first_dense(d: Config) -> Config:
    kinds = list(d.get("mlp_layer_types") or ())
    if not kinds:
        return d
    layers = size(d, "num_hidden_layers")
    dense = next((at for at, kind in enumerate(kinds) if kind != "dense"), len(kinds))
    if kinds[:layers] != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise UnsupportedModelError("mlp_layer_types is supported where it is dense layers, then sparse ones")
    return {**d, "first_k_dense_replace": dense}


def _of_hy3(d: Config) -> tuple[str, Config, Change]:
    values = {
        "n_group": 1,
        "topk_group": 1,
        **_with_first_dense(d),
        "use_qk_norm": True,
        "partial_rotary_factor": 1.0,
        "n_shared_experts": d.get("num_shared_experts", 1),
        "routed_scaling_factor": d.get("router_scaling_factor", 2.826),
    }
    of_biases = bool(d.get("attention_bias"))
    return "Glm4MoeForCausalLM", values, lambda config, d: _grouped(config, output_bias=of_biases)


def _of_glm_lite(d: Config) -> tuple[str, Config, Change]:
    usual = {"n_group": 1, "topk_group": 1, "q_lora_rank": 768, "routed_scaling_factor": 1.8}
    return "DeepseekV3ForCausalLM", {**usual, "first_k_dense_replace": 1, **_with_first_dense(d)}, _same


NAMED: dict[str, Callable[[Config], tuple[str, Config, Change]]] = {
    "Ministral3ForCausalLM": lambda d: ("MistralForCausalLM", d, _growing),
    _MISTRAL3: _of_mistral3,
    "Mistral4ForCausalLM": _of_mistral4,
    "Phi3ForCausalLM": _of_phi3,
    "SmolLM3ForCausalLM": _of_smollm3,
    "GraniteForCausalLM": lambda d: ("LlamaForCausalLM", d, _scaled),
    "GraniteMoeHybridForCausalLM": _of_granite_hybrid,
    "GraniteMoeForCausalLM": _of_granite_moe,
    "GraniteMoeSharedForCausalLM": _of_granite_moe,
    "MiniMaxM2ForCausalLM": _of_minimax,
    "SeedOssForCausalLM": _of_seed_oss,
    "Ernie4_5ForCausalLM": _of_ernie,
    "MixtralForCausalLM": _of_mixtral,
    "Qwen2MoeForCausalLM": _of_qwen2_moe,
    "Ernie4_5_MoeForCausalLM": _of_ernie_moe,
    "HYV3ForCausalLM": _of_hy3,
    "Glm4MoeLiteForCausalLM": _of_glm_lite,
    _KIMI: lambda d: ("DeepseekV3ForCausalLM", _text(d), _same),
}
"""Families by architecture: a family that is known, its config, and the differences."""

MODEL_TYPES = {
    "ministral3": "Ministral3ForCausalLM",
    "mistral3": _MISTRAL3,
    "mistral4": "Mistral4ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "hy_v3": "HYV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "kimi_k25": _KIMI,
}


def resolve(d: Config, architecture: str, read: Callable[[Config], ModelConfig]) -> ModelConfig:
    """The shape of a family of `NAMED`; `read` reads a config. Raises UnsupportedModelError."""
    base, values, change = NAMED[architecture](dict(d))
    config = change(read({**values, "architectures": [base]}), values)
    return replace(config, architecture=architecture)


Read: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"


@dataclass(frozen=True)
class Piece:
    """A weight in a tensor."""

    name: str
    shape: tuple[int, ...]
    read: Read


Rows = Callable[["ModelConfig", int], slice]


def _share(number: int, of: int) -> Rows:
    return lambda config, rows: slice(number * rows // of, (number + 1) * rows // of)


def _of_heads(which: int) -> Rows:
    def rows(config: ModelConfig, count: int) -> slice:
        shape = config.attention
        assert isinstance(shape, GroupedQuery)
        ends = [0, shape.heads, shape.heads + shape.kv_heads, shape.heads + 2 * shape.kv_heads]
        return slice(ends[which] * shape.head_dim, ends[which + 1] * shape.head_dim)

    return rows


_LAYER = r"(model\.layers\.\d+\.)"
_PREFIXES = [
    (re.compile(r"(model\.)?(vision_tower|multi_modal_projector|mm_projector)\..*"), None),
    (re.compile(r"(?:model\.language_model|language_model\.model)\.(.*)"), r"model.\1"),
    (re.compile(r"language_model\.(lm_head\..*)"), r"\1"),
]
_OF_MIXTRAL = [
    (r"block_sparse_moe\.gate\.", "mlp.gate."),
    (r"block_sparse_moe\.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
    (r"block_sparse_moe\.experts\.(\d+)\.w1\.", r"mlp.experts.\1.gate_proj."),
    (r"block_sparse_moe\.experts\.(\d+)\.w2\.", r"mlp.experts.\1.down_proj."),
    (r"block_sparse_moe\.experts\.(\d+)\.w3\.", r"mlp.experts.\1.up_proj."),
]
_GRANITE_MOE = ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM")
_OF_GRANITE_MOE = [
    (r"block_sparse_moe\.router\.layer\.", "mlp.gate."),
    (r"block_sparse_moe\.input_linear\.weight", "mlp.experts.gate_up_proj"),
    (r"block_sparse_moe\.output_linear\.weight", "mlp.experts.down_proj"),
    (r"shared_mlp\.output_linear\.", "mlp.shared_experts.down_proj."),
]
_SHARED = re.compile(_LAYER + r"shared_mlp\.input_linear\.(.*)")
_FUSED_GRANITE_MOE = [
    (_SHARED, r"\1mlp.shared_experts.gate_proj.\2", _share(0, 2)),
    (_SHARED, r"\1mlp.shared_experts.up_proj.\2", _share(1, 2)),
]
_SPARE = {"Ernie4_5_MoeForCausalLM": re.compile(r"model\.mtp_.*")}
_RENAMED = {
    "MixtralForCausalLM": _OF_MIXTRAL,
    "MiniMaxM2ForCausalLM": _OF_MIXTRAL,
    **{
        key: [
            (r"block_sparse_moe\.router\.layer\.", "mlp.gate."),
            (r"block_sparse_moe\.input_linear\.weight", "mlp.experts.gate_up_proj"),
            (r"block_sparse_moe\.output_linear\.weight", "mlp.experts.down_proj"),
            (r"shared_mlp\.output_linear\.", "mlp.shared_experts.down_proj."),
        ]
        for key in ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM")
    },
    "GraniteMoeHybridForCausalLM": [(r"shared_mlp\.output_linear\.", "mlp.down_proj.")],
    "Qwen2MoeForCausalLM": [(r"mlp\.shared_expert\.", "mlp.shared_experts.")],
    "HYV3ForCausalLM": [
        (r"mlp\.router\.gate\.", "mlp.gate."),
        (r"mlp\.expert_bias", "mlp.gate.e_score_correction_bias"),
        (r"mlp\.shared_mlp\.", "mlp.shared_experts."),
    ],
    "Ernie4_5_MoeForCausalLM": [(r"mlp\.moe_statics\.", "mlp.gate.")],
}
_FUSED: dict[str, list[tuple[re.Pattern[str], str, Rows]]] = {
    "Phi3ForCausalLM": [
        (re.compile(_LAYER + r"self_attn\.qkv_proj\.(.*)"), r"\1self_attn.q_proj.\2", _of_heads(0)),
        (re.compile(_LAYER + r"self_attn\.qkv_proj\.(.*)"), r"\1self_attn.k_proj.\2", _of_heads(1)),
        (re.compile(_LAYER + r"self_attn\.qkv_proj\.(.*)"), r"\1self_attn.v_proj.\2", _of_heads(2)),
        (re.compile(_LAYER + r"mlp\.gate_up_proj\.(.*)"), r"\1mlp.gate_proj.\2", _share(0, 2)),
        (re.compile(_LAYER + r"mlp\.gate_up_proj\.(.*)"), r"\1mlp.up_proj.\2", _share(1, 2)),
    ],
    "GraniteMoeHybridForCausalLM": [
        (re.compile(_LAYER + r"shared_mlp\.input_linear\.(.*)"), r"\1mlp.gate_proj.\2", _share(0, 2)),
        (re.compile(_LAYER + r"shared_mlp\.input_linear\.(.*)"), r"\1mlp.up_proj.\2", _share(1, 2)),
    ],
    **{
        key: [
            (
                re.compile(_LAYER + r"shared_mlp\.input_linear\.(.*)"),
                r"\1mlp.shared_experts.gate_proj.\2",
                _share(0, 2),
            ),
            (re.compile(_LAYER + r"shared_mlp\.input_linear\.(.*)"), r"\1mlp.shared_experts.up_proj.\2", _share(1, 2)),
        ]
        for key in ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM")
    },
}
_STACK = re.compile(_LAYER + r"mlp\.experts\.(gate_up_proj|down_proj)")
_NEIGHBOURS = ("Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM")
_FLAT = ("mlp.shared_expert_gate.weight", "mlp.gate.e_score_correction_bias")


def _halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of heads whose neighbours are rotated, in an order in which its halves are."""
    return tensor.reshape(heads, -1, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def pieces(config: ModelConfig, name: str, shape: tuple[int, ...]) -> list[Piece]:
    """The weights in a tensor of a checkpoint."""
    architecture = config.architecture
    if architecture == QWEN3_VL_MOE and (found := _stack_of_qwen3_vl(name, shape, config.hidden_size)) is not None:
        return found
    if architecture not in NAMED:
        return [Piece(name, shape, lambda tensor: tensor)]
    spare = _SPARE.get(architecture)
    if spare is not None and spare.fullmatch(name):
        return []
    if architecture in (_MISTRAL3, _KIMI):
        for pattern, target in _PREFIXES:
            if match := pattern.fullmatch(name):
                if target is None:
                    return []
                name = match.expand(target)
                break
    for pattern_, target_ in _RENAMED.get(architecture, ()):
        name = re.sub(rf"(?<=\.){pattern_}", target_, name, count=1)
    fused = [
        (match.expand(target), rows(config, shape[0]))
        for pattern, target, rows in _FUSED.get(architecture, ())
        if (match := pattern.fullmatch(name))
    ]
    if fused:
        return [Piece(own, (rows.stop - rows.start, *shape[1:]), _rows(rows)) for own, rows in fused]
    if (stack := _STACK.fullmatch(name)) and len(shape) == 3:
        return _unstacked(stack[1], stack[2], shape)
    kind = re.fullmatch(_LAYER + r"self_attn\.([qk])_proj\..*", name)
    if architecture in _NEIGHBOURS and kind:
        assert isinstance(config.attention, GroupedQuery)
        heads = config.attention.heads if kind[2] == "q" else config.attention.kv_heads
        return [Piece(name, shape, lambda tensor: _halves(tensor, heads))]
    if name.endswith(_FLAT) and len(shape) == 2:
        return [Piece(name, (shape[0] * shape[1],), lambda tensor: tensor.flatten())]
    return [Piece(name, shape, lambda tensor: tensor)]


def _stack_of_qwen3_vl(name: str, shape: tuple[int, ...], hidden: int) -> list[Piece] | None:
    """The matrices of a stack; None: the tensor is none.

    The hub has [experts, columns, rows], and what transformers 5 saves is [experts, rows, columns].
    """
    stack = _STACK.fullmatch(own_name(name))
    if stack is None or len(shape) != 3:
        return None
    # Columns of the first product, and rows of the second, are as many as a state has.
    if shape[1 if stack[2] == "gate_up_proj" else 2] != hidden:
        return _unstacked(stack[1], stack[2], shape)
    found = _unstacked(stack[1], stack[2], (shape[0], shape[2], shape[1]))
    return [Piece(of.name, of.shape, _turned(of.read)) for of in found]


def _unstacked(layer: str, kind: str, shape: tuple[int, ...]) -> list[Piece]:
    """The matrices of each expert of a stack [experts, rows, columns]."""
    count, rows, columns = shape
    at = f"{layer}mlp.experts"
    if kind == "down_proj":
        return [
            Piece(f"{at}.{expert}.down_proj.weight", (rows, columns), _matrix(expert, slice(None)))
            for expert in range(count)
        ]
    half = rows // 2
    return [
        Piece(f"{at}.{expert}.{own}_proj.weight", (half, columns), _matrix(expert, slice(first, first + half)))
        for expert in range(count)
        for own, first in (("gate", 0), ("up", half))
    ]


def _rows(rows: slice) -> Read:
    return lambda tensor: tensor[rows]


def _matrix(expert: int, rows: slice) -> Read:
    return lambda tensor: tensor[expert, rows]


def _turned(read: Read) -> Read:
    return lambda tensor: read(tensor.transpose(1, 2))
