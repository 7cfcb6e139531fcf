"""Mixtures of experts: most of a layer's weights, of which each token uses a few."""

from __future__ import annotations

import torch

from forebay.layers.mlp import SwiGLU
from forebay.layers.ops import Ops
from forebay.layers.params import Parameters
from forebay.layers.quantised import KeptMatrix
from forebay.layers.routing import Router
from forebay.weights.parts import Experts


class MixtureOfExperts:
    """The weighted sum of a token's experts, each a SwiGLU, and of what all tokens share; x is [tokens, hidden]."""

    def __init__(self, params: Parameters, prefix: str, hidden: int, experts: Experts) -> None:
        count, inner = experts.count, experts.intermediate_size
        self._router = Router(params, f"{prefix}.gate", hidden, experts)
        names = [f"{prefix}.experts.{expert}" for expert in range(count)]
        gate_up = {f"{name}.{kind}_proj.weight": inner for name in names for kind in ("gate", "up")}
        down = {f"{name}.down_proj.weight": hidden for name in names}
        self._products = params.products
        self._kept: tuple[KeptMatrix, KeptMatrix] | None = None
        if params.keeps_experts(hidden, gate_up) and params.keeps_experts(inner, down):
            kept = params.kept_matrix(hidden, gate_up), params.kept_matrix(inner, down)
            assert kept[0] is not None
            assert kept[1] is not None
            self._kept = kept[0], kept[1]
        else:
            self._gate_up = params.matrix(hidden, gate_up)[0].view(count, 2 * inner, hidden)
            self._down = params.matrix(inner, down)[0].view(count, hidden, inner)
        self._shared: SwiGLU | None = None
        if experts.shared_size:
            self._shared = SwiGLU(params, f"{prefix}.shared_experts", hidden, experts.shared_size, bias=False)

    def __call__(self, x: torch.Tensor, ops: Ops) -> torch.Tensor:
        if self._kept is None:
            y = ops.experts(x, *self._router(x), self._gate_up, self._down)
        else:
            assert self._products is not None
            y = self._products.experts(x, *self._router(x), *self._kept)
        return y if self._shared is None else y.add_(self._shared(x, ops))
