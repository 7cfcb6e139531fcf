"""`Ops` of a rank that has the logits of a part of the vocabulary. A few values from each rank determine a sample.

The vocabulary is never gathered. All ranks gather the same bytes and compute the same results, so they sample the same
tokens. A single rank with all logits samples the same tokens too (`TorchOps`), except for the last bits of float64
sums. Per row, a rank sends 12 bytes for the most likely token, or 20 for a drawn token. `top_k` adds that many logits,
and `top_p` four times 2 KiB. No shape depends on values, and nothing waits for the device.
"""

from __future__ import annotations

import torch

from forebay.attention.backend import LayerKV
from forebay.distributed.group import Group
from forebay.layers.norm import RMSNorm
from forebay.layers.ops import Biases, Draw, Heads, Ops, keep_only, least_kept, reached_in
from forebay.layers.rotary import Rotation
from forebay.weights.shards import Part, Shard

_DIGIT_BITS = 8
_DIGITS = 1 << _DIGIT_BITS
_SHIFTS = (24, 16, 8, 0)


class ShardOps:
    """Implements `Ops` for logits [rows, own tokens]. Operators that need no other rank are passed to `inner`."""

    def __init__(self, inner: Ops, group: Group, vocabulary: int) -> None:
        """`inner`: the operators for work without communication."""
        self._inner = inner
        self._group = group
        self._own: Part = Shard(group.rank, group.world).of(vocabulary)
        self._widest = Shard(0, group.world).of(vocabulary).size

    def norm(self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inner.norm(norm, x, residual)

    def rotate_and_keep(
        self,
        qkv: torch.Tensor,
        heads: Heads,
        norms: tuple[RMSNorm, RMSNorm] | None,
        rotation: Rotation,
        kv: LayerKV,
        writes: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._inner.rotate_and_keep(qkv, heads, norms, rotation, kv, writes)

    def gate(self, gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
        return self._inner.gate(gate_up, activation)

    def forbidden(self, masks: torch.Tensor, vocabulary: int) -> torch.Tensor:
        return self._inner.forbidden(masks, vocabulary)

    def experts(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        biases: Biases | None = None,
        activation: str = "silu",
    ) -> torch.Tensor:
        return self._inner.experts(x, ids, weights, gate_up, down, biases, activation)

    def greedy(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        at, finite = self._inner.greedy(logits)
        largest = logits.gather(1, at[:, None]).float().view(torch.int32)
        columns = torch.cat((largest, (at + self._own.first).int()[:, None], finite.int()[:, None]), dim=1)
        of_ranks = self._group.all_gather(columns)
        # The first of equal logits wins: ranks are in the order of token ids.
        best = of_ranks[..., 0].contiguous().view(torch.float32).argmax(dim=0)
        return of_ranks[..., 1].gather(0, best[None])[0].long(), of_ranks[..., 2].all(dim=0)

    def finite(self, logits: torch.Tensor) -> torch.Tensor:
        return self._group.all_gather(self._inner.finite(logits).int()).all(dim=0)

    def sample(self, logits: torch.Tensor, draw: Draw) -> torch.Tensor:
        scaled = (logits - self._largest(logits)) / draw.temperature[:, None]
        weights = scaled.exp()
        if draw.limited is not None:
            rows, top_k, top_p = draw.limited
            keep_only(weights, rows, self._most_likely(scaled.index_select(0, rows), top_k, top_p, draw.width))
        if draw.nucleus is not None:
            rows, top_p = draw.nucleus
            keep_only(weights, rows, self._nucleus(scaled.index_select(0, rows), top_p))
        if draw.min_p is not None:
            # `min_p` is relative to the largest weight of all ranks, which is 1.
            weights.masked_fill_(weights < draw.min_p[:, None], 0)
        return self._drawn(weights, draw.u)

    def penalise(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        counts: torch.Tensor,
        lines: torch.Tensor,
        penalties: torch.Tensor,
    ) -> None:
        self._inner.penalise(logits, rows, counts, lines, penalties)

    def likely(self, logits: torch.Tensor, tokens: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        width = min(most, self._widest)
        values, at = logits.topk(min(width, logits.shape[1]), dim=-1)
        ids = (at + self._own.first).int()
        if width > values.shape[1]:
            values, ids = _padded(values, -torch.inf), _padded(ids, 0)
        columns = (logits.amax(dim=-1, keepdim=True), self._own_logits(logits, tokens), values)
        of_ranks = self._group.all_gather(torch.cat((*(of.view(torch.int32) for of in columns), ids), dim=1))
        numbers = of_ranks[..., : 2 + width].contiguous().view(torch.float32)
        largest = numbers[..., 0].amax(dim=0)[:, None]
        total = self._added((logits - largest).exp().double().sum(dim=-1, keepdim=True))
        # [m, world * width]: of equal values, those with lower ids come first.
        values, ids = (of.transpose(0, 1).flatten(1) for of in (numbers[..., 2:], of_ranks[..., 2 + width :]))
        order = values.sort(dim=-1, descending=True, stable=True).indices[:, :most]
        wanted = torch.cat((numbers[..., 1].amax(dim=0)[:, None], values.gather(1, order)), dim=1)
        return torch.cat((tokens, ids.gather(1, order).long()), dim=1), wanted - largest - total.log().float()

    def places(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        theirs = self._group.all_gather(self._own_logits(logits, tokens)).amax(dim=0)
        return self._added((logits > theirs).sum(dim=-1)) + 1

    def _own_logits(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Returns logits [m, 1] of tokens [m, 1]; -inf for tokens of other ranks."""
        here = (tokens >= self._own.first) & (tokens < self._own.end)
        at = (tokens - self._own.first).masked_fill_(~here, 0)
        return logits.gather(1, at).masked_fill_(~here, -torch.inf)

    def _largest(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the largest logit of all ranks, [r, 1]."""
        return self._group.all_gather(logits.amax(dim=-1, keepdim=True)).amax(dim=0)

    def _added(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum over ranks, bit-equal on all ranks."""
        return _ends(self._group.all_gather(x))[-1]

    def _drawn(self, weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """Returns the first tokens [r] at which the cumulative weight over all ranks exceeds `u` of the total."""
        cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
        ends = _ends(self._group.all_gather(cumulative[:, -1]))
        total, rank = ends[-1], self._group.rank
        below = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
        if rank:
            cumulative += ends[rank - 1][:, None]
        found = torch.searchsorted(cumulative, below[:, None], right=True)[:, 0]
        # If the token belongs to another rank, or the row is not finite, this rank has no match.
        found = found.clamp_(max=weights.shape[1] - 1) + self._own.first
        owner = (torch.stack(ends) > below).int().argmax(dim=0)
        return self._group.all_gather(found).gather(0, owner[None])[0]

    def _most_likely(self, scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, width: int) -> torch.Tensor:
        """`ops.most_likely` for this rank's tokens. The largest logits of all are among the largest of each rank."""
        own = min(width, self._widest)
        values = scaled.topk(min(own, scaled.shape[1]), dim=-1).values
        if own > values.shape[1]:
            values = _padded(values, -torch.inf)
        of_all = self._group.all_gather(values).transpose(0, 1).flatten(1)
        kept, threshold = least_kept(of_all.topk(width, dim=-1).values, top_k, top_p)
        return self._down_to(scaled > threshold, scaled == threshold, kept)

    def _nucleus(self, scaled: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
        """`ops.nucleus` for this rank's tokens. Sums are looked up digit by digit, in tables small enough to gather."""
        keys = scaled.abs().view(torch.int32)
        mass = scaled.exp().double()
        goal = top_p.double()[:, None] * self._added(mass.sum(dim=-1, keepdim=True))
        threshold = torch.zeros_like(keys[:, :1])
        inside, done = mass, torch.zeros_like(goal)
        for shift in _SHIFTS:
            digits = (keys >> shift & _DIGITS - 1).long()
            table = torch.zeros(len(keys), _DIGITS, dtype=mass.dtype, device=mass.device)
            digit, before = reached_in(self._added(table.scatter_add_(1, digits, inside)), goal - done)
            threshold, done = threshold << _DIGIT_BITS | digit.int(), done + before
            inside = mass.masked_fill(keys >> shift != threshold, 0)
        # The remaining mass, in units of a token that is exactly as likely as the threshold.
        left = (goal - done) / (threshold.view(torch.float32).neg().exp().double())
        left = left.nan_to_num_(1.0).ceil_().clamp_(1, self._own.whole)
        smaller = keys < threshold
        return self._down_to(smaller, keys == threshold, left + self._added(smaller.sum(dim=-1, keepdim=True)))

    def _down_to(self, more: torch.Tensor, equal: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Returns this rank's tokens among the `kept` [r, 1] most likely tokens of all ranks.

        `more` marks the tokens above a threshold, and `equal` those equal to it, of which only the first are returned.
        """
        counts = torch.cat([of.sum(dim=-1, keepdim=True) for of in (more, equal)], dim=1)
        ends = _ends(self._group.all_gather(counts))
        left = kept - ends[-1][:, :1]
        if self._group.rank:
            left = left - ends[self._group.rank - 1][:, 1:]
        return more | (equal & (equal.cumsum(dim=-1) <= left))


def _ends(of_ranks: torch.Tensor) -> list[torch.Tensor]:
    """Returns the cumulative sums over ranks of [world, ...]. Adds in rank order: a library may use another order."""
    ends = [of_ranks[0]]
    for more in of_ranks[1:]:
        ends.append(ends[-1] + more)
    return ends


def _padded(values: torch.Tensor, value: float) -> torch.Tensor:
    """Adds a column of `value`, because other ranks may have one token more."""
    return torch.nn.functional.pad(values, (0, 1), value=value)
