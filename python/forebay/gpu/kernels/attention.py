"""Paged attention of a mixed step."""

from __future__ import annotations

import torch

from forebay.gpu.interface import PagedRows
from forebay.gpu.kernels.chunks import attend_chunks
from forebay.gpu.kernels.decodes import attend_decodes
from forebay.gpu.kernels.shape import Scoring, Shape


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: PagedRows,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `interface.Attention`.

    Rows of one token and rows of several tokens have separate launches. In each launch, the programs for rows of the
    other kind return early.
    """
    shape = Shape.of(q, keys, values)
    out = q.new_empty(len(q), shape.heads, shape.dim)
    scoring = Scoring.new(scale, window, cap, sinks)
    if rows.decodes:
        attend_decodes(q, keys, values, rows, scoring, shape, out)
    if rows.chunks:
        attend_chunks(q, keys, values, rows, scoring, shape, out)
    return out
