"""Rows in the order of computation, split at the position from which queries choose what they attend to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forebay.attention.backend import AttentionBackend
from forebay.compute.rows import Rows
from forebay.state.counts import ragged
from forebay.state.slots import Int64s


@dataclass(frozen=True)
class Pieces:
    """Pieces of rows, `p` of them. A step's tokens are in this order."""

    row: Int64s  # [p]: the row that the piece belongs to
    start: Int64s  # [p]
    length: Int64s  # [p]
    whole: int
    """The number of pieces that attend to their whole context. They come first; the queries of later pieces choose."""

    @property
    def offset(self) -> Int64s:
        """The index of each piece's first token, [p]."""
        return np.cumsum(self.length) - self.length

    @property
    def last(self) -> Int64s:
        """The index of each row's last token, [r]."""
        last = np.empty(int(self.row.max()) + 1, np.int64)
        # If a row is cut, its second piece comes after the first, and is written last.
        last[self.row] = self.offset + self.length - 1
        return last

    def places(self, rows: Rows) -> Int64s:
        """Returns the index in this order of each token, [n]. Tokens are numbered over all rows."""
        numbers = ragged((rows.last - rows.length + 1 - rows.start)[self.row] + self.start, self.length)
        places = np.empty(len(numbers), np.int64)
        places[numbers] = np.arange(len(numbers))
        return places

    def sparse(self, rows: Rows) -> Int64s:
        """Returns the queries of sparse slots, [u], numbered over the queries that choose.

        A row of a sparse slot has one query.
        """
        if rows.sparse is None:
            return np.zeros(0, np.int64)
        found = np.flatnonzero(rows.sparse[self.row])
        queries: Int64s = self.offset[found] - self.offset[self.whole]
        return queries


def pieces(rows: Rows, backend: AttentionBackend, choose_from: int | None) -> Pieces:
    """Returns all rows, in the backend's order. Queries from position `choose_from` on choose; None: no query does.

    Queries of sparse slots always choose, since some of their positions may not be on the device.
    """
    ends = rows.start + rows.length
    if choose_from is None:
        order = backend.order(rows.length, ends)
        return Pieces(order, rows.start[order], rows.length[order], len(order))
    limit = np.full_like(rows.start, choose_from)
    if rows.sparse is not None:
        limit[rows.sparse] = 0
    below, above = np.flatnonzero(rows.start < limit), np.flatnonzero(ends > limit)
    until = np.minimum(ends[below], choose_from)
    order = backend.order(until - rows.start[below], until)
    row = np.concatenate((below[order], above))
    start = np.maximum(rows.start[row], limit[row])
    start[: len(below)] = rows.start[below[order]]
    return Pieces(row, start, np.concatenate((until[order], ends[above])) - start, len(below))
