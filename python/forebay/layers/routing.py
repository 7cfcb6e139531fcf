"""The choice of a token's experts and their weights.

Softmax over all experts is from Shazeer et al. 2017 and Qwen3-MoE. DeepSeek-V2 (2024) restricts the choice to the best
groups. Sigmoid scores with a bias for the choice are from DeepSeek-V3 (2024) and GLM-4.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from forebay.layers.params import Parameters
from forebay.weights.parts import Experts, Routing

_EPSILON = 1e-20


class Router:
    """Chooses experts by a linear projection of a token's state."""

    def __init__(self, params: Parameters, prefix: str, hidden: int, experts: Experts) -> None:
        self._per_token = experts.per_token
        self._routing = routing = experts.routing
        # Rounding would change the choice, and the matrix is small compared with the experts.
        dtype = torch.float32 if routing.in_float32 else None
        self.weight = params.tensor((experts.count, hidden), {f"{prefix}.weight": experts.count}, dtype)
        self.logit_bias: torch.Tensor | None = None
        """The bias of the logits; None: no bias."""
        if experts.bias:
            self.logit_bias = params.tensor((experts.count,), {f"{prefix}.bias": experts.count})
        self.bias: torch.Tensor | None = None
        """The bias that is added to scores only for the choice; None: no bias."""
        if routing.corrected:
            name = f"{prefix}.e_score_correction_bias"
            self.bias = params.tensor((experts.count,), {name: experts.count}, torch.float32)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the result of `choose` for x [tokens, hidden], with weights in float32."""
        logits = F.linear(x.to(self.weight.dtype), self.weight, self.logit_bias)
        ids, weights = choose(logits, self.bias, self._per_token, self._routing)
        # The reference implementation rounds weights to the dtype of the logits.
        return ids, weights.to(logits.dtype).float()


def choose(
    logits: torch.Tensor, bias: torch.Tensor | None, per_token: int, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns expert ids int64 [tokens, per_token], ascending, and weights float32, from logits [tokens, experts].

    Of equal scores, those with lower ids win, so the choice depends only on the token's own logits.
    """
    scores = logits.float().sigmoid() if routing.scores == "sigmoid" else logits.softmax(dim=-1, dtype=torch.float32)
    wanted = scores if bias is None else scores + bias
    if routing.groups > 1:
        wanted = wanted.masked_fill(~_in_best_groups(wanted, routing), -torch.inf)
    ids = _best(wanted, per_token).sort(dim=-1).values
    weights = scores.gather(1, ids)
    if routing.normalise:
        # Sigmoid scores may all be 0.
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _EPSILON)
    return ids, weights * routing.scaling


def _in_best_groups(wanted: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Returns bool [tokens, experts], true if the expert belongs to one of the best groups."""
    grouped = wanted.unflatten(1, (routing.groups, -1))
    of_groups = grouped.topk(routing.best_of_group, dim=-1).values.sum(dim=-1)
    kept = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(1, _best(of_groups, routing.kept_groups), True)
    return kept[:, :, None].expand_as(grouped).flatten(1)


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the indices of the largest values of each row, lower indices first if values are equal, unlike `topk`."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
