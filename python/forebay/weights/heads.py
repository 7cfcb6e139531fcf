"""Draft heads, in the form that the brain sends: layers that draft from the features of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from forebay.weights.config import ModelConfig, config_of
from forebay.weights.errors import UnsupportedModelError

EAGLE3, MTP = "eagle3", "mtp"
"""EAGLE-3 (Li et al. 2025), and a layer that predicts one more token (DeepSeek-V3, 2024)."""


@dataclass(frozen=True)
class HeadConfig:
    """The data from which a draft head is built."""

    kind: str
    taps: tuple[int, ...]
    """The layers whose inputs are combined into features. An index equal to the layer count means the final states."""
    norm_before_residual: bool
    """True if the normalised feature is the input of the layer's residual connection."""
    vocab_size: int
    """The size of the head's vocabulary."""
    mapped: bool
    """True if the head's vocabulary has different token ids, which are mapped to the model's."""
    own_embedding: bool
    own_output: bool
    """True if the head has a separate output matrix; False: it uses the model's."""
    shape: ModelConfig
    """The shape of a model that has only the head's layer. With MTP, that of a model whose last layer is the head's."""

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> HeadConfig | None:
        """Reads the draft head from a handshake's config. None: the draft model is a separate model."""
        head = model.get("head")
        if head is None:
            return None
        shape = config_of(model["shape"])
        if not isinstance(shape, ModelConfig) or head["kind"] not in (EAGLE3, MTP):
            raise UnsupportedModelError(f"a head of the kind {head['kind']!r} is not supported by PyTorch's hand")
        return cls(**{**head, "taps": tuple(head["taps"])}, shape=shape)

    def kept_with(self, model: ModelConfig) -> ModelConfig:
        """Returns the shape for the KV cache pages: the head's layer is the last, and each position has a feature."""
        shape = self.shape
        kind, feed = shape.kinds[-1], shape.feeds[-1]
        if self.kind == EAGLE3:
            kind = replace(kind, heads=shape.heads(0))
        kinds, feeds = (*model.kinds, kind), (*model.feeds, feed)
        return replace(model, kinds=kinds, feeds=feeds, features=shape.hidden_size)
