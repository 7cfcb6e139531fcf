"""The choice of the positions that a query attends to, by index keys (DeepSeek Sparse Attention, V3.2, 2025).

For a query, position s has the score `sum over heads j of w_j * relu(q_j . k_s)`. The largest scores win; of equal
scores, the lower positions. Ties are frequent, since `relu` returns many zeros, and a choice must not depend on how a
request is chunked or batched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from forebay.attention.backend import NO_ROW, IndexBatch

BLOCK_BYTES = 64 << 20
"""The largest number of bytes of intermediate values for queries computed together. A single query may need more."""
KEY_BLOCK = 4096
"""The number of positions that are scored at once."""
_SELECTION_BYTES = 16
"""Bytes that the choice needs per query and position: the score, three counts and some flags."""


@dataclass(frozen=True)
class IndexRow:
    """A row's queries, and the entries of the keys up to its last query."""

    first: int
    count: int
    start: int
    """The position of the first query."""
    entries: torch.Tensor  # int64 [start + count]


@dataclass(frozen=True)
class IndexStep:
    """The rows in which each query chooses the positions that it attends to, in the order of the step."""

    rows: list[IndexRow]
    top_k: int


def prepare(batch: IndexBatch) -> IndexStep:
    """Computes the entries of all rows from the page table, once for all layers."""
    rows = []
    first, size = 0, batch.page_size
    for number, (start, count) in enumerate(zip(batch.start.tolist(), batch.length.tolist(), strict=True)):
        positions = torch.arange(start + count, device=batch.slots.device)
        table = batch.page_table.index_select(0, batch.slots[number : number + 1])[0]
        pages = table.index_select(0, positions // size).long()
        rows.append(IndexRow(first, count, start, pages * batch.page_stride + positions % size))
        first += count
    return IndexStep(rows, batch.top_k)


def choose(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, step: IndexStep) -> torch.Tensor:
    """Returns the positions int64 [queries, top_k], ascending, padded with `NO_ROW` if a query has fewer.

    q is [queries, heads, head_dim], weights float32 [queries, heads], keys [entries, head_dim].
    """
    chosen = []
    for row in step.rows:
        for begin, end in _blocks(row, q.shape[1]):
            part = slice(row.first + begin, row.first + end)
            scores = index_scores(q[part], weights[part], keys, row.entries[: row.start + end])
            chosen.append(best(scores, row.start + begin, step.top_k))
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen)


def index_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """Returns scores float32 [queries, positions] of the keys at `entries` [positions].

    Other arguments are those of `choose`.
    """
    q = q.float()
    scores = weights.new_empty(len(q), len(entries))
    for first in range(0, len(entries), KEY_BLOCK):
        part = slice(first, first + KEY_BLOCK)
        products = F.linear(q, keys.index_select(0, entries[part]).float()).relu_()
        scores[:, part] = torch.bmm(weights[:, None], products)[:, 0]
    return scores


def best(scores: torch.Tensor, start: int, top_k: int) -> torch.Tensor:
    """Returns the result of `choose` for scores float32 [queries, positions], which are overwritten.

    The queries are at positions `start`, `start + 1`, and so on. No query attends to later positions. NaN counts as the
    largest score, so that it shows in the output.
    """
    queries, positions = scores.shape
    scores.nan_to_num_(torch.inf, torch.inf, -torch.inf)
    at = torch.arange(start, start + queries, device=scores.device)[:, None]
    if queries > 1:
        scores.masked_fill_(torch.arange(positions, device=scores.device) > at, -torch.inf)
    count = (at + 1).clamp_(max=top_k)
    threshold = scores.topk(min(top_k, positions), dim=-1).values.gather(1, count - 1)
    kept = scores > threshold
    equal = scores == threshold
    left = count - kept.sum(dim=-1, keepdim=True)
    kept |= equal.logical_and_(equal.cumsum(dim=-1, dtype=torch.int32) <= left)
    # The n-th kept position is where the running count first reaches n.
    ranks = torch.arange(1, top_k + 1, dtype=torch.int32, device=scores.device).expand(queries, -1)
    found = torch.searchsorted(kept.cumsum(dim=-1, dtype=torch.int32), ranks.contiguous())
    return found.masked_fill_(found == positions, NO_ROW)


def _blocks(row: IndexRow, heads: int) -> Iterator[tuple[int, int]]:
    """Yields the first and the end of each range of the row's queries that are scored together."""
    positions = row.start + row.count
    of_query = _SELECTION_BYTES * positions + 4 * heads * min(positions, KEY_BLOCK)
    size = max(1, BLOCK_BYTES // of_query)
    for begin in range(0, row.count, size):
        yield begin, min(begin + size, row.count)
