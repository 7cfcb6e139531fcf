"""Embedding look-up. With several ranks, each rank has some of the rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from forebay.distributed.group import Group
from forebay.weights.shards import Part


def embed_whole(tokens: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    """Returns the rows [n, hidden] of tokens [n]."""
    return F.embedding(tokens, embedding)


class SharedEmbedding:
    """Looks up this rank's tokens, and sums over ranks to get all rows (Shoeybi et al. 2019)."""

    def __init__(self, own: Part, group: Group) -> None:
        self._own = own
        self._group = group

    def __call__(self, tokens: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Returns the rows [n, hidden] of tokens [n]; `embedding` has this rank's rows."""
        own = self._own
        elsewhere = (tokens < own.first) | (tokens >= own.end)
        # As with a single rank, a token outside the vocabulary raises, instead of returning a row of zeros.
        known = (tokens >= 0) & (tokens < own.whole)
        at = (tokens - own.first).masked_fill_(elsewhere & known, 0)
        rows = F.embedding(at.masked_fill_(~known, -1), embedding).masked_fill_(elsewhere[:, None], 0)
        return self._group.all_reduce(rows)
