"""Finds the memory of the positions that a step's queries have chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from forebay.attention.hot_rows import Chosen, Missing, Places, find, missing
from forebay.attention.sparse import resolve
from forebay.gpu.hot import Found, SparsePages
from forebay.gpu.hot import HotRows as GroupRows
from forebay.gpu.interface import Kernels
from forebay.state.hot_rows import HotRows
from forebay.state.pages import KvPool
from forebay.state.slots import SlotTables
from forebay.weights.parts import Indexer


class OnPages:
    """Looks up positions in the page table alone, for steps without sparse slots."""

    def __init__(self, page_table: torch.Tensor, kv: KvPool, slots: torch.Tensor) -> None:
        """`page_table` int32 [slots, pages per slot], and `slots` int64 [queries]."""
        self._slots = slots
        self._table = page_table
        self._page = kv.page_size, kv.main.page_stride

    def __call__(self, number: int, positions: torch.Tensor) -> Chosen:
        """Returns the pool rows of the positions [queries, top_k] that an indexed layer has chosen."""
        return Chosen(resolve(positions, self._slots, self._table, *self._page))


class Sought(NamedTuple):
    """The pool rows of positions of sparse slots, for `u` queries."""

    rows: torch.Tensor  # int64 [u, top_k]: row numbers in a layer's pool
    missing: Missing
    counts: torch.Tensor  # integers [4]: selected, found on pages, found in hot rows, missed


class Search(Protocol):
    """A lookup on pages and in hot rows, for one step."""

    @property
    def errors(self) -> torch.Tensor:
        """The error word so far, int32 [1]."""

    def __call__(self, number: int, positions: torch.Tensor) -> Sought:
        """Returns the pool rows of chosen positions int64 [u, top_k]. A missed position gets a hot row."""


class OperatorSearch:
    """A `Search` with PyTorch's operators. A position without memory gets a row index at which gathers raise."""

    def __init__(self, tables: SlotTables, hot: HotRows, kv: KvPool, slots: torch.Tensor) -> None:
        """`slots` int64 [u]: the slot of each query; all are sparse."""
        self._hot, self._kv = hot, kv
        now = hot.clock.index_select(0, slots)
        self._places = Places(slots, now, tables.page_table, hot.table, kv.page_size, kv.main.page_stride)
        self.errors = torch.zeros(1, dtype=torch.int32, device=slots.device)

    def __call__(self, number: int, positions: torch.Tensor) -> Sought:
        hot, kv, slots = self._hot, self._kv, self._places.slots
        found = find(positions, self._places, hot.group(number))
        to_copy = missing(positions, found, slots, hot.host_table, kv.page_size, kv.nowhere, hot.host)
        return Sought(found.rows, to_copy, found.counts)


@dataclass(frozen=True)
class GatheredMissing:
    """Implements `Missing`: the device reads the host's memory in place."""

    kernels: Kernels
    found: Found
    host: Sequence[torch.Tensor]
    """For each layer, its rows in all host pages, as in `HotRows.host`."""

    def copy(self, layer: int, pool: torch.Tensor) -> None:
        rows = self.host[layer]
        stride, size = rows.stride(0), rows.shape[1]
        # The view ends with this layer's rows of the last page, which may be before the end of the page.
        elements = stride * (len(rows) - 1) + size * rows.shape[2]
        self.kernels.gather(self.found, rows.as_strided((elements,), (1,)), stride, size, pool)


class KernelSearch:
    """A `Search` with the operators of `forebay.gpu`. A position without memory sets a bit of the error word."""

    def __init__(self, kernels: Kernels, tables: SlotTables, hot: HotRows, kv: KvPool, slots: torch.Tensor) -> None:
        """`slots` int64 [u]: the slot of each query; all are sparse."""
        self._kernels, self._hot = kernels, hot
        self._slots = slots.int()
        self._pages = SparsePages(
            page_table=tables.page_table,
            host_table=hot.host_table,
            hot_rows=hot.table,
            clock=hot.clock,
            page_size=kv.page_size,
            page_stride=kv.main.page_stride,
            null_page=kv.page_count,
        )
        self.errors = torch.zeros(1, dtype=torch.int32, device=slots.device)

    def __call__(self, number: int, positions: torch.Tensor) -> Sought:
        group = GroupRows(*self._hot.group(number), self._hot.count)
        found = self._kernels.resolve(positions.int(), self._slots, self._pages, group, self.errors)
        counts = found.counts.sum(0)
        whole = torch.cat((counts.sum(0, keepdim=True), counts))
        return Sought(found.rows.long(), GatheredMissing(self._kernels, found, self._hot.host), whole)


class InRows:
    """Looks up the positions of one step: on pages, and for sparse slots also in hot rows.

    Other positions are copied there.
    """

    def __init__(
        self,
        tables: SlotTables,
        hot: HotRows,
        kv: KvPool,
        slots: torch.Tensor,
        sparse: torch.Tensor,
        layers: Sequence[int],
        kernels: Kernels | None,
    ) -> None:
        """`slots` int64 [queries]; `sparse` int64 [u]: queries of sparse slots, one per slot.

        `layers`: for each indexed layer, the number of layers that use its choice. `kernels`: the operators that
        search; None: PyTorch's operators do.
        """
        self._pages = OnPages(tables.page_table, kv, slots)
        self._sparse = sparse
        self._layers = layers
        own = slots.index_select(0, sparse)
        hot.clock.index_add_(0, own, torch.ones_like(own, dtype=torch.int32))
        self._search: Search = (
            OperatorSearch(tables, hot, kv, own) if kernels is None else KernelSearch(kernels, tables, hot, kv, own)
        )
        self._counts = torch.zeros(4, dtype=torch.int32, device=slots.device)

    @property
    def told(self) -> torch.Tensor:
        """Counts of rows so far (selected, found on pages, found in hot rows, missed), then the error word; int32 [5].

        The counts are sums over all layers.
        """
        return torch.cat((self._counts, self._search.errors))

    def __call__(self, number: int, positions: torch.Tensor) -> Chosen:
        """Returns the pool rows of the positions [queries, top_k] that an indexed layer has chosen."""
        rows = self._pages(number, positions).rows
        sought = self._search(number, positions.index_select(0, self._sparse))
        self._counts += sought.counts * self._layers[number]
        return Chosen(rows.index_copy(0, self._sparse, sought.rows), sought.missing)


def sharing(indexer: Indexer, layers: int) -> list[int]:
    """Returns, for each indexed layer, the number of layers that attend to its choice, itself included."""
    ends = [*indexer.layers[1:], layers]
    return [end - layer for layer, end in zip(indexer.layers, ends, strict=True)]
