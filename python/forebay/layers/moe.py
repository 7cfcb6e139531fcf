"""Mixtures of experts: most of a layer's weights, of which each token uses a few."""

from __future__ import annotations

import torch

from forebay.distributed.exchange import Exchange
from forebay.layers.mlp import SwiGLU
from forebay.layers.ops import Ops
from forebay.layers.params import Parameters
from forebay.layers.quantised import KeptMatrix
from forebay.layers.routing import Router
from forebay.weights.parts import Experts
from forebay.weights.shards import ALONE, Part, Shard


class MixtureOfExperts:
    """The weighted sum of a token's experts, each a SwiGLU, and of what all tokens share; x is [tokens, hidden].

    With other ranks it gives a term of a sum over ranks: of a part of each expert, or of some of the experts
    (`OwnExperts`), and of a part of what is shared.

    The ranks of a step group have some of the experts each, and tokens of their own: they gather the tokens of all,
    and each gets its own rows of the sum. What is shared is whole on each rank.
    """

    def __init__(self, params: Parameters, prefix: str, hidden: int, experts: Experts) -> None:
        count, inner = experts.count, experts.intermediate_size
        self._exchange = params.exchange
        shard = params.shard if self._exchange is None else Shard(self._exchange.rank, self._exchange.world)
        whole = self._exchange is not None or (params.ranks is not None and params.ranks.expert_parallel)
        own = shard.of(count) if whole else ALONE.of(count)
        of_inner = ALONE.of(inner) if whole else params.shard.of(inner)
        self._router = Router(params, f"{prefix}.gate", hidden, experts)
        self._choose = OwnExperts(self._router, own) if whole else self._router
        names = [(f"{prefix}.experts.{expert}", expert in range(own.first, own.end)) for expert in range(count)]
        gate_up = {
            f"{name}.{kind}_proj.weight": of_inner if here else Part(inner, 0, 0)
            for name, here in names
            for kind in ("gate", "up")
        }
        down = {f"{name}.down_proj.weight": hidden if here else Part(hidden, 0, 0) for name, here in names}
        self._products = params.products
        self._kept: tuple[KeptMatrix, KeptMatrix] | None = None
        if params.keeps_experts(hidden, gate_up) and params.keeps_experts(of_inner, down):
            kept = params.kept_matrix(hidden, gate_up), params.kept_matrix(of_inner, down)
            assert kept[0] is not None
            assert kept[1] is not None
            self._kept = kept[0], kept[1]
        else:
            self._gate_up = params.matrix(hidden, gate_up)[0].view(own.size, 2 * of_inner.size, hidden)
            self._down = params.matrix(of_inner, down)[0].view(own.size, hidden, of_inner.size)
        self._shared: SwiGLU | None = None
        if experts.shared_size:
            self._shared = SwiGLU(params, f"{prefix}.shared_experts", hidden, experts.shared_size, bias=False)

    def __call__(self, x: torch.Tensor, ops: Ops) -> torch.Tensor:
        y = self._routed(x, ops) if self._exchange is None else self._exchanged(x, ops, self._exchange)
        return y if self._shared is None else y.add_(self._shared(x, ops))

    def take_part(self, none: torch.Tensor, ops: Ops) -> None:
        """Computes the tokens of others where this rank has none; `none` is [0, hidden]."""
        if self._exchange is not None:
            self._exchanged(none, ops, self._exchange)

    def _exchanged(self, x: torch.Tensor, ops: Ops, exchange: Exchange) -> torch.Tensor:
        return exchange.scatter(self._routed(exchange.gather(x), ops))

    def _routed(self, x: torch.Tensor, ops: Ops) -> torch.Tensor:
        """What this rank's experts give of x."""
        if self._kept is None:
            return ops.experts(x, *self._choose(x), self._gate_up, self._down)
        assert self._products is not None
        return self._products.experts(x, *self._choose(x), *self._kept)


class OwnExperts:
    """Of a token's experts those of this rank, numbered from 0; the places of others name no expert."""

    def __init__(self, router: Router, own: Part) -> None:
        self._router = router
        self._own = own

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As of `Router`, but for ids that are `own.size`, whose weights are 0."""
        ids, weights = self._router(x)
        own = self._own
        elsewhere = (ids < own.first) | (ids >= own.end)
        return (ids - own.first).masked_fill_(elsewhere, own.size), weights.masked_fill(elsewhere, 0)
