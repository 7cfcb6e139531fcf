"""Latent attention to chosen rows of a pool, by their numbers, as in FlashMLA's sparse kernels.

The result of a query depends on its own rows alone. All products have one shape, independent of the rows' places and of
the batch. Only the projections before and after combine several queries in one product.
"""

from __future__ import annotations

import torch

from forebay.attention import latent
from forebay.attention.backend import NO_ROW, LatentHeads

BLOCK_BYTES = 64 << 20
"""The largest number of bytes of intermediate values for some queries at once. One query alone may need more."""
_NUMBER_BYTES = 32
"""Bytes of a row's number, its derived numbers, and its mask."""
_QUERY_COPIES = 4
"""The number of copies of a query, each as wide as a row, that exist at once, with its output."""
NO_PAGE = -2
"""The number that stands for a row without a page. A gather with it raises."""


def resolve(
    positions: torch.Tensor, slots: torch.Tensor, page_table: torch.Tensor, page_size: int, page_stride: int
) -> torch.Tensor:
    """The rows of positions int64 [queries, top_k] of slots int64 [queries], by the page table int32 [slots, pages].

    The result is row numbers int64 [queries, top_k]. `NO_ROW` stays `NO_ROW`.
    """
    index = slots[:, None] * page_table.shape[1] + positions.clamp(min=0) // page_size
    pages = page_table.view(-1).index_select(0, index.view(-1)).view(index.shape).long()
    rows = (pages * page_stride + positions % page_size).masked_fill_(pages < 0, NO_PAGE)
    return rows.masked_fill_(positions == NO_ROW, NO_ROW)


def attend(
    q: torch.Tensor, pool: torch.Tensor, chosen: torch.Tensor, up: torch.Tensor, heads: LatentHeads
) -> torch.Tensor:
    """q [n, heads, nope_dim + rotated] on rows `chosen` int64 [n, top_k] of a pool [entries, rank + rotated].

    Each query has at least one row, and `NO_ROW` is none. The result is [n, heads * value_dim].
    """
    row = pool.shape[1] * pool.itemsize
    of_query = chosen.shape[1] * (row + _NUMBER_BYTES) + _QUERY_COPIES * q.shape[1] * row
    size = max(1, BLOCK_BYTES // of_query)
    parts = [slice(first, first + size) for first in range(0, len(q), size)]
    # The rows of each part are freed before the next are gathered.
    outputs = [latent.absorbed(q[part], *gathered(pool, chosen[part]), up, heads) for part in parts]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def gathered(pool: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows [n, top_k, width] by the numbers `chosen`, and an additive mask [n, 1, 1, top_k] that hides `NO_ROW`."""
    none = chosen == NO_ROW
    # Padding repeats a row of the query itself: another request's row may contain NaN, which would get through the
    # mask.
    entries = torch.where(none, chosen.amax(dim=1, keepdim=True), chosen)
    rows = pool.index_select(0, entries.view(-1)).view(*chosen.shape, -1)
    mask = torch.zeros(chosen.shape, dtype=pool.dtype, device=pool.device).masked_fill_(none, -torch.inf)
    return rows, mask[:, None, None]
