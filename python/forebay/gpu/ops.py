"""Implements `layers.ops.Ops` with the operators of this package.

Layers import attention, and attention imports this package. So this file does not import layers: protocols describe
those attributes of the arguments that this file reads. A type checker verifies that the classes of layers match.
"""

from __future__ import annotations

from typing import Protocol

import torch

from forebay.gpu.interface import Kernels
from forebay.gpu.sampling import MOST_LIKELY, Wishes

_BITS_OF_U = 53


class Norm(Protocol):
    """`layers.norm.RMSNorm`."""

    weight: torch.Tensor
    _eps: float


class Heads(Protocol):
    """`layers.ops.Heads`."""

    @property
    def queries(self) -> int:
        """The number of query heads."""


class Rotation(Protocol):
    """`layers.rotary.Rotation`."""

    @property
    def cos(self) -> torch.Tensor:
        """Cosines [tokens, 1, turned]."""

    @property
    def signed_sin(self) -> torch.Tensor:
        """Sines, the first half negated, [tokens, 1, turned]."""


class Pages(Protocol):
    """`attention.backend.LayerKV`."""

    @property
    def keys(self) -> torch.Tensor:
        """Keys [entries, kv_heads, head_dim]."""

    @property
    def values(self) -> torch.Tensor:
        """Values [entries, kv_heads, head_dim]."""


class Draw(Protocol):
    """`layers.ops.Draw`."""

    @property
    def temperature(self) -> torch.Tensor:
        """The temperatures, float32 [r], all above 0."""

    @property
    def u(self) -> torch.Tensor:
        """The random numbers, float64 [r]."""

    @property
    def limited(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """The indices of rows with a `top_k`, their `top_k`, and their `top_p`."""

    @property
    def nucleus(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The indices of rows with only a `top_p`, and their `top_p`."""

    @property
    def min_p(self) -> torch.Tensor | None:
        """The `min_p` of each row, float32 [r]."""


class GpuOps:
    """Implements `layers.ops.Ops`."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def norm(self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kernels.add_norm(x, residual, norm.weight, norm._eps)

    def rotate_and_keep(
        self,
        qkv: torch.Tensor,
        heads: Heads,
        norms: tuple[Norm, Norm] | None,
        rotation: Rotation,
        kv: Pages,
        writes: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Overwrites the projection `qkv`; the results are views of it."""
        weights, eps = None, 0.0
        if norms is not None:
            weights, eps = (norms[0].weight, norms[1].weight), norms[0]._eps
        return self._kernels.rotate_and_keep(
            qkv, heads.queries, weights, eps, rotation.cos, rotation.signed_sin, kv.keys, kv.values, writes
        )

    def gate(self, gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
        return self._kernels.gate(gate_up, activation)

    def forbidden(self, masks: torch.Tensor, vocabulary: int) -> torch.Tensor:
        # There are only a few rows of bits, so PyTorch's operators suffice.
        bits = torch.arange(32, dtype=torch.int32, device=masks.device)
        return ((masks[:, :, None] >> bits & 1) == 0).view(len(masks), -1)[:, :vocabulary]

    def experts(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        biases: tuple[torch.Tensor, torch.Tensor] | None = None,
        activation: str = "silu",
    ) -> torch.Tensor:
        return self._kernels.experts(x, ids, weights, gate_up, down, biases, activation)

    def greedy(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kernels.greedy(logits)

    def finite(self, logits: torch.Tensor) -> torch.Tensor:
        return self._kernels.greedy(logits)[1]

    def sample(self, logits: torch.Tensor, draw: Draw) -> torch.Tensor:
        rows = len(logits)
        top_k = torch.zeros(rows, dtype=torch.int32, device=logits.device)
        top_p = torch.ones(rows, dtype=torch.float32, device=logits.device)
        if draw.limited is not None:
            limited, which, shares = draw.limited
            top_k.index_copy_(0, limited, which.int())
            top_p.index_copy_(0, limited, shares)
        if draw.nucleus is not None:
            top_p.index_copy_(0, *draw.nucleus)
        min_p = torch.zeros_like(top_p) if draw.min_p is None else draw.min_p
        bits = (draw.u * 2.0**_BITS_OF_U).long() << 64 - _BITS_OF_U
        tokens, _ = self._kernels.greedy(logits)
        self._kernels.draw(logits, Wishes(draw.temperature, top_k, top_p, min_p, bits), tokens)
        return tokens

    def penalise(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        counts: torch.Tensor,
        lines: torch.Tensor,
        penalties: torch.Tensor,
    ) -> None:
        self._kernels.penalise(logits, rows, counts, lines, penalties)

    def likely(self, logits: torch.Tensor, tokens: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        if most <= MOST_LIKELY:
            return self._kernels.likely(logits, tokens, most)
        ids = torch.cat((tokens, logits.topk(most, dim=-1).indices), dim=1)
        return ids, logits.log_softmax(dim=-1).gather(1, ids)

    def places(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return (logits > logits.gather(1, tokens)).sum(dim=-1) + 1
