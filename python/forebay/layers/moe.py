"""Mixtures of experts. They have most of a layer's weights, but each token uses only a few experts."""

from __future__ import annotations

import torch

from forebay.distributed.exchange import Exchange
from forebay.layers.linear import Linear
from forebay.layers.mlp import DenseFeed
from forebay.layers.ops import Ops
from forebay.layers.params import Parameters
from forebay.layers.quantised import KeptMatrix
from forebay.layers.routing import Router
from forebay.weights.errors import UnsupportedModelError
from forebay.weights.parts import Experts
from forebay.weights.shards import ALONE, Part, Shard


class MixtureOfExperts:
    """The weighted sum of a token's experts, each a `DenseFeed`, and of the shared expert; x is [tokens, hidden].

    With several ranks, the result is a term of a sum over ranks. A rank has either a part of each expert or some of the
    experts (`OwnExperts`), and a part of the shared expert.

    In a step group, each rank has some of the experts, and separate tokens. The ranks gather all tokens, and each gets
    the rows of the sum for its own tokens. Each rank has the whole shared expert.
    """

    def __init__(
        self,
        params: Parameters,
        prefix: str,
        hidden: int,
        experts: Experts,
        activation: str = "silu",
        router: Router | None = None,
    ) -> None:
        """`router` None: creates a router, and the shared expert if there is one."""
        count, inner = experts.count, experts.intermediate_size
        states = hidden
        self._latent: tuple[Linear, Linear] | None = None
        """The projections before and after the experts; None: experts read the layer's states."""
        if experts.latent_size:
            hidden = experts.latent_size
            self._latent = (
                Linear(params, prefix, states, {"fc1_latent_proj": hidden}),
                Linear(params, prefix, hidden, {"fc2_latent_proj": states}),
            )
        self._activation = activation
        self._weighs_inputs = experts.weighs_inputs
        self._exchange = params.exchange
        shard = params.shard if self._exchange is None else Shard(self._exchange.rank, self._exchange.world)
        whole = self._exchange is not None or (params.ranks is not None and params.ranks.expert_parallel)
        own = shard.of(count) if whole else ALONE.of(count)
        of_inner = ALONE.of(inner) if whole else params.shard.of(inner)
        self.router = Router(params, f"{prefix}.gate", states, experts) if router is None else router
        self._choose = OwnExperts(self.router, own) if whole else self.router
        names = [(f"{prefix}.experts.{expert}", expert in range(own.first, own.end)) for expert in range(count)]
        kinds = ("gate", "up") if experts.gated else ("up",)
        gate_up = {
            f"{name}.{kind}_proj.weight": of_inner if here else Part(inner, 0, 0)
            for name, here in names
            for kind in kinds
        }
        down = {f"{name}.down_proj.weight": hidden if here else Part(hidden, 0, 0) for name, here in names}
        self._products = params.products
        self._kept: tuple[KeptMatrix, KeptMatrix] | None = None
        self.stacks: tuple[torch.Tensor, torch.Tensor] | None = None
        """Gate and up, and down projections, each [experts, rows, inputs]; None: they are in the stored format."""
        # Products with kept experts support only gated experts without biases.
        kept = params.keeps_experts(hidden, gate_up) and params.keeps_experts(of_inner, down)
        if kept and experts.gated and not experts.bias:
            both = params.kept_matrix(hidden, gate_up), params.kept_matrix(of_inner, down)
            assert both[0] is not None
            assert both[1] is not None
            self._kept = both[0], both[1]
        else:
            first, second = params.matrix(hidden, gate_up), params.matrix(of_inner, down)
            rows = len(kinds) * of_inner.size
            self.stacks = first.view(own.size, rows, hidden), second.view(own.size, hidden, of_inner.size)
        self.biases: tuple[torch.Tensor, torch.Tensor] | None = None
        """Biases of gates and ups [experts, 2 * inner], and of outputs [experts, hidden]; None: no biases."""
        if experts.bias:
            if params.ranks is not None or params.exchange is not None:
                raise UnsupportedModelError("experts with biases are not supported by ranks")
            of_gates = {f"{name}.{kind}_proj.bias": inner for name, _ in names for kind in ("gate", "up")}
            of_outputs = {f"{name}.down_proj.bias": hidden for name, _ in names}
            self.biases = (
                params.tensor((count * 2 * inner,), of_gates).view(count, -1),
                params.tensor((count * hidden,), of_outputs).view(count, -1),
            )
        self.shared: DenseFeed | None = None
        if experts.shared_size and router is None:
            act = activation if not experts.gated else "silu"
            at, size = f"{prefix}.shared_experts", experts.shared_size
            self.shared = DenseFeed(params, at, states, size, bias=False, activation=act, gated=experts.gated)
        self.shared_gate: torch.Tensor | None = None
        """The weight [hidden] of the shared expert's gate; None: no gate."""
        if experts.shared_gate:
            self.shared_gate = params.tensor((states,), {f"{prefix}.shared_expert_gate.weight": states})

    def __call__(self, x: torch.Tensor, ops: Ops) -> torch.Tensor:
        y = self.routed(x, x, ops) if self._exchange is None else self._exchanged(x, ops, self._exchange)
        if self.shared is None:
            return y
        shared = self.shared(x, ops)
        if self.shared_gate is not None:
            shared = shared * (x @ self.shared_gate).sigmoid()[:, None]
        return y.add_(shared)

    def take_part(self, none: torch.Tensor, ops: Ops) -> None:
        """Computes the tokens of other ranks in a step in which this rank has none; `none` is [0, hidden]."""
        if self._exchange is not None:
            self._exchanged(none, ops, self._exchange)

    def _exchanged(self, x: torch.Tensor, ops: Ops, exchange: Exchange) -> torch.Tensor:
        return exchange.scatter(self.routed(every := exchange.gather(x), every, ops))

    def routed(self, x: torch.Tensor, by: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Returns the sum over each token's experts on this rank, which the states `by` [tokens, hidden] determine."""
        chosen = self._choose(by)
        if self._latent is None:
            return self._weighted(x, *chosen, ops)
        before, behind = self._latent
        return behind(self._weighted(before(x), *chosen, ops))

    def _weighted(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, ops: Ops) -> torch.Tensor:
        if not self._weighs_inputs:
            return self._sum(x, ids, weights, ops)
        # The weights multiply the inputs, so each (token, expert) pair becomes a separate token with one expert.
        scaled = (x[:, None] * weights[:, :, None].to(x.dtype)).flatten(0, 1)
        outputs = self._sum(scaled, ids.view(-1, 1), torch.ones_like(weights).view(-1, 1), ops)
        total: torch.Tensor = outputs.unflatten(0, ids.shape).sum(dim=1)
        return total

    def _sum(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Returns the weighted sum of the experts `ids` of each row of x."""
        if self._kept is None:
            assert self.stacks is not None
            return ops.experts(x, ids, weights, *self.stacks, self.biases, self._activation)
        assert self._products is not None
        return self._products.experts(x, ids, weights, *self._kept)


class OwnExperts:
    """Routes to the experts on this rank, numbered from 0. All other experts get an id that means no expert."""

    def __init__(self, router: Router, own: Part) -> None:
        self._router = router
        self._own = own

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and weights as in `Router`. Experts of other ranks have the id `own.size` and the weight 0."""
        ids, weights = self._router(x)
        own = self._own
        elsewhere = (ids < own.first) | (ids >= own.end)
        return (ids - own.first).masked_fill_(elsewhere, own.size), weights.masked_fill(elsewhere, 0)
