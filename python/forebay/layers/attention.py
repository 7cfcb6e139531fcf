"""Grouped-query attention (Ainslie et al. 2023) over paged keys and values."""

from __future__ import annotations

import torch

from forebay.layers.linear import Linear
from forebay.layers.norm import RMSNorm
from forebay.layers.ops import Heads
from forebay.layers.params import Parameters
from forebay.layers.step import Step


class Attention:
    """Projects, rotates, stores keys and values in their pages, attends and projects back."""

    def __init__(
        self,
        params: Parameters,
        prefix: str,
        layer: int,
        hidden: int,
        heads: Heads,
        *,
        qkv_bias: bool,
        output_bias: bool,
        qk_norm_eps: float | None = None,
    ) -> None:
        """`layer` is its number. `qk_norm_eps`: normalise heads before rotating, as Qwen3 does; None: do not."""
        self._layer = layer
        self._heads = heads
        widths = {
            "q_proj": heads.queries * heads.dim,
            "k_proj": heads.keys * heads.dim,
            "v_proj": heads.keys * heads.dim,
        }
        self.qkv = Linear(params, prefix, hidden, widths, qkv_bias)
        self.output = Linear(params, prefix, heads.queries * heads.dim, {"o_proj": hidden}, output_bias)
        self.norms = None
        if qk_norm_eps is not None:
            self.norms = (
                RMSNorm(params, f"{prefix}.q_norm", heads.dim, qk_norm_eps),
                RMSNorm(params, f"{prefix}.k_norm", heads.dim, qk_norm_eps),
            )

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x is [tokens, hidden]."""
        return self.output(step.attend(self._layer, self.qkv(x), self._heads, self.norms))
