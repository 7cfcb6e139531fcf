"""Grouped-query attention (Ainslie et al. 2023) over paged keys and values."""

from __future__ import annotations

import torch

from forebay.layers.linear import Linear
from forebay.layers.norm import RMSNorm
from forebay.layers.ops import Heads
from forebay.layers.params import Parameters
from forebay.layers.step import Step
from forebay.weights.parts import GroupedQuery


class Attention:
    """Attention of a layer. It projects, rotates, stores keys and values in their pages, attends, and projects back."""

    def __init__(
        self, params: Parameters, prefix: str, layer: int, hidden: int, shape: GroupedQuery, norm_eps: float
    ) -> None:
        """`layer` is its number. `norm_eps`: of the norms of heads, where there are any.

        With other ranks it has some of the heads, and gives a term of a sum over ranks.
        """
        self._layer = layer
        own = shape.of_rank(params.shard.world)
        self._heads = heads = Heads(own.heads, own.kv_heads, shape.head_dim)
        queries = params.shard.of(shape.heads * heads.dim)
        keys = params.shard.of_heads(shape.kv_heads).of(shape.kv_heads * heads.dim)
        widths = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        self.qkv = Linear(params, prefix, hidden, widths, shape.qkv_bias)
        self.output = Linear(params, prefix, queries, {"o_proj": hidden}, shape.output_bias)
        self.norms = None
        if shape.qk_norm:
            self.norms = (
                RMSNorm(params, f"{prefix}.q_norm", heads.dim, norm_eps),
                RMSNorm(params, f"{prefix}.k_norm", heads.dim, norm_eps),
            )

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x is [tokens, hidden]."""
        return self.output(step.attend(self._layer, self.qkv(x), self._heads, self.norms))
