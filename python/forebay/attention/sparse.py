"""Latent attention to chosen rows of a pool, given by row indices, as in FlashMLA's sparse kernels.

The result of a query depends on its own rows alone. The shape of each product is independent of the row indices and of
the batch. Only the projections before and after combine several queries in one product.
"""

from __future__ import annotations

import torch

from forebay.attention import latent
from forebay.attention.backend import NO_ROW, LatentHeads

BLOCK_BYTES = 64 << 20
"""The largest number of bytes of intermediate values for queries computed together. A single query may need more."""
_NUMBER_BYTES = 32
"""Bytes per row for its index, values derived from the index, and its mask."""
_QUERY_COPIES = 4
"""The number of arrays [heads, row width] per query that exist at once: copies of the query, and its output."""
NO_PAGE = -2
"""The row index for a position without a page. A gather with this index raises."""


def resolve(
    positions: torch.Tensor, slots: torch.Tensor, page_table: torch.Tensor, page_size: int, page_stride: int
) -> torch.Tensor:
    """Returns the row indices int64 [queries, top_k] of positions int64 [queries, top_k] of slots int64 [queries].

    `page_table` is int32 [slots, pages]. A position `NO_ROW` gives `NO_ROW`.
    """
    index = slots[:, None] * page_table.shape[1] + positions.clamp(min=0) // page_size
    pages = page_table.view(-1).index_select(0, index.view(-1)).view(index.shape).long()
    rows = (pages * page_stride + positions % page_size).masked_fill_(pages < 0, NO_PAGE)
    return rows.masked_fill_(positions == NO_ROW, NO_ROW)


def attend(
    q: torch.Tensor, pool: torch.Tensor, chosen: torch.Tensor, up: torch.Tensor, heads: LatentHeads
) -> torch.Tensor:
    """Attention of q [n, heads, nope_dim + rotated] to rows `chosen` int64 [n, top_k] of a pool [rows, rank + rotated].

    Each query has at least one row; `NO_ROW` means no row. The result is [n, heads * value_dim].
    """
    row = pool.shape[1] * pool.itemsize
    of_query = chosen.shape[1] * (row + _NUMBER_BYTES) + _QUERY_COPIES * q.shape[1] * row
    size = max(1, BLOCK_BYTES // of_query)
    parts = [slice(first, first + size) for first in range(0, len(q), size)]
    # The gathered rows of a group of queries are freed before the next group's are gathered.
    outputs = [latent.absorbed(q[part], *gathered(pool, chosen[part]), up, heads) for part in parts]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def gathered(pool: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows [n, top_k, width] with indices `chosen`, and an additive mask [n, 1, 1, top_k] for `NO_ROW`."""
    none = chosen == NO_ROW
    # Padding repeats a row of the query itself: another request's row may contain NaN, which would get through the
    # mask.
    entries = torch.where(none, chosen.amax(dim=1, keepdim=True), chosen)
    rows = pool.index_select(0, entries.view(-1)).view(*chosen.shape, -1)
    mask = torch.zeros(chosen.shape, dtype=pool.dtype, device=pool.device).masked_fill_(none, -torch.inf)
    return rows, mask[:, None, None]
