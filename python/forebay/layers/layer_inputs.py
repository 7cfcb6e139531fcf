"""Per-layer inputs in addition to the residual stream (Gemma 3n, 2025; Gemma 4, 2026)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from forebay.layers.linear import Linear
from forebay.layers.norm import RMSNorm
from forebay.layers.ops import GATES
from forebay.layers.params import Parameters
from forebay.layers.step import Step
from forebay.weights.config import ModelConfig
from forebay.weights.errors import UnsupportedModelError

_MEAN_OF_TWO = 2.0**-0.5
"""The factor that keeps the magnitude of a sum of two equally large terms."""


class LayerRows:
    """Computes the per-layer inputs: rows selected by the token's id, plus a projection of the model's input."""

    def __init__(self, config: ModelConfig, params: Parameters) -> None:
        assert config.layer_inputs is not None
        if params.ranks is not None:
            raise UnsupportedModelError("inputs of each layer are not supported by ranks")
        size, layers = config.layer_inputs.size, config.num_hidden_layers
        rows, width = config.layer_inputs.vocab_size, layers * size
        self._table = params.tensor((rows, width), {"model.embed_tokens_per_layer.weight": rows})
        self._projection = Linear(params, "model", config.hidden_size, {"per_layer_model_projection": width})
        self._norm = RMSNorm(params, "model.per_layer_projection_norm", size, config.rms_norm_eps)
        self._shape = (layers, size)
        self._scale = config.hidden_size**-0.5

    def __call__(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Returns inputs [n, layers, size] for tokens [n]. x [n, hidden] are the model's inputs for these tokens."""
        own = F.embedding(tokens, self._table).unflatten(1, self._shape) * self._shape[1] ** 0.5
        seen = self._norm((self._projection(x) * self._scale).unflatten(1, self._shape))
        inputs: torch.Tensor = (seen + own) * _MEAN_OF_TWO
        return inputs


class InputOfLayer:
    """The term that a layer computes from its per-layer input, and adds after its other parts."""

    def __init__(self, config: ModelConfig, params: Parameters, layer: int) -> None:
        assert config.layer_inputs is not None
        prefix, hidden, size = f"model.layers.{layer}", config.hidden_size, config.layer_inputs.size
        self._layer = layer
        self._activation = config.hidden_act
        self._gate = Linear(params, prefix, hidden, {"per_layer_input_gate": size})
        self._projection = Linear(params, prefix, size, {"per_layer_projection": hidden})
        self._norm = RMSNorm(params, f"{prefix}.post_per_layer_input_norm", hidden, config.rms_norm_eps)

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Computes the term for the layer's output x [n, hidden]. The result has the same shape."""
        assert step.inputs is not None
        gated = GATES[self._activation](self._gate(x), step.inputs[:, self._layer].clone())
        return self._norm(self._projection(gated))
