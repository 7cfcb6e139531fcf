"""Hot rows: single positions of sparse slots in device memory. Most of their pages are only in the host's memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class HotRows:
    """The hot rows of all slots, for one group of layers with the same choice; `h` rows per slot.

    `row_of` may hold anything. A row holds a position if it is also the row's owner. Lines may be longer.
    """

    row_of: torch.Tensor  # int16 [slots, >= context_length]: the row that a position has or had
    owner: torch.Tensor  # int32 [slots, >= h]: the position that a row holds, -1: none
    stamp: torch.Tensor  # int32 [slots, >= h]: the step of the slot in which the row was used last
    count: int
    """The number of rows of a slot, `h`."""


@dataclass(frozen=True)
class SparsePages:
    """The pages of slots' positions. Each slot has a line, and the null slot may have one."""

    page_table: torch.Tensor  # int32 [slots, pages a slot]; -1: on no page of the device
    host_table: torch.Tensor  # int32 [slots, pages a slot]: pages of the host's tier, -1: none
    hot_rows: torch.Tensor  # int32 [slots, h / page_size]: pages whose rows are the slot's hot rows; -1: not sparse
    clock: torch.Tensor  # int32 [slots]: steps of each slot since it became sparse, this one included
    page_size: int
    page_stride: int
    """Entries of a layer from the first entry of a page to that of the next."""
    null_page: int


@dataclass(frozen=True)
class Found:
    """The places of chosen positions [n, top_k], after missing rows were copied."""

    rows: torch.Tensor  # int32 [n, top_k]: entries of a layer, -1: none
    source: torch.Tensor  # int64 [n, top_k]: of what is missing, `host page * page_size + place`
    target: torch.Tensor  # int64 [n, top_k]: the entry that it goes to
    missing: torch.Tensor  # int32 [n]: how many are missing, the first of the two above
    counts: torch.Tensor  # int32 [n, 3]: found on pages, found in hot rows, missed; of sparse slots only
