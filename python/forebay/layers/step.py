"""What all layers of a step share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forebay.attention.backend import AttentionBackend, LatentHeads, LayerKV
from forebay.layers.norm import RMSNorm
from forebay.layers.ops import Heads, Ops
from forebay.layers.rotary import Rotation


@dataclass(frozen=True)
class Step:
    """One step as its layers see it; `n` tokens. A layer knows its own number."""

    rotation: Rotation
    writes: torch.Tensor  # int64 [n]: entry of `LayerKV` that each token is written to
    kv: Sequence[LayerKV]  # one a layer
    backend: AttentionBackend
    prepared: Any  # what the backend prepared for this step
    ops: Ops

    def attend(
        self, layer: int, qkv: torch.Tensor, heads: Heads, norms: tuple[RMSNorm, RMSNorm] | None
    ) -> torch.Tensor:
        """Attention [n, query heads * dim] of what a layer has projected, which is kept in the layer's pages."""
        kv = self.kv[layer]
        q, k, v = self.ops.rotate_and_keep(qkv, heads, norms, self.rotation, kv, self.writes)
        return self.backend.attend(q, k, v, kv, self.prepared)

    def attend_latent(
        self, layer: int, q: torch.Tensor, rows: torch.Tensor, up: torch.Tensor, heads: LatentHeads
    ) -> torch.Tensor:
        """Attention [n, heads * value_dim] of rows [n, row], which are kept in the layer's pages."""
        kv = self.kv[layer]
        kv.keys.index_copy_(0, self.writes, rows[:, None])
        return self.backend.attend_latent(q, rows, up, kv, heads, self.prepared)
