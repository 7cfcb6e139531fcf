"""Layers for pooled vectors: `Dense` modules of sentence-transformers, and classifier heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from forebay.layers.linear import Linear
from forebay.layers.norm import Norm
from forebay.layers.params import Parameters
from forebay.weights.pooling import VectorShape

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "relu": F.relu,
}


class VectorLayer:
    """`norm(activation(x W^T + b))` of vectors x [prompts, inputs]."""

    def __init__(self, params: Parameters, shape: VectorShape, norm: Norm | None) -> None:
        prefix, _, name = shape.name.rpartition(".")
        self._linear = Linear(params, prefix, shape.inputs, {name: shape.outputs}, shape.bias)
        self._activation = ACTIVATIONS[shape.activation]
        self._norm = norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = self._activation(self._linear(x))
        return x if self._norm is None else self._norm(x)
