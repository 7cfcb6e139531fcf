"""The model's shape, read from a Hugging Face `config.json` of any age."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from forebay.weights.encoder_config import ENCODER_ARCHITECTURES, EncoderConfig, is_encoder
from forebay.weights.errors import UnsupportedModelError
from forebay.weights.families import (
    EXPERT_ARCHITECTURES,
    PARTIAL_ROTARY_ARCHITECTURES,
    attention_of,
    feeds_of,
    indexer_of,
)
from forebay.weights.named import MODEL_TYPES as NAMED_TYPES
from forebay.weights.named import NAMED, resolve, same_name, with_sum_1
from forebay.weights.parts import Dense, Experts, GroupedQuery, Indexer, Latent, Scales
from forebay.weights.sizes import MOST_LAYERS, MOST_POSITIONS, one_line, real, size, size_or
from forebay.weights.stored import Stored, stored_of
from forebay.weights.vision import DECODERS, QWEN3_VL_MOE, Sections, Vision, decoder_config, sections_of, vision_of

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "SUPPORTED_ROPE_TYPES",
    "ModelConfig",
    "UnsupportedModelError",
    "shape_of",
    "token_ids",
]

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    *EXPERT_ARCHITECTURES,
    *DECODERS,
    *NAMED,
)
_NOT_SERVED = {
    "DeepseekV4ForCausalLM": "compressed attention that is not built",
    "GptOssForCausalLM": "attention sinks, and windows in some layers only",
    "Qwen2VLForConditionalGeneration": "a vision tower of another kind, which is not built",
}
"""Known architectures that are not supported, with their missing parts."""
SUPPORTED_ROPE_TYPES = ("linear", "llama3", "yarn")

_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    **NAMED_TYPES,
}
_DEFAULT_ROPE_THETA = 10000.0
_FACTORS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "original_max_position_embeddings",
)
"""The numbers of a scaling that are divisors."""
_LAYER = re.compile(r"(?:model\.)?layers\.(?P<number>\d+)\.")


@dataclass(frozen=True)
class ModelConfig:
    """The data from which the model code builds a model. Sizes are numbers of elements, and positions are tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    attention: GroupedQuery | Latent
    feeds: tuple[Dense | Experts, ...]
    """The feed-forward parts behind the attention, one for each layer."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    """None, or `{"rope_type": "linear" | "llama3" | "yarn", "factor": ..., ...}` in transformers 4's names."""
    max_position_embeddings: int
    tie_word_embeddings: bool
    hidden_act: str
    sliding_window: int | None
    """The number of tokens that a position sees, itself included; None: no layer has a window."""
    eos_token_ids: tuple[int, ...]
    stored: Stored | None = None
    """The quantisation of the checkpoint's matrices; None: they are not quantised."""
    indexer: Indexer | None = None
    """The indexer; None: queries attend to their whole context."""
    vision: Vision | None = None
    """The vision tower; None: the model takes no images."""
    sections: Sections | None = None
    """The sections of rotary frequencies; None: a position has one number."""
    scales: Scales = Scales()
    """Factors of states and logits."""
    unrotated: frozenset[int] = frozenset()
    """The layers whose queries and keys positions do not rotate."""
    headless: bool = False
    """True if the final states are needed, and not the logits of an output head."""

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> ModelConfig:
        """Reads a `config.json`, of transformers 4 or 5 or rebuilt from a GGUF.

        Raises UnsupportedModelError for a model that `forebay.models` would compute wrongly.
        """
        architecture = _architecture(d)
        if architecture in NAMED:
            named: ModelConfig = resolve(d, architecture, cls.from_dict)
            return named
        if architecture in DECODERS:
            return cls._with_tower(d, architecture)
        layers = size(d, "num_hidden_layers", most=MOST_LAYERS)
        theta, scaling = _rope(d, architecture)
        hidden_act = d.get("hidden_act") or "silu"
        if hidden_act != "silu":
            raise UnsupportedModelError(f"hidden_act {hidden_act!r} is not supported; supported: silu")
        return cls(
            architecture=architecture,
            vocab_size=size(d, "vocab_size"),
            hidden_size=size(d, "hidden_size"),
            attention=attention_of(d, architecture, scaling),
            feeds=feeds_of(d, architecture, layers),
            rms_norm_eps=real(d, "rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=size_or(d, "max_position_embeddings", 2048, most=MOST_POSITIONS),
            tie_word_embeddings=bool(d.get("tie_word_embeddings", False)),
            hidden_act=hidden_act,
            sliding_window=_sliding_window(d, architecture, layers),
            eos_token_ids=token_ids(d.get("eos_token_id")),
            stored=stored_of(d),
            indexer=indexer_of(d, architecture, layers),
        )

    @classmethod
    def _with_tower(cls, d: dict[str, Any], architecture: str) -> ModelConfig:
        flat = decoder_config(d, architecture)
        decoder = cls.from_dict({**flat, "architectures": [DECODERS[architecture]]})
        if architecture == QWEN3_VL_MOE:
            decoder = with_sum_1(decoder)
        return replace(
            decoder,
            architecture=architecture,
            vision=vision_of(d, architecture, decoder.hidden_size, decoder.num_hidden_layers),
            sections=sections_of(d, architecture, decoder.attention.rotary_dim // 2),
        )

    @property
    def num_hidden_layers(self) -> int:
        """The number of computed layers. A checkpoint may have more (`has_place_for`)."""
        return len(self.feeds)

    def feed(self, layer: int) -> Dense | Experts:
        """The feed-forward part behind the attention of a layer."""
        return self.feeds[layer]

    def has_place_for(self, name: str) -> bool:
        """True if a checkpoint's tensor may belong to the computed layers.

        Behind them DeepSeek and GLM checkpoints have layers that predict further tokens (MTP), and nothing else.
        """
        if not any(isinstance(feed, Experts) for feed in self.feeds):
            return True
        layer = _LAYER.match(name)
        return layer is None or int(layer["number"]) < len(self.feeds)

    @property
    def longest_context(self) -> int:
        """The largest number of positions of a request.

        With yarn it may exceed `max_position_embeddings`, as in vLLM.
        """
        scaling = self.rope_scaling or {}
        if scaling.get("rope_type") != "yarn":
            return self.max_position_embeddings
        original = float(scaling.get("original_max_position_embeddings") or self.max_position_embeddings)
        return max(self.max_position_embeddings, int(original * float(scaling["factor"])))


def shape_of(d: dict[str, Any], *, headless: bool = False) -> ModelConfig | EncoderConfig:
    """The configuration of any kind of model in a `config.json`; `headless` as in `ModelConfig`."""
    with one_line("the model's config has a value"):
        if is_encoder(d):
            return EncoderConfig.from_dict(d)
        return replace(ModelConfig.from_dict(d), headless=headless)


def token_ids(value: Any) -> tuple[int, ...]:
    """A token id, a list of them, or nothing, as `eos_token_id` of the two config files may have."""
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, (list, tuple)) else (int(value),)


def _architecture(d: dict[str, Any]) -> str:
    names = [same_name(str(name)) for name in d.get("architectures") or []]
    if not names and d.get("model_type") in _MODEL_TYPES:
        return _MODEL_TYPES[d["model_type"]]
    for name in names:
        # A checkpoint without an output head carries the name of the body.
        for known in (name, f"{name.removesuffix('Model')}ForCausalLM"):
            if known in SUPPORTED_ARCHITECTURES:
                return known
    for name in names:
        if name in _NOT_SERVED:
            raise UnsupportedModelError(f"the architecture {name} is not supported: it has {_NOT_SERVED[name]}")
    found = ", ".join(names) or f"model_type {d.get('model_type')!r}"
    supported = ", ".join((*SUPPORTED_ARCHITECTURES, *ENCODER_ARCHITECTURES))
    raise UnsupportedModelError(f"the architecture {found} is not supported; supported: {supported}")


def _rope(d: dict[str, Any], architecture: str) -> tuple[float, dict[str, Any] | None]:
    """The base, and the scaling in the form of transformers 4: transformers 5 keeps both in `rope_parameters`."""
    parameters = dict(d.get("rope_parameters") or d.get("rope_scaling") or {})
    theta = real(parameters, "rope_theta", 0.0) or real(d, "rope_theta", _DEFAULT_ROPE_THETA)
    parameters.pop("rope_theta", None)
    legacy = parameters.pop("type", None)
    kind = parameters.pop("rope_type", None) or legacy or "default"
    partial = parameters.pop("partial_rotary_factor", None)
    if partial not in (None, 1, 1.0) and architecture not in PARTIAL_ROTARY_ARCHITECTURES:
        raise UnsupportedModelError("rotary embeddings over a part of a head (partial_rotary_factor) are not supported")
    if kind == "default":
        if any(isinstance(value, dict) for value in parameters.values()):
            raise UnsupportedModelError("rotary embeddings that differ between layers are not supported")
        return theta, None
    if kind not in SUPPORTED_ROPE_TYPES:
        raise UnsupportedModelError(
            f"rope scaling {kind!r} is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    if parameters.get("factor") is None:
        raise UnsupportedModelError(f"rope scaling {kind!r} without a factor")
    for key in _FACTORS:
        if parameters.get(key) is not None and real(parameters, key, 0.0) == 0.0:
            raise UnsupportedModelError(f"rope scaling {kind!r} with a {key} of 0")
    if kind == "llama3" and parameters.get("low_freq_factor") == parameters.get("high_freq_factor"):
        raise UnsupportedModelError("rope scaling 'llama3' with a low_freq_factor that is the high_freq_factor")
    return theta, {"rope_type": kind, **parameters}


def _sliding_window(d: dict[str, Any], architecture: str, layers: int) -> int | None:
    if d.get("sliding_window") is None or architecture == "LlamaForCausalLM":
        return None
    if architecture.startswith("Qwen") and not d.get("use_sliding_window", False):
        return None
    window = size(d, "sliding_window", most=MOST_POSITIONS)
    kinds = d.get("layer_types")
    if kinds is not None:
        windowed = sum(kind == "sliding_attention" for kind in kinds[:layers])
    elif architecture.startswith("Qwen"):
        # Qwen counts the other way round: the layers below `max_window_layers` see everything.
        below = 28 if d.get("max_window_layers") is None else size(d, "max_window_layers", least=0)
        windowed = max(0, layers - below)
    else:
        windowed = layers
    if windowed == 0 or window >= size_or(d, "max_position_embeddings", window, most=MOST_POSITIONS):
        return None
    if windowed < layers:
        raise UnsupportedModelError(f"a sliding window in {windowed} of {layers} layers is not supported")
    return window
