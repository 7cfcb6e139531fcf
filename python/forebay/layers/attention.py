"""Grouped-query attention (Ainslie et al. 2023) over paged keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forebay.attention.backend import AttentionBackend, LayerKV, StepAttention
from forebay.layers.linear import Linear
from forebay.layers.norm import RMSNorm
from forebay.layers.params import Parameters
from forebay.layers.rotary import Rotation, rotate


@dataclass(frozen=True)
class Heads:
    """Numbers of query and of key-value heads, and their width."""

    queries: int
    keys: int
    dim: int


class Attention:
    """Projects, rotates, stores keys and values in their pages, attends and projects back."""

    def __init__(
        self,
        params: Parameters,
        prefix: str,
        hidden: int,
        heads: Heads,
        *,
        qkv_bias: bool,
        output_bias: bool,
        qk_norm_eps: float | None = None,
    ) -> None:
        """`qk_norm_eps`: normalise each query and key head before rotating, as Qwen3 does; None: do not."""
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

    def __call__(
        self, x: torch.Tensor, rotation: Rotation, kv: LayerKV, step: StepAttention, backend: AttentionBackend
    ) -> torch.Tensor:
        """x is [tokens, hidden]."""
        queries, keys = self._heads.queries, self._heads.keys
        qkv = self.qkv(x).view(x.shape[0], queries + 2 * keys, self._heads.dim)
        v = qkv[:, queries + keys :]
        if self.norms is None:
            rotated = rotate(qkv[:, : queries + keys], rotation)
            q, k = rotated[:, :queries], rotated[:, queries:]
        else:
            q_norm, k_norm = self.norms
            q = rotate(q_norm(qkv[:, :queries]), rotation)
            k = rotate(k_norm(qkv[:, queries : queries + keys]), rotation)
        return self.output(backend.attend(q, k, v, kv, step))
