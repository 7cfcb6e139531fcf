"""The operators of layers besides matrix products and attention. Fused operators are possible only here.

A model's file contains the formula, and an `Ops` computes it. `TorchOps` is the reference: it runs on every device,
and all other implementations are compared with it. No operator here waits for the device: no shape depends on values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from forebay.attention.backend import LayerKV
from forebay.layers.norm import RMSNorm
from forebay.layers.rotary import Rotation, rotate

_SLOPE, _BOUND = 1.702, 7.0
"""The slope in `clamped_swiglu`'s gate, and the bound to which gate and up are clamped."""


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Returns `gate * sigmoid(1.702 gate) * (up + 1)`, with gate clamped to at most 7, and up to -7 .. 7 (gpt-oss)."""
    gate, up = gate.clamp(max=_BOUND), up.clamp(-_BOUND, _BOUND)
    return (gate * _SLOPE).sigmoid_().mul_(gate).mul_(up.add_(1))


def _times(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda gate, up: activation(gate).mul_(up)


GATES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "silu": _times(F.silu),
    "gelu": _times(F.gelu),
    "gelu_pytorch_tanh": _times(partial(F.gelu, approximate="tanh")),
    "swigluoai": clamped_swiglu,
}
"""The activations of gated projections, by their names in Transformers, or in vLLM (`swigluoai`)."""


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Returns the square of the positive part (So et al. 2021)."""
    return F.relu(x).square_()


PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"relu2": squared_relu}
"""Activations without a gate, by their names in Transformers."""


Biases = tuple[torch.Tensor, torch.Tensor]
"""The biases of all experts' gate and up projections, and of their down projections."""


@dataclass(frozen=True)
class Heads:
    """The query heads, the key-value heads, and the head dimension."""

    queries: int
    keys: int
    dim: int


@dataclass(frozen=True)
class Draw:
    """The parameters of draws for the `r` rows with a temperature. Values that the host reads are not tensors."""

    temperature: torch.Tensor  # float32 [r]
    u: torch.Tensor  # float64 [r]: the uniform random numbers
    limited: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    """Rows int64 [l] with a `top_k`, their `top_k` int64 [l], and their `top_p` float32 [l]; None: no such rows."""
    width: int
    """The largest `top_k` of the `limited` rows."""
    nucleus: tuple[torch.Tensor, torch.Tensor] | None
    """Rows int64 [n] with only a `top_p`, and their `top_p` float32 [n]; None: no such rows."""
    min_p: torch.Tensor | None  # float32 [r]; None: no row has one


class Ops(Protocol):
    """Operators for which some devices have kernels."""

    def norm(self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `norm(x + residual)` and the sum, [tokens, hidden]. May overwrite x and the residual."""

    def rotate_and_keep(
        self,
        qkv: torch.Tensor,
        heads: Heads,
        norms: tuple[RMSNorm, RMSNorm] | None,
        rotation: Rotation,
        kv: LayerKV,
        writes: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Splits qkv [tokens, all heads * dim], normalises query and key heads by `norms`, and applies RoPE to them.

        Keys and values are written to the entries `writes` (int64 [tokens]) of the pages. Returns q, k and v, each
        [tokens, heads, dim].
        """

    def gate(self, gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
        """Returns `activation(gate) * up` for `gate_up` [tokens, gates and then ups]. `activation` is one of `GATES`.

        An activation of `PLAIN` applies to all columns.
        """

    def forbidden(self, masks: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """Returns the tokens that masks do not allow, bool [m, vocabulary].

        `masks` int32 [m, words]: bit `i % 32` of word `i // 32` is set if token `i` is allowed.
        """

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
        """Returns the weighted sum [tokens, hidden] of each token's experts, added in order of their ids, in float32.

        `ids` int64 and `weights` float32 are [tokens, experts per token], with ascending ids. The projections are
        `gate_up` [experts, gates and then ups, hidden] and `down` [experts, hidden, inner], with `gate` between them.
        `biases` are those of both projections, [experts, gates and then ups] and [experts, hidden]. An id after the
        last expert means no expert, and its term is 0.
        """

    def greedy(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the first of the largest logits, int64 [s], and the result of `finite` for the same logits."""

    def finite(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns bool [s], true if all logits of a row of [s, vocabulary] are finite."""

    def sample(self, logits: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Samples tokens int64 [r] from float32 logits [r, vocabulary], in the order of `docs/protocol.md`."""

    def penalise(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        counts: torch.Tensor,
        lines: torch.Tensor,
        penalties: torch.Tensor,
    ) -> None:
        """Overwrites `rows` int64 [p] of float32 logits [r, vocabulary] with the result of `penalised`.

        `counts` int32 [lines, 2, vocabulary] count how often tokens occurred, and how often they were generated.
        `lines` int64 [p] are the lines of the rows. `penalties` are float32 [p, 3].
        """

    def likely(self, logits: torch.Tensor, tokens: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ids int64 [m, 1 + most] of `tokens` int64 [m, 1] and the most likely ones, and log-probabilities."""

    def places(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Returns ranks int64 [m] of `tokens` int64 [m, 1]: 1 plus the number of tokens with a larger logit."""


class TorchOps:
    """Implements `Ops` with PyTorch's operators."""

    def norm(self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        summed = x if residual is None else residual.add_(x)
        return norm(summed), summed

    def rotate_and_keep(
        self,
        qkv: torch.Tensor,
        heads: Heads,
        norms: tuple[RMSNorm, RMSNorm] | None,
        rotation: Rotation,
        kv: LayerKV,
        writes: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        queries, keys = heads.queries, heads.keys
        qkv = qkv.view(qkv.shape[0], queries + 2 * keys, heads.dim)
        v = qkv[:, queries + keys :]
        if norms is None:
            rotated = rotate(qkv[:, : queries + keys], rotation)
            q, k = rotated[:, :queries], rotated[:, queries:]
        else:
            q_norm, k_norm = norms
            q = rotate(q_norm(qkv[:, :queries]), rotation)
            k = rotate(k_norm(qkv[:, queries : queries + keys]), rotation)
        kv.keys.index_copy_(0, writes, k)
        kv.values.index_copy_(0, writes, v)
        return q, k, v

    def gate(self, gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
        if activation in PLAIN:
            return PLAIN[activation](gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return GATES[activation](gate, up)

    def forbidden(self, masks: torch.Tensor, vocabulary: int) -> torch.Tensor:
        bits = torch.arange(32, dtype=torch.int32, device=masks.device)
        return ((masks[:, :, None] >> bits & 1) == 0).view(len(masks), -1)[:, :vocabulary]

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
        per_token = ids.shape[1]
        # Sorts the tokens by expert. The number of tokens of each expert exists only as a tensor.
        sorted_ids, order = ids.view(-1).sort(stable=True)
        rows = x.index_select(0, order // per_token)
        products = self._products(rows, sorted_ids, gate_up, down, biases, activation)
        outputs = torch.empty_like(products).index_copy_(0, order, products).view(len(x), per_token, -1)
        # Adds terms one by one, so that neither the batch nor a library affects their order.
        total = outputs[:, 0].float() * weights[:, :1]
        for place in range(1, per_token):
            total += outputs[:, place].float() * weights[:, place, None]
        return total.to(x.dtype)

    def _products(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        biases: Biases | None,
        activation: str,
    ) -> torch.Tensor:
        """Computes the expert of each row [r, hidden]; `ids` [r] ascend. The result is 0 for rows without an expert.

        Requires PyTorch 2.10 or newer.
        """
        ends = torch.searchsorted(ids, torch.arange(len(down), device=ids.device), right=True).int()
        both = F.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends)
        known = ids.clamp(max=len(down) - 1)
        if biases is not None:
            both = both + biases[0].index_select(0, known)
        products = F.grouped_mm(self.gate(both, activation), down.transpose(1, 2), offs=ends)
        if biases is not None:
            products = products + biases[1].index_select(0, known)
        # The results of rows without an expert are uninitialised memory.
        return products.masked_fill_((ids >= len(down))[:, None], 0)

    def greedy(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return logits.argmax(dim=-1), self.finite(logits)

    def finite(self, logits: torch.Tensor) -> torch.Tensor:
        # A sum is finite exactly if all terms are, unless logits are near the largest float. So one fast pass suffices.
        return logits.sum(dim=-1).isfinite()

    def sample(self, logits: torch.Tensor, draw: Draw) -> torch.Tensor:
        # Subtracts the largest logit, so that a tiny temperature can't overflow.
        scaled = (logits - logits.amax(dim=-1, keepdim=True)) / draw.temperature[:, None]
        weights = scaled.exp()
        if draw.limited is not None:
            rows, top_k, top_p = draw.limited
            keep_only(weights, rows, most_likely(scaled.index_select(0, rows), top_k, top_p, draw.width))
        if draw.nucleus is not None:
            rows, top_p = draw.nucleus
            keep_only(weights, rows, nucleus(scaled.index_select(0, rows), top_p))
        if draw.min_p is not None:
            # `min_p` is relative to the largest weight, which is 1.
            weights.masked_fill_(weights < draw.min_p[:, None], 0)
        cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
        total = cumulative[:, -1:]
        below = torch.minimum(draw.u[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
        found = torch.searchsorted(cumulative, below, right=True)
        # Only a row with logits that are not finite has no match. The token of such a row is not used.
        return found[:, 0].clamp_(max=logits.shape[1] - 1)

    def penalise(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        counts: torch.Tensor,
        lines: torch.Tensor,
        penalties: torch.Tensor,
    ) -> None:
        seen, generated = counts.index_select(0, lines).unbind(1)
        logits.index_copy_(0, rows, penalised(logits.index_select(0, rows), seen, generated, penalties))

    def likely(self, logits: torch.Tensor, tokens: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.cat((tokens, logits.topk(most, dim=-1).indices), dim=1)
        return ids, logits.log_softmax(dim=-1).gather(1, ids)

    def places(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return (logits > logits.gather(1, tokens)).sum(dim=-1) + 1


def penalised(
    logits: torch.Tensor, seen: torch.Tensor, generated: torch.Tensor, penalties: torch.Tensor
) -> torch.Tensor:
    """Returns logits [p, vocabulary] with penalties applied; `penalties` [p, 3]: repetition, presence, frequency.

    [p, vocabulary]: `seen` counts how often each token occurred, `generated` how often it was generated.
    """
    repetition, presence, frequency = penalties.unsqueeze(2).unbind(1)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen > 0, repeated, logits)
    return logits - frequency * generated - presence * (generated > 0)


class HostOps(TorchOps):
    """`TorchOps` for a device whose work is done when a call returns. So the host may decide by values of tensors."""

    def forbidden(self, masks: torch.Tensor, vocabulary: int) -> torch.Tensor:
        # Takes a twentieth of the time of shifting each word 32 times.
        bits = np.unpackbits(masks.numpy().view(np.uint8), axis=1, count=vocabulary, bitorder="little")
        return torch.from_numpy(bits) == 0

    def _products(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        biases: Biases | None,
        activation: str,
    ) -> torch.Tensor:
        products = torch.empty_like(rows)
        at = 0
        for expert, count in enumerate(torch.bincount(ids, minlength=len(down))[: len(down)].tolist()):
            if count:
                part = slice(at, at + count)
                of_gates, of_outputs = (None, None) if biases is None else (bias[expert] for bias in biases)
                inner = self.gate(F.linear(rows[part], gate_up[expert], of_gates), activation)
                torch.mm(inner, down[expert].T, out=products[part])
                if of_outputs is not None:
                    products[part] += of_outputs
                at += count
        products[at:].zero_()
        return products


def keep_only(weights: torch.Tensor, rows: torch.Tensor, keep: torch.Tensor) -> None:
    """Sets the weights of `rows` to zero, except those in `keep`."""
    if len(rows) == len(weights):
        weights.masked_fill_(~keep, 0)
    else:
        weights.index_copy_(0, rows, weights.index_select(0, rows).masked_fill_(~keep, 0))


def most_likely(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, width: int) -> torch.Tensor:
    """Returns the tokens that `top_k` keeps, and then `top_p` (1: off) keeps of these; bool [r, vocabulary].

    `scaled` [r, vocabulary] are logits whose largest is 0. `width` is the largest `top_k`, at most the vocabulary. Of
    equal logits, those with lower ids are kept.
    """
    kept, threshold = least_kept(scaled.topk(width, dim=-1).values, top_k, top_p)
    larger = scaled > threshold
    return larger | _first_of_equals(scaled == threshold, kept - larger.sum(dim=-1, keepdim=True))


def least_kept(values: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns how many tokens `most_likely` keeps, and the smallest kept logit, [r, 1] each; `values` descend."""
    ranked = torch.arange(values.shape[1], device=values.device) < top_k[:, None]
    weights = values.exp().double() * ranked
    cumulative = weights.cumsum(dim=-1)
    share = top_p.double().masked_fill(top_p >= 1, torch.inf)[:, None]
    goal = share * cumulative[:, -1:]
    kept = (ranked & (cumulative - weights < goal)).sum(dim=-1, keepdim=True).clamp_(min=1)
    return kept, values.gather(1, kept - 1)


_LOW_BITS = 16
_KEYS = 1 << _LOW_BITS


def nucleus(scaled: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Returns the smallest sets of most likely tokens whose probability reaches `top_p` [r] < 1; bool [r, vocabulary].

    `scaled` is as in `most_likely`. The number of kept tokens is not known in advance, so a sort would have to include
    all tokens. Instead, the bits of the distance from the largest logit are used as keys, since they are ordered like
    the distance. Two tables, by the upper and by the lower half of the bits, give the key at which the sum reaches the
    goal.
    """
    # `abs` turns -0 into 0: the bits of -0 would break the order.
    keys = scaled.abs().view(torch.int32)
    mass = scaled.exp().double()
    goal = top_p.double()[:, None] * mass.sum(dim=-1, keepdim=True)
    upper = (keys >> _LOW_BITS).long()
    high, before = _reached(upper, mass, goal)
    lower = (keys & (_KEYS - 1)).long()
    inside = mass.masked_fill(upper != high, 0)
    low, more = _reached(lower, inside, goal - before)
    threshold = (high << _LOW_BITS | low).int()
    # The remaining mass, in units of a token that is exactly as likely as the threshold.
    left = (goal - before - more) / (threshold.view(torch.float32).neg().exp().double())
    return (keys < threshold) | _first_of_equals(
        keys == threshold, left.nan_to_num_(1.0).ceil_().clamp_(1, mass.shape[1])
    )


def _reached(keys: torch.Tensor, mass: torch.Tensor, goal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first key [r, 1] at which the cumulative mass reaches the goal, and the mass before that key."""
    return reached_in(
        torch.zeros(len(keys), _KEYS, dtype=mass.dtype, device=mass.device).scatter_add_(1, keys, mass), goal
    )


def reached_in(table: torch.Tensor, goal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the result of `_reached` from the mass of each key [r, keys]."""
    cumulative = table.cumsum(dim=-1)
    # Rounding may leave the goal above all sums: then take the last key that has any mass.
    found = torch.searchsorted(cumulative, torch.minimum(goal, cumulative[:, -1:]).contiguous())
    found = found.clamp_(max=table.shape[1] - 1)
    return found, cumulative.gather(1, found) - table.gather(1, found)


def _first_of_equals(equal: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Returns the first `count` [r, 1] of the tokens for which `equal` [r, vocabulary] is true."""
    return equal & (equal.cumsum(dim=-1) <= count)
