"""The model's shape, read from a Hugging Face `config.json` of any age."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from forebay.weights.encoder_config import ENCODER_ARCHITECTURES, EncoderConfig, is_encoder
from forebay.weights.errors import UnsupportedModelError

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "SUPPORTED_ROPE_TYPES",
    "ModelConfig",
    "UnsupportedModelError",
    "shape_of",
    "token_ids",
]

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
SUPPORTED_ROPE_TYPES = ("linear", "llama3", "yarn")

_DEFAULT_ROPE_THETA = 10000.0


@dataclass(frozen=True)
class ModelConfig:
    """Everything that the model code needs to build itself. Sizes are numbers of elements, positions are tokens.

    `attention_bias` is about the output projection, `qkv_bias` about the other three: Llama and Qwen3 have all four or
    none, Qwen2 has three.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    """None, or `{"rope_type": "linear" | "llama3" | "yarn", "factor": ..., ...}` with the names of transformers 4."""
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    attention_bias: bool
    mlp_bias: bool
    hidden_act: str
    sliding_window: int | None
    """Tokens that a position sees, itself included; None where no layer has a window."""
    eos_token_ids: tuple[int, ...]
    headless: bool = False
    """The final states are wanted, not the logits that the output head makes of them."""

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> ModelConfig:
        """Reads a `config.json`, of transformers 4 or 5 or rebuilt from a GGUF.

        Raises UnsupportedModelError for a model that the code in `forebay.models` would compute wrongly.
        """
        architecture = _architecture(d)
        heads = _integer(d, "num_attention_heads")
        hidden_size = _integer(d, "hidden_size")
        layers = _integer(d, "num_hidden_layers")
        theta, scaling = _rope(d)
        all_biases = bool(d.get("attention_bias", False))
        qwen2 = architecture == "Qwen2ForCausalLM"
        hidden_act = d.get("hidden_act") or "silu"
        if hidden_act != "silu":
            raise UnsupportedModelError(f"hidden_act {hidden_act!r} is not supported; supported: silu")
        return cls(
            architecture=architecture,
            vocab_size=_integer(d, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_integer(d, "intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=int(d.get("num_key_value_heads") or heads),
            head_dim=int(d.get("head_dim") or (128 if architecture == "Qwen3ForCausalLM" else hidden_size // heads)),
            rms_norm_eps=float(d.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=int(d.get("max_position_embeddings") or 2048),
            tie_word_embeddings=bool(d.get("tie_word_embeddings", False)),
            # Rebuilt from a GGUF the key `qkv_bias` is there, because tensors tell what this format has no key for.
            qkv_bias=bool(d.get("qkv_bias", True if qwen2 else all_biases)),
            attention_bias=False if qwen2 else all_biases,
            mlp_bias=bool(d.get("mlp_bias", False)),
            hidden_act=hidden_act,
            sliding_window=_sliding_window(d, architecture, layers),
            eos_token_ids=token_ids(d.get("eos_token_id")),
        )

    @property
    def longest_context(self) -> int:
        """Positions that a request may use: with yarn more than `max_position_embeddings` may say, as in vLLM."""
        scaling = self.rope_scaling or {}
        if scaling.get("rope_type") != "yarn":
            return self.max_position_embeddings
        original = float(scaling.get("original_max_position_embeddings") or self.max_position_embeddings)
        return max(self.max_position_embeddings, int(original * float(scaling["factor"])))


def shape_of(d: dict[str, Any], *, headless: bool = False) -> ModelConfig | EncoderConfig:
    """The configuration of whatever kind of model a `config.json` describes; `headless` as in `ModelConfig`."""
    if is_encoder(d):
        return EncoderConfig.from_dict(d)
    return replace(ModelConfig.from_dict(d), headless=headless)


def token_ids(value: Any) -> tuple[int, ...]:
    """A token id, a list of them or nothing, as the `eos_token_id` of the two config files may be."""
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, (list, tuple)) else (int(value),)


def _architecture(d: dict[str, Any]) -> str:
    names = [str(name) for name in d.get("architectures") or []]
    for name in names:
        # A checkpoint without an output head carries the name of the body.
        for known in (name, f"{name.removesuffix('Model')}ForCausalLM"):
            if known in SUPPORTED_ARCHITECTURES:
                return known
    found = ", ".join(names) or f"model_type {d.get('model_type')!r}"
    supported = ", ".join((*SUPPORTED_ARCHITECTURES, *ENCODER_ARCHITECTURES))
    raise UnsupportedModelError(f"the architecture {found} is not supported; supported: {supported}")


def _integer(d: dict[str, Any], key: str) -> int:
    if d.get(key) is None:
        raise UnsupportedModelError(f"the model's config has no {key!r}")
    return int(d[key])


def _rope(d: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """The base, and the scaling in the form of transformers 4: transformers 5 keeps both in `rope_parameters`."""
    parameters = dict(d.get("rope_parameters") or d.get("rope_scaling") or {})
    theta = float(parameters.pop("rope_theta", None) or d.get("rope_theta") or _DEFAULT_ROPE_THETA)
    legacy = parameters.pop("type", None)
    kind = parameters.pop("rope_type", None) or legacy or "default"
    if parameters.pop("partial_rotary_factor", None) not in (None, 1, 1.0):
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
    return theta, {"rope_type": kind, **parameters}


def _sliding_window(d: dict[str, Any], architecture: str, layers: int) -> int | None:
    window = d.get("sliding_window")
    if window is None or architecture == "LlamaForCausalLM":
        return None
    if architecture.startswith("Qwen") and not d.get("use_sliding_window", False):
        return None
    kinds = d.get("layer_types")
    if kinds is not None:
        windowed = sum(kind == "sliding_attention" for kind in kinds[:layers])
    elif architecture.startswith("Qwen"):
        # Qwen counts the other way round: the layers below `max_window_layers` see everything.
        windowed = max(0, layers - int(d.get("max_window_layers", 28)))
    else:
        windowed = layers
    if windowed == 0 or int(window) >= int(d.get("max_position_embeddings") or window):
        return None
    if windowed < layers:
        raise UnsupportedModelError(f"a sliding window in {windowed} of {layers} layers is not supported")
    return int(window)
