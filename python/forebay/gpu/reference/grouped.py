"""Mixtures of experts in PyTorch's operators: every expert computes every token, and most results are discarded."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from forebay.gpu.reference.layers import gated


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    """See `interface.Experts`."""
    both = torch.einsum("th,eih->tei", x.float(), gate_up.float())
    if biases is not None:
        both = both + biases[0].float()
    inner = gated(both, activation).to(x.dtype).float()
    outputs = torch.einsum("tei,ehi->teh", inner, down.float())
    if biases is not None:
        outputs = outputs + biases[1].float()
    outputs = outputs.to(x.dtype)
    # An id after the last expert means no expert: its output is 0.
    outputs = F.pad(outputs, (0, 0, 0, 1))
    chosen = outputs.gather(1, ids[:, :, None].expand(-1, -1, x.shape[1])).float() * weights[:, :, None]
    total = chosen[:, 0]
    for place in range(1, ids.shape[1]):
        total = total + chosen[:, place]
    return total.to(x.dtype)
