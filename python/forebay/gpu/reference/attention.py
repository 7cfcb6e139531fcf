"""Paged attention in PyTorch's operators: every query reads its row's whole page table, with a mask."""

from __future__ import annotations

import torch

from forebay.gpu.interface import PagedRows
from forebay.gpu.reference.eight_bits import numbers


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
    """See `interface.Attention`."""
    n, heads, _ = q.shape
    token = torch.arange(n, device=q.device)
    row = (torch.searchsorted(rows.first, token.int(), right=True) - 1).clamp_(max=len(rows.slots) - 1)
    somebody = token < rows.first[-1]
    behind = rows.first.index_select(0, row + 1)
    last = (rows.ends.index_select(0, row) - behind + token).masked_fill(~somebody, 0)
    tables = rows.page_table.index_select(0, rows.slots.index_select(0, row).long()).long()
    tables = tables.masked_fill(tables < 0, rows.null_page)
    within = torch.arange(rows.page_size, device=q.device)
    entries = (tables[:, :, None] * rows.page_stride + within).flatten(1)
    position = torch.arange(entries.shape[1], device=q.device)
    seen = (position <= last[:, None]) & somebody[:, None]
    if window > 0:
        seen = seen & ((position > last[:, None] - window) | ~somebody[:, None])
    # Positions that a query does not attend to may be NaN, which a weight of 0 does not remove.
    entries = torch.where(seen, entries, entries.gather(1, last[:, None].long()))
    k, v = (
        numbers(pool.index_select(0, entries.view(-1))).unflatten(0, tuple(entries.shape)) for pool in (keys, values)
    )
    grouped = q.float().unflatten(1, (keys.shape[1], -1))
    scores = torch.einsum("nkgd,nskd->nkgs", grouped, k) * scale
    if cap > 0:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    if sinks is not None:
        of_heads = sinks.float().view(1, keys.shape[1], -1, 1).expand(n, -1, -1, -1)
        scores = torch.cat((scores, of_heads), dim=-1)
    weights = scores.softmax(dim=-1)[..., : entries.shape[1]]
    out = torch.einsum("nkgs,nskd->nkgd", weights, v).reshape(n, heads, values.shape[2])
    return out.masked_fill(~somebody[:, None, None], 0).to(q.dtype)
