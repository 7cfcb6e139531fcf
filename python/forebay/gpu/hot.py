"""Hot rows: single positions of sparse slots in device memory. Most of these slots' pages are only in host memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class HotRows:
    """The hot rows of all slots, for one group of layers with the same choice; `h` rows per slot.

    Entries of `row_of` may be stale: a row contains a position only if the position is also the row's owner. Tables may
    have more columns than needed.
    """

    row_of: torch.Tensor  # int16 [slots, >= context_length]: the row that contains or contained a position
    owner: torch.Tensor  # int32 [slots, >= h]: the position that a row contains; -1: none
    stamp: torch.Tensor  # int32 [slots, >= h]: the slot's step in which the row was used last
    count: int
    """The number of rows of a slot, `h`."""


@dataclass(frozen=True)
class SparsePages:
    """The pages of slots' positions. Each table has a line per slot, and may have one for the null slot."""

    page_table: torch.Tensor  # int32 [slots, pages per slot]; -1: no hot page
    host_table: torch.Tensor  # int32 [slots, pages per slot]: host pages; -1: none
    hot_rows: torch.Tensor  # int32 [slots, h / page_size]: the pages of the slot's hot rows; -1: not sparse
    clock: torch.Tensor  # int32 [slots]: steps of each slot since it became sparse, the current one included
    page_size: int
    page_stride: int
    """The number of a layer's entries from the first entry of a page to that of the next page."""
    null_page: int


@dataclass(frozen=True)
class Found:
    """The entries of chosen positions [n, top_k]. Missing positions still have to be copied to their entries."""

    rows: torch.Tensor  # int32 [n, top_k]: entries of a layer, -1: none
    source: torch.Tensor  # int64 [n, top_k]: for missing positions, `host page * page_size + offset`
    target: torch.Tensor  # int64 [n, top_k]: for missing positions, the entry to copy to
    missing: torch.Tensor  # int32 [n]: the number of missing positions, which come first in `source` and `target`
    counts: torch.Tensor  # int32 [n, 3]: found on pages, found in hot rows, missed; only for sparse slots
