"""Multi-head latent attention (DeepSeek-V2, 2024) over paged rows."""

from __future__ import annotations

import torch

from forebay.attention.backend import LatentHeads
from forebay.layers.indexer import LayerIndexer
from forebay.layers.linear import Linear
from forebay.layers.norm import RMSNorm
from forebay.layers.params import Parameters
from forebay.layers.rotary import rotate, rotate_pairs
from forebay.layers.step import Step
from forebay.weights.parts import Latent

_NORM_EPS = 1e-6
"""The epsilon of the norms of low-rank states. Transformers uses it regardless of `rms_norm_eps`."""


class LatentAttention:
    """Latent attention of a layer.

    It projects queries and a row per token, applies RoPE, stores the row, attends, and projects back.
    """

    def __init__(
        self,
        params: Parameters,
        prefix: str,
        layer: int,
        hidden: int,
        shape: Latent,
        indexer: LayerIndexer | None,
        rope: int | None = 0,
    ) -> None:
        """`layer` is the index among the layers with pages. `indexer` None: an earlier layer's choice is used, if any.

        `rope` is the index of the rotary embedding; None: no rotation.

        With several ranks, each has a part of the heads and computes a term of a sum over ranks. Rows are the same on
        all ranks.
        """
        self._layer = layer
        self._indexer = indexer
        self._rope = rope
        self._shape = own = shape.of_rank(params.shard.world)
        self._heads = LatentHeads(shape.nope_dim, shape.value_dim, shape.rank, shape.scale)
        self._rotate = rotate_pairs if shape.interleaved else rotate
        shard = params.shard
        queries = shard.of(shape.heads * (shape.nope_dim + shape.rotary_dim))
        self._query_down: Linear | None = None
        if shape.query_rank is None:
            self._query = Linear(params, prefix, hidden, {"q_proj": queries})
        else:
            self._query_down = Linear(params, prefix, hidden, {"q_a_proj": shape.query_rank}, shape.bias)
            self._query_norm = RMSNorm(params, f"{prefix}.q_a_layernorm", shape.query_rank, _NORM_EPS)
            self._query = Linear(params, prefix, shape.query_rank, {"q_b_proj": queries})
        row = {"kv_a_proj_with_mqa": shape.rank + shape.rotary_dim}
        self._row = Linear(params, prefix, hidden, row, shape.bias)
        self._row_norm = RMSNorm(params, f"{prefix}.kv_a_layernorm", shape.rank, _NORM_EPS)
        made = shape.nope_dim + shape.value_dim
        up = params.matrix(shape.rank, {f"{prefix}.kv_b_proj.weight": shard.of(shape.heads * made)})
        self._up = up.view(own.heads, made, shape.rank)
        self._output = Linear(params, prefix, shard.of(shape.heads * shape.value_dim), {"o_proj": hidden}, shape.bias)

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Computes attention for x [tokens, hidden]."""
        shape = self._shape
        low = x if self._query_down is None else self._query_norm(self._query_down(x))
        if self._indexer is not None:
            self._indexer(x, low, step)
        nope, rotated = self._query(low).unflatten(1, (shape.heads, -1)).split((shape.nope_dim, shape.rotary_dim), -1)
        latent, key = self._row(x).split((shape.rank, shape.rotary_dim), -1)
        if self._rope is not None:
            rotation = step.rotations[self._rope]
            rotated, key = self._rotate(rotated, rotation), self._rotate(key[:, None], rotation)[:, 0]
        q = torch.cat((nope, rotated), dim=-1)
        rows = torch.cat((self._row_norm(latent), key), dim=-1)
        return self._output(step.attend_latent(self._layer, q, rows, self._up, self._heads))
