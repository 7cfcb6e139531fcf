"""The configuration of a model that the Transformers library computes, and the results of probing it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from forebay.weights.config import ModelConfig
from forebay.weights.parts import Dense, GroupedQuery

__all__ = ["CalledConfig", "Calls", "KeptShape"]


@dataclass(frozen=True)
class KeptShape:
    """The keys and values that one attention call keeps per position. Sizes count elements."""

    heads: int
    """The number of key-value heads."""
    key_size: int
    """Elements of a key head."""
    value_size: int
    """Elements of a value head."""

    @property
    def elements(self) -> int:
        """The number of elements kept per position."""
        return self.heads * (self.key_size + self.value_size)


@dataclass(frozen=True)
class Calls:
    """The results of a probe: one forward pass of a few tokens without weights."""

    kept: tuple[KeptShape, ...]
    """The shape of the kept keys and values of each attention call, in order."""
    uses: tuple[str, ...]
    """The attention options that any call has used, apart from causal order, sorted."""
    state_bytes: int
    """Bytes of the recurrent states of one request; 0: the model has none."""
    vocab_size: int
    hidden_size: int
    longest_context: int
    """The largest number of positions of a request."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Calls:
        """Reads the output of `to_dict`."""
        kept = tuple(KeptShape(*shape) for shape in values["kept"])
        return cls(**{**values, "kept": kept, "uses": tuple(values["uses"])})

    def to_dict(self) -> dict[str, Any]:
        """Returns the findings as JSON types."""
        kept = [[shape.heads, shape.key_size, shape.value_size] for shape in self.kept]
        return {**asdict(self), "kept": kept, "uses": list(self.uses)}


@dataclass(frozen=True)
class CalledConfig(ModelConfig):
    """The configuration of a model that the Transformers library computes.

    Transformers reads all other settings from `config.json` itself. So the fields for native models are placeholders
    here, and `calls` has the shapes of pages.
    """

    calls: Calls | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], calls: Calls, eos: tuple[int, ...] = ()) -> CalledConfig:
        """Creates the configuration from a `config.json` and the results of a probe."""
        first = calls.kept[0] if calls.kept else KeptShape(1, 1, 1)
        names = config.get("architectures") or [str(config.get("model_type"))]
        return cls(
            architecture=str(names[0]),
            vocab_size=calls.vocab_size,
            hidden_size=calls.hidden_size,
            attention=GroupedQuery(first.heads, first.heads, first.key_size, first.key_size, False, False, False),
            feeds=(Dense(0, False),) * len(calls.kept),
            rms_norm_eps=0.0,
            kinds=(),
            ropes=(),
            max_position_embeddings=calls.longest_context,
            tie_word_embeddings=False,
            hidden_act="",
            eos_token_ids=eos,
            calls=calls,
        )

    @property
    def kept(self) -> tuple[KeptShape, ...]:
        """The shape of the keys and values of a position, for each attention call."""
        return () if self.calls is None else self.calls.kept

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the recurrent states of one request, as found by the probe."""
        return 0 if self.calls is None else self.calls.state_bytes
