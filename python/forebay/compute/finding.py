"""The search for the positions that a step's queries choose."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forebay.attention.hot_rows import Chosen, Places, find, missing
from forebay.attention.sparse import resolve
from forebay.state.hot_rows import HotRows
from forebay.state.pages import KvPool
from forebay.state.slots import SlotTables
from forebay.weights.parts import Indexer


class OnPages:
    """Positions that are found by the page table, since no slot is sparse."""

    def __init__(self, tables: SlotTables, kv: KvPool, slots: torch.Tensor) -> None:
        """`slots` int64 [queries]."""
        self._slots = slots
        self._table = tables.page_table
        self._page = kv.page_size, kv.main.page_stride

    def __call__(self, number: int, positions: torch.Tensor) -> Chosen:
        """The places of positions [queries, top_k] that an indexed layer has chosen."""
        return Chosen(resolve(positions, self._slots, self._table, *self._page))


class InRows:
    """Positions of sparse slots, which are also found in hot rows, or copied there. It serves one step."""

    def __init__(
        self,
        tables: SlotTables,
        hot: HotRows,
        kv: KvPool,
        slots: torch.Tensor,
        sparse: torch.Tensor,
        layers: Sequence[int],
    ) -> None:
        """`slots` int64 [queries]; `sparse` int64 [u]: which queries are of sparse slots, of each slot one.

        `layers`: so many share the choice of each indexed layer.
        """
        self._pages = OnPages(tables, kv, slots)
        self._hot, self._kv = hot, kv
        self._sparse = sparse
        self._layers = layers
        own = slots.index_select(0, sparse)
        hot.clock.index_add_(0, own, torch.ones_like(own, dtype=torch.int32))
        now = hot.clock.index_select(0, own)
        self._places = Places(own, now, tables.page_table, hot.table, kv.page_size, kv.main.page_stride)
        self.counts = torch.zeros(4, dtype=torch.int64, device=slots.device)
        """Rows that were selected, found on pages, found in hot rows, and missed, over all layers so far."""

    def __call__(self, number: int, positions: torch.Tensor) -> Chosen:
        """The places of positions [queries, top_k] that an indexed layer has chosen."""
        rows = self._pages(number, positions).rows
        own = positions.index_select(0, self._sparse)
        found = find(own, self._places, self._hot.group(number))
        self.counts += found.counts * self._layers[number]
        to_copy = missing(
            own,
            found,
            self._places.slots,
            self._hot.host_table,
            self._kv.page_size,
            self._kv.nowhere,
            self._hot.host,
        )
        return Chosen(rows.index_copy(0, self._sparse, found.rows), to_copy)


def sharing(indexer: Indexer, layers: int) -> list[int]:
    """The number of layers that attend to the choice of each indexed layer, itself included."""
    ends = [*indexer.layers[1:], layers]
    return [end - layer for layer, end in zip(indexer.layers, ends, strict=True)]
