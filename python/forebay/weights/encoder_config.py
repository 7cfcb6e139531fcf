"""The shape of a BERT model, in the form that the brain sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["EncoderConfig"]


@dataclass(frozen=True)
class EncoderConfig:
    """The data from which code builds an encoder. Sizes count elements; `max_position_embeddings` counts tokens."""

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
    def from_shape(cls, shape: Mapping[str, Any]) -> EncoderConfig:
        """Reads the shape of an encoder in the handshake."""
        return cls(
            architecture=shape["architecture"],
            vocab_size=shape["vocab_size"],
            hidden_size=shape["hidden_size"],
            intermediate_size=shape["intermediate_size"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"],
            layer_norm_eps=shape["layer_norm_eps"],
            max_position_embeddings=shape["max_positions"],
            type_vocab_size=shape["kinds"],
            hidden_act=shape["activation"],
        )

    @property
    def longest_context(self) -> int:
        """The largest number of positions of a prompt."""
        return self.max_position_embeddings
