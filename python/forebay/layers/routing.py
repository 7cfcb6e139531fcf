"""The choice of a token's experts, and of their weights.

Softmax over all experts is that of Shazeer et al. 2017 and Qwen3-MoE. DeepSeek-V2 (2024) limits it to the best groups.
Sigmoids with a bias for the choice are those of DeepSeek-V3 (2024) and GLM-4.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from forebay.layers.params import Parameters
from forebay.weights.parts import Experts, Routing

_EPSILON = 1e-20


class Router:
    """Chooses experts by one product of a token's state."""

    def __init__(self, params: Parameters, prefix: str, hidden: int, experts: Experts) -> None:
        self._per_token = experts.per_token
        self._routing = routing = experts.routing
        # Rounding would change the choice, and the matrix is small next to the experts.
        dtype = torch.float32 if routing.in_float32 else None
        self.weight = params.tensor((experts.count, hidden), {f"{prefix}.weight": experts.count}, dtype)
        self.logit_bias: torch.Tensor | None = None
        """Terms of logits; None: there are none."""
        if experts.bias:
            self.logit_bias = params.tensor((experts.count,), {f"{prefix}.bias": experts.count})
        self.bias: torch.Tensor | None = None
        """Terms that are added to scores only for the choice; None: there are none."""
        if routing.corrected:
            name = f"{prefix}.e_score_correction_bias"
            self.bias = params.tensor((experts.count,), {name: experts.count}, torch.float32)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x is [tokens, hidden]; returns the result of `choose`, with weights in float32."""
        logits = F.linear(x.to(self.weight.dtype), self.weight, self.logit_bias)
        ids, weights = choose(logits, self.bias, self._per_token, self._routing)
        # The reference rounds weights to the dtype of the logits.
        return ids, weights.to(logits.dtype).float()


def choose(
    logits: torch.Tensor, bias: torch.Tensor | None, per_token: int, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of experts, int64 [tokens, per_token], ascending, and their weights, float32, from logits [tokens, experts].

    Of equal scores the lower ids win, so the choice depends only on the token's own logits.
    """
    scores = logits.float().sigmoid() if routing.scores == "sigmoid" else logits.softmax(dim=-1, dtype=torch.float32)
    wanted = scores if bias is None else scores + bias
    if routing.groups > 1:
        wanted = wanted.masked_fill(~_in_best_groups(wanted, routing), -torch.inf)
    ids = _best(wanted, per_token).sort(dim=-1).values
    weights = scores.gather(1, ids)
    if routing.normalise:
        # Sigmoids may all be 0.
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _EPSILON)
    return ids, weights * routing.scaling


def _in_best_groups(wanted: torch.Tensor, routing: Routing) -> torch.Tensor:
    """True for scores [tokens, experts] that belong to one of the best groups; bool."""
    grouped = wanted.unflatten(1, (routing.groups, -1))
    of_groups = grouped.topk(routing.best_of_group, dim=-1).values.sum(dim=-1)
    kept = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(1, _best(of_groups, routing.kept_groups), True)
    return kept[:, :, None].expand_as(grouped).flatten(1)


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the largest values of each row, the first of equals first; `topk` would take any of them."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
