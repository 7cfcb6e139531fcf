"""The computation of a vector from a prompt, for models that do not generate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Pooling", "VectorShape"]


@dataclass(frozen=True)
class VectorShape:
    """A product of a pooled vector, an activation, and a norm."""

    name: str
    """The name of the product's weights, without the suffix."""
    inputs: int
    outputs: int
    bias: bool
    activation: str
    """The activation after the product: `identity`, `tanh`, `gelu` or `relu`."""
    norm: str | None = None
    """The name of the norm after the activation; None: there is none."""
    file: str | None = None
    """The file with the weights; None: they are among the model's."""


@dataclass(frozen=True)
class Pooling:
    """How a prompt's hidden states become one vector, and how the brain processes that vector."""

    task: str
    """The task. `embed`: the vector is the answer. `score`: it is one logit, the score of a pair of texts.

    `classify`: it is a logit for each label.
    """
    kind: str
    """The kind: `mean` of all positions, `cls` (the first) or `last`. `causal_mean` is the mean for a causal model."""
    size: int
    """The number of elements of a vector."""
    normalize: bool
    """True if vectors are divided by their Euclidean length."""
    function: str
    """The function that turns logits into answers: `identity`, `sigmoid` or `softmax`."""
    max_length: int | None
    """The longest prompt, in tokens, that the model's authors use; None: the model's number of positions."""
    labels: tuple[str, ...] = ()
    """The names of labels, one for each logit; (): the vector is the answer."""
    layers: tuple[VectorShape, ...] = ()
    """The layers that the pooled vector goes through."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Pooling:
        """Reads the output of `to_dict`."""
        own = {"labels": tuple(values["labels"]), "layers": tuple(VectorShape(**one) for one in values["layers"])}
        return cls(**{**values, **own})

    @property
    def scores(self) -> bool:
        """True if layers make logits of a vector."""
        return self.task != "embed"

    def to_dict(self) -> dict[str, Any]:
        """The pooling, in JSON's types."""
        return asdict(self)
