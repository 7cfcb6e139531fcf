"""Experts parallel to a dense part, with separate norms for each (Gemma 4, 2026)."""

from __future__ import annotations

import torch

from forebay.layers.mlp import DenseFeed
from forebay.layers.moe import MixtureOfExperts
from forebay.layers.norm import RMSNorm, unweighted
from forebay.layers.ops import Ops
from forebay.layers.params import Parameters
from forebay.layers.routing import Router
from forebay.weights.config import ModelConfig
from forebay.weights.errors import UnsupportedModelError
from forebay.weights.parts import Experts


class NormedRouter(Router):
    """Routes tokens by states that are normalised and then multiplied by learned factors."""

    def __init__(self, params: Parameters, prefix: str, hidden: int, experts: Experts, eps: float) -> None:
        super().__init__(params, prefix, hidden, experts)
        self._factors = params.tensor((hidden,), {f"{prefix}.scale": hidden})
        self._of_experts = params.tensor((experts.count,), {f"{prefix}.per_expert_scale": experts.count})
        self._eps, self._scale = eps, hidden**-0.5

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Routes states x [tokens, hidden]; see `Router`."""
        ids, weights = super().__call__(unweighted(x, self._eps) * self._factors * self._scale)
        return ids, weights * self._of_experts[ids].float()


class ExpertsBeside:
    """The sum of a dense part and a mixture of experts. The router reads the states before their norm."""

    def __init__(self, config: ModelConfig, params: Parameters, prefix: str, experts: Experts) -> None:
        if params.ranks is not None or params.exchange is not None:
            raise UnsupportedModelError("experts beside a dense part are not supported by ranks")
        hidden, eps, activation = config.hidden_size, config.rms_norm_eps, config.hidden_act
        self._dense = DenseFeed(
            params, f"{prefix}.shared_experts", hidden, experts.shared_size, bias=False, activation=activation
        )
        router = NormedRouter(params, f"{prefix}.gate", hidden, experts, eps)
        self._routed = MixtureOfExperts(params, prefix, hidden, experts, activation, router)
        self._before, self._behind_dense, self._behind = (
            RMSNorm(params, f"{prefix}.{name}_layernorm", hidden, eps)
            for name in ("experts", "post_shared", "post_experts")
        )

    def beside(self, x: torch.Tensor, states: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Computes the part from normalised states x and the states before the norm. All are [tokens, hidden]."""
        routed = self._routed.routed(self._before(states), states, ops)
        return self._behind_dense(self._dense(x, ops)) + self._behind(routed)
