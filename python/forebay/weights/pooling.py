"""Pooling: how models that do not generate compute a vector from a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Pooling", "VectorShape"]


@dataclass(frozen=True)
class VectorShape:
    """A layer for pooled vectors: a linear projection, an activation, and an optional norm."""

    name: str
    """The name of the projection's weights, without the suffix."""
    inputs: int
    outputs: int
    bias: bool
    activation: str
    """The activation after the projection: `identity`, `tanh`, `gelu` or `relu`."""
    norm: str | None = None
    """The name of the norm after the activation; None: no norm."""
    file: str | None = None
    """The file with the weights; None: they are in the model's files."""


@dataclass(frozen=True)
class Pooling:
    """How a prompt's hidden states become one vector, and how the brain processes that vector."""

    task: str
    """The task. `embed`: the vector is the result. `score`: the vector is one logit, the score of a pair of texts.

    `classify`: the vector is a logit per label.
    """
    kind: str
    """The kind: `mean` of all positions, `cls` (the first) or `last`. `causal_mean` is the mean for a causal model."""
    size: int
    """The number of elements of a vector."""
    normalize: bool
    """True if vectors are divided by their Euclidean norm."""
    function: str
    """The function that turns logits into results: `identity`, `sigmoid` or `softmax`."""
    max_length: int | None
    """The longest prompt, in tokens, by the settings of the model's authors; None: the model's number of positions."""
    labels: tuple[str, ...] = ()
    """The names of the labels, one per logit; (): the vector is the result."""
    layers: tuple[VectorShape, ...] = ()
    """The layers that are applied to the pooled vector."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Pooling:
        """Reads the output of `to_dict`."""
        own = {"labels": tuple(values["labels"]), "layers": tuple(VectorShape(**one) for one in values["layers"])}
        return cls(**{**values, **own})

    @property
    def scores(self) -> bool:
        """True if layers compute logits from the vector."""
        return self.task != "embed"

    def to_dict(self) -> dict[str, Any]:
        """Returns the pooling as JSON types."""
        return asdict(self)
