"""The feed-forward part of a decoder layer, with a gate (Shazeer 2020) or without one."""

from __future__ import annotations

import torch

from forebay.layers.linear import Linear
from forebay.layers.ops import Ops
from forebay.layers.params import Parameters


class DenseFeed:
    """`down(activation(gate(x)) * up(x))` of x [tokens, hidden], or without a gate `down(activation(up(x)))`.

    With several ranks, the result is a term of a sum over ranks.
    """

    def __init__(
        self,
        params: Parameters,
        prefix: str,
        hidden: int,
        intermediate: int,
        bias: bool,
        activation: str = "silu",
        *,
        gated: bool = True,
    ) -> None:
        self._activation, self._gated = activation, gated
        inner = params.shard.of(intermediate)
        names = ("gate_proj", "up_proj") if gated else ("up_proj",)
        self.gate_up = Linear(params, prefix, hidden, dict.fromkeys(names, inner), bias)
        self.down = Linear(params, prefix, inner, {"down_proj": hidden}, bias)

    def __call__(self, x: torch.Tensor, ops: Ops) -> torch.Tensor:
        if self._gated:
            return self.down(self.gate_up.gated(x, ops, self._activation))
        return self.down(ops.gate(self.gate_up(x), self._activation))
