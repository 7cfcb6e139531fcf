"""The vector that a model makes of a prompt in place of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Pooling"]


@dataclass(frozen=True)
class Pooling:
    """The way from the hidden states of a prompt to one vector, and the brain's work on that vector."""

    task: str
    """The task. `embed`: the vector is the answer. `score`: it is one logit, the score of a pair of texts."""
    kind: str
    """The kind: `mean` of all positions, `cls` (the first) or `last`. `causal_mean` is the mean of a causal model."""
    size: int
    """The number of elements of a vector."""
    normalize: bool
    """True if vectors are divided by their Euclidean length."""
    sigmoid: bool
    """True if a logit is squeezed into 0 .. 1."""
    max_length: int | None
    """The longest prompt, in tokens, that the model's authors use; None: the model's number of positions."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Pooling:
        """Reads the output of `to_dict`."""
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The pooling, in JSON's types."""
        return asdict(self)
