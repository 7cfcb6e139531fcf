"""Grouped-query attention (Ainslie et al. 2023) over paged keys and values."""

from __future__ import annotations

import torch

from forebay.attention.backend import How
from forebay.layers.linear import Linear
from forebay.layers.norm import RMSNorm, unweighted
from forebay.layers.ops import Heads
from forebay.layers.params import Parameters
from forebay.layers.step import Step
from forebay.weights.errors import UnsupportedModelError
from forebay.weights.parts import GroupedQuery, LayerKind


class Attention:
    """Attention of a layer: projects, applies RoPE, stores keys and values in pages, attends, and projects back."""

    def __init__(
        self,
        params: Parameters,
        prefix: str,
        layer: int,
        hidden: int,
        shape: GroupedQuery,
        norm_eps: float,
        kind: LayerKind,
        wide_norms: bool = False,
        *,
        keys_of: int | None = None,
        shares: bool = False,
        inputs: int | None = None,
    ) -> None:
        """`layer` is the index among the layers with pages. `norm_eps` and `wide_norms` are for norms of heads, if any.

        `keys_of`: the index of the layer whose keys and values are read; None: this layer's own. `shares`: other layers
        read this layer's keys and values too. `inputs`: the size of the input states; None: `hidden`, as for the
        output.

        With several ranks, each has a part of the heads, and computes a term of a sum over ranks.
        """
        self._layer = layer
        self.kind = kind
        own = shape.of_rank(params.shard.world)
        self._heads = heads = Heads(own.heads, own.kv_heads, shape.head_dim)
        queries = params.shard.of(shape.heads * heads.dim)
        keys = params.shard.of_heads(shape.kv_heads).of(shape.kv_heads * heads.dim)
        widths = {"q_proj": queries}
        self._keys_of, self._shares = keys_of, shares
        if keys_of is None:
            widths["k_proj"] = keys
            if not shape.keys_are_values:
                widths["v_proj"] = keys
        self._keys_are_values, self._value_norm, self._eps = shape.keys_are_values, shape.value_norm, norm_eps
        if params.shard.world > 1 and (keys_of is not None or shape.keys_are_values or shape.value_norm):
            raise UnsupportedModelError("norms of values, and shared keys and values, are not supported by ranks")
        self._gated = shape.gate
        if shape.gate:
            widths["g_proj"] = queries
        self.qkv = Linear(params, prefix, inputs or hidden, widths, shape.qkv_bias)
        self.output = Linear(params, prefix, queries, {"o_proj": hidden}, shape.output_bias)
        self.sinks: torch.Tensor | None = None
        """One sink per query head: a logit in the softmax without a value; None: no sinks."""
        if shape.sinks:
            self.sinks = params.tensor((heads.queries,), {f"{prefix}.sinks": params.shard.of(shape.heads)})
        self._how = How(shape.scale, kind.window, kind.chunk, shape.cap, self.sinks, shape.both_ways)
        self._scaled = shape.query_scale is not None
        self.norms: tuple[RMSNorm, RMSNorm] | None = None
        """The norms of query and key heads; None: there are none, or the layer has no keys."""
        self._query_norm: RMSNorm | None = None
        self._plain_norms = shape.plain_norms
        if shape.qk_norm:
            self._query_norm = RMSNorm(params, f"{prefix}.q_norm", heads.dim, norm_eps, wide_norms)
            if keys_of is None:
                self.norms = (
                    self._query_norm,
                    RMSNorm(params, f"{prefix}.k_norm", heads.dim, norm_eps, wide_norms),
                )
        self.row_norms: tuple[RMSNorm, RMSNorm] | None = None
        """The norms over all query heads, and over all key heads; None: there are none."""
        if shape.row_norms:
            if params.shard.world > 1:
                raise UnsupportedModelError("norms over all heads of queries and keys are not supported by ranks")
            self.row_norms = (
                RMSNorm(params, f"{prefix}.q_norm", heads.queries * heads.dim, norm_eps, wide_norms),
                RMSNorm(params, f"{prefix}.k_norm", heads.keys * heads.dim, norm_eps, wide_norms),
            )

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Computes attention of x [tokens, inputs]. The result is [tokens, hidden]."""
        qkv, gate = self.qkv(x), None
        if self._keys_of is not None:
            q = qkv.view(len(x), -1, self._heads.dim)
            q = q if self._query_norm is None else self._query_norm(q)
            return self.output(step.attend_kept(self._layer, self._keys_of, q, self.kind.rope, self._how))
        if self._plain_norms:
            qkv = self._normalised(qkv)
        if self._keys_are_values or self._value_norm:
            qkv = self._with_values(qkv)
        if self._gated:
            width = self._heads.queries * self._heads.dim
            gate, qkv = qkv[:, -width:], qkv[:, :-width].contiguous()
        if self.row_norms is not None:
            heads = self._heads
            widths = [heads.queries * heads.dim, heads.keys * heads.dim, heads.keys * heads.dim]
            q, k, v = qkv.split(widths, dim=1)
            qkv = torch.cat((self.row_norms[0](q), self.row_norms[1](k), v), dim=1)
        attended = step.attend(
            self._layer,
            qkv,
            self._heads,
            self.norms,
            self.kind.rope,
            self._how,
            is_shared=self._shares,
            is_scaled=self._scaled,
        )
        return self.output(attended if gate is None else attended * gate.sigmoid())

    def _normalised(self, qkv: torch.Tensor) -> torch.Tensor:
        """Normalises query and key heads without weights. It may precede RoPE, since RoPE keeps the mean square."""
        heads = self._heads
        width = (heads.queries + heads.keys) * heads.dim
        both = unweighted(qkv[:, :width].unflatten(1, (-1, heads.dim)), self._eps).flatten(1)
        return torch.cat((both, qkv[:, width:]), dim=1)

    def _with_values(self, qkv: torch.Tensor) -> torch.Tensor:
        """Returns queries, keys and values. The values may be a copy of the keys, and may be normalised."""
        heads = self._heads
        queries, width = heads.queries * heads.dim, heads.keys * heads.dim
        v = qkv[:, queries : queries + width] if self._keys_are_values else qkv[:, queries + width :]
        if self._value_norm:
            v = unweighted(v.unflatten(1, (heads.keys, heads.dim)), self._eps).flatten(1)
        return torch.cat((qkv[:, : queries + width], v), dim=1)
