"""LoRA in PyTorch's operators. A step multiplies all tokens by the matrices of every place."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from forebay.gpu.low_rank import LowRankStack, PlacedTokens


def add_low_rank(x: torch.Tensor, y: torch.Tensor, stack: LowRankStack, tokens: PlacedTokens) -> None:
    """See `interface.LowRank`."""
    rank, starts = stack.b.shape[2], stack.starts
    # The module of each output, which determines the elements of `A x` that the output uses.
    outputs = torch.arange(stack.b.shape[1], dtype=starts.dtype, device=x.device)
    module = torch.searchsorted(starts, outputs, right=True) - 1
    of_module = module[:, None] * rank + torch.arange(rank, device=x.device)
    for place in range(len(stack.a)):
        small = F.linear(x, stack.a[place])
        wide = torch.zeros(len(stack.b[place]), small.shape[1], dtype=x.dtype, device=x.device)
        wide.scatter_(1, of_module, stack.b[place])
        added = F.linear(small, wide)
        y.add_(added.masked_fill((tokens.places != place)[:, None], 0))
