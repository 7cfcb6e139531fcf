"""Device memory for single positions, in place of pages (HiSparse, SGLang #21932, combined with pages).

A sparse slot has `H` hot rows for the positions whose pages were freed. A chosen position without a row is *missed*. It
is copied from host memory and replaces the row that was chosen least recently. No shape depends on a value of a tensor.

`row_of[p]` is the last hot row of position p, and undefined before the first one. `owner[r]` is the position in row r.
Position p is in its row if both agree. So `row_of` is never cleared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from forebay.attention.backend import NO_ROW
from forebay.attention.sparse import NO_PAGE, resolve

NEVER = -1
"""The owner of a row that contains no position."""
OLDEST = 31
"""The largest age of a row: rows that were not chosen for this many steps count as equally old."""


class GroupRows(NamedTuple):
    """The hot-row tables of a group of layers that share a choice, with `H` rows per slot.

    The last column of each table is written, but never read.
    """

    row_of: torch.Tensor  # int16 [slots, context + 1]
    owner: torch.Tensor  # int32 [slots, H + 1]
    stamp: torch.Tensor  # int32 [slots, H + 1]: the slot's step in which the row was chosen last


@dataclass(frozen=True)
class Places:
    """The tables that locate the positions of sparse slots; `u` queries, one per slot."""

    slots: torch.Tensor  # int64 [u]
    now: torch.Tensor  # int32 [u]: the slot's current step, at least 1
    page_table: torch.Tensor  # int32 [slots, pages per slot]
    row_table: torch.Tensor  # int32 [slots, H / page_size]: pages of the hot rows
    page_size: int
    page_stride: int


class Found(NamedTuple):
    """The rows of chosen positions, [u, top_k]."""

    rows: torch.Tensor  # int64: row numbers of a layer; for missed positions, the rows that they have to be copied to
    missed: torch.Tensor  # bool
    counts: torch.Tensor  # int64 [4]: selected, found on pages, found in hot rows, missed


class Missing(Protocol):
    """The missed rows that the layers of a group copy from the host before attention."""

    def copy(self, layer: int, pool: torch.Tensor) -> None:
        """Copies a layer's missed rows to its pool [entries, width]."""


@dataclass(frozen=True)
class IndexedMissing:
    """Implements `Missing` on a device that reads host memory directly; `m` rows, missed or not."""

    targets: torch.Tensor  # int64 [m]: row numbers of a layer; if not missed, a row that is never read
    pages: torch.Tensor  # int64 [m]: host pages
    offsets: torch.Tensor  # int64 [m]: positions within the pages
    host: Sequence[torch.Tensor]  # for each layer: [host pages, page_size, width]

    def copy(self, layer: int, pool: torch.Tensor) -> None:
        pool.index_copy_(0, self.targets, self.host[layer][self.pages, self.offsets])


@dataclass(frozen=True)
class Chosen:
    """The rows that the queries of a layer attend to. The layers that share the choice use them too."""

    rows: torch.Tensor  # int64 [queries, top_k]: row numbers of a layer; `NO_ROW`: no row
    missing: Missing | None = None
    """The rows that each layer copies first; None: no slot is sparse."""


def find(positions: torch.Tensor, places: Places, group: GroupRows) -> Found:
    """Returns the locations of `positions` int64 [u, top_k], which are ascending and padded with `NO_ROW`.

    A missed position gets a row. H is at least top_k, so a query loses no row that it has chosen itself.
    """
    slots, size = places.slots, places.page_size
    on_pages = resolve(positions, slots, places.page_table, size, places.page_stride)
    valid, away = positions != NO_ROW, on_pages == NO_PAGE
    rows, hit = _lookup(positions, away, slots, group)
    missed = away & ~hit
    spare = group.owner.shape[1] - 1
    _put(group.stamp, slots, rows.masked_fill(~hit, spare), places.now[:, None].expand_as(rows))
    rows = rows.where(~missed, _victims(missed, places, group))
    taken = rows.masked_fill(~missed, spare)
    _put(group.owner, slots, taken, positions.int())
    _put(group.stamp, slots, taken, places.now[:, None].expand_as(rows))
    _put(group.row_of, slots, positions.masked_fill(~missed, group.row_of.shape[1] - 1), rows.short())
    pages = _entries(places.row_table, slots, rows // size).long()
    in_rows = (pages * places.page_stride + rows % size).masked_fill_(pages < 0, NO_PAGE)
    counts = torch.stack([kind.sum() for kind in (valid, valid & ~away, hit, missed)])
    return Found(in_rows.where(away, on_pages), missed, counts)


def missing(
    positions: torch.Tensor,
    found: Found,
    slots: torch.Tensor,
    host_table: torch.Tensor,
    page_size: int,
    nowhere: int,
    host: Sequence[torch.Tensor],
) -> IndexedMissing:
    """Returns the rows to copy for positions [u, top_k] of slots [u]. `host_table` int32 [slots, pages per slot].

    `nowhere` is the index of a row that is never read.
    """
    at = positions.clamp(min=0)
    pages = _entries(host_table, slots, at // page_size).long()
    # An entry that was not written to the table has to raise: as an index, -1 would be the last page.
    pages = pages.masked_fill(pages < 0, len(host[0]))
    return IndexedMissing(
        found.rows.masked_fill(~found.missed, nowhere).flatten(),
        pages.masked_fill(~found.missed, 0).flatten(),
        (at % page_size).flatten(),
        host,
    )


def _lookup(
    positions: torch.Tensor, away: torch.Tensor, slots: torch.Tensor, group: GroupRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the last hot row of each position, [u, top_k], and true if the row still contains the position."""
    count = group.owner.shape[1] - 1
    row = _entries(group.row_of, slots, positions.clamp(min=0)).long()
    inside = (row >= 0) & (row < count)
    row = row.masked_fill(~inside, 0)
    return row, away & inside & (_entries(group.owner, slots, row) == positions)


def _victims(missed: torch.Tensor, places: Places, group: GroupRows) -> torch.Tensor:
    """Returns rows [u, top_k] for `missed` positions: the least recently chosen; of equally old ones, the lower rows.

    `least` is the smallest age that is still evicted; rows of this age are evicted last.
    """
    count = group.owner.shape[1] - 1
    stamp = group.stamp.index_select(0, places.slots)[:, :count]
    age = (places.now[:, None] - stamp).clamp_(max=OLDEST)
    wanted = missed.sum(1, keepdim=True)
    least = age.topk(missed.shape[1], dim=1).values.gather(1, (wanted - 1).clamp(min=0))
    older, equal = age > least, age == least
    before = older.sum(1, keepdim=True)
    rank = torch.where(older, older.cumsum(1) - 1, before + equal.cumsum(1) - 1)
    rank = rank.masked_fill(~((older | equal) & (rank < wanted)), missed.shape[1])
    victims = rank.new_zeros(len(rank), missed.shape[1] + 1)
    victims.scatter_(1, rank, torch.arange(count, device=rank.device).expand_as(rank))
    return victims.gather(1, (missed.cumsum(1) - 1).clamp(min=0))


def _entries(table: torch.Tensor, slots: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Returns `table[slots[i], columns[i, j]]`."""
    at = slots[:, None] * table.shape[1] + columns
    return table.view(-1).index_select(0, at.flatten()).view(at.shape)


def _put(table: torch.Tensor, slots: torch.Tensor, columns: torch.Tensor, values: torch.Tensor) -> None:
    """Sets `table[slots[i], columns[i, j]] = values[i, j]`; no slot occurs twice."""
    table.view(-1).index_copy_(0, (slots[:, None] * table.shape[1] + columns).flatten(), values.flatten())
