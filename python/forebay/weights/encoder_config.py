"""The shape of a BERT, read from its `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forebay.weights.errors import UnsupportedModelError
from forebay.weights.sizes import MOST_HEADS, MOST_LAYERS, MOST_POSITIONS, real, size, size_or

__all__ = ["ENCODER_ARCHITECTURES", "EncoderConfig", "is_encoder"]

ENCODER_ARCHITECTURES = ("BertModel", "BertForSequenceClassification")
_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


@dataclass(frozen=True)
class EncoderConfig:
    """The data from which the model code builds an encoder. Sizes are numbers of elements, and positions are tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    layer_norm_eps: float
    max_position_embeddings: int
    type_vocab_size: int
    hidden_act: str

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> EncoderConfig:
        """Reads a `config.json`. Raises UnsupportedModelError for a model that would be computed wrongly."""
        kind = d.get("position_embedding_type") or "absolute"
        if kind != "absolute":
            raise UnsupportedModelError(f"position_embedding_type {kind!r} is not supported; supported: absolute")
        activation = str(d.get("hidden_act") or "gelu")
        if activation not in _ACTIVATIONS:
            raise UnsupportedModelError(f"hidden_act {activation!r} is not supported: use {', '.join(_ACTIVATIONS)}")
        if d.get("is_decoder"):
            raise UnsupportedModelError("a BERT that is a decoder is not supported")
        hidden, heads = size(d, "hidden_size"), size(d, "num_attention_heads", most=MOST_HEADS)
        if hidden % heads:
            raise UnsupportedModelError(
                f"{hidden} elements (hidden_size) can't be shared by {heads} heads (num_attention_heads) equally"
            )
        return cls(
            architecture=next(
                (name for name in d.get("architectures") or () if name in ENCODER_ARCHITECTURES),
                ENCODER_ARCHITECTURES[0],
            ),
            vocab_size=size(d, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=size(d, "intermediate_size"),
            num_hidden_layers=size(d, "num_hidden_layers", most=MOST_LAYERS),
            num_attention_heads=heads,
            layer_norm_eps=real(d, "layer_norm_eps", 1e-12),
            max_position_embeddings=size_or(d, "max_position_embeddings", 512, most=MOST_POSITIONS),
            type_vocab_size=size_or(d, "type_vocab_size", 2),
            hidden_act=activation,
        )

    @property
    def longest_context(self) -> int:
        """The largest number of positions of a prompt."""
        return self.max_position_embeddings


def is_encoder(d: dict[str, Any]) -> bool:
    """True if `EncoderConfig` can read this `config.json`. One without `architectures` goes by its `model_type`."""
    names = d.get("architectures") or []
    return any(name in ENCODER_ARCHITECTURES for name in names) if names else d.get("model_type") == "bert"
