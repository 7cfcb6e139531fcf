"""Sparse attention in PyTorch's operators: chooses positions, finds and gathers their rows, and attends to them."""

from __future__ import annotations

import torch

from forebay.gpu.hot import Found, HotRows, SparsePages
from forebay.gpu.interface import PagedRows
from forebay.gpu.reference.tables import records, scatter, tell
from forebay.gpu.tables import ERROR_READ, Received
from forebay.protocol.constants import PAGE_WRITE_WORDS, SLOT_WORDS, SlotRecord

READS_HOST = False
_MOST_AGE = 31


def choose(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, rows: PagedRows, top_k: int) -> torch.Tensor:
    """See `interface.Sparse`."""
    n = len(q)
    token = torch.arange(n, device=q.device)
    row = (torch.searchsorted(rows.first, token.int(), right=True) - 1).clamp_(max=len(rows.slots) - 1)
    behind = rows.first.index_select(0, row + 1)
    seen = (rows.ends.index_select(0, row) - behind + token + 1).masked_fill(token >= rows.first[-1], 0)
    pages = rows.page_table.index_select(0, rows.slots.index_select(0, row).long()).long()
    pages = pages.masked_fill(pages < 0, rows.null_page)
    entries = (pages[:, :, None] * rows.page_stride + torch.arange(rows.page_size, device=q.device)).flatten(1)
    within = torch.arange(entries.shape[1], device=q.device) < seen[:, None]
    known = keys.index_select(0, entries.masked_fill(~within, 0).view(-1)).view(*entries.shape, -1).float()
    products = torch.einsum("nhd,nsd->nhs", q.float(), known.masked_fill(~within[:, :, None], 0)).relu()
    scores = torch.einsum("nhs,nh->ns", products, weights)
    chosen = torch.full((n, top_k), -1, dtype=torch.int32, device=q.device)
    best(scores, seen.int(), token.int(), chosen)
    return chosen


def best(scores: torch.Tensor, seen: torch.Tensor, target: torch.Tensor, chosen: torch.Tensor) -> None:
    """Writes the best of the first `seen` [m] scores of [m, width] to lines `target` [m] of `chosen` int32 [n, k]."""
    top_k, width = chosen.shape[1], scores.shape[1]
    position = torch.arange(width, device=scores.device)
    there = position < seen[:, None]
    # Zeros of both signs are equal, NaN counts as the largest score, and positions that do not exist come last.
    known = scores.masked_fill(scores == 0, 0.0).masked_fill(scores.isnan(), torch.inf)
    order = known.masked_fill(~there, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    places = order.masked_fill(~there.gather(1, order), width)[:, :top_k]
    places = torch.nn.functional.pad(places, (0, max(0, top_k - width)), value=width).sort(dim=-1).values
    places = places.masked_fill(places == width, -1).int()
    lines = torch.cat((chosen, chosen[:1]))
    lines.index_copy_(0, target.long().masked_fill(target < 0, len(chosen)), places)
    chosen.copy_(lines[:-1])


def clear_slots(received: Received, table: torch.Tensor, slots: int) -> None:
    """See `interface.Sparse`."""
    width = table.shape[1]
    new, there = records(received, "slots", SLOT_WORDS)
    slot = new[:, SlotRecord.SLOT]
    there = there & (slot >= 0) & (slot < slots)
    cells = (slot[:, None] * width + torch.arange(width, device=slot.device)).view(-1)
    scatter(table, cells, torch.full_like(cells, -1), there[:, None].expand(-1, width).reshape(-1))


def open_hot_rows(received: Received, pages: SparsePages, group: HotRows, slots: int) -> None:
    """See `interface.Sparse`."""
    given, there = records(received, "hot_rows", PAGE_WRITE_WORDS)
    slot, index, _ = given.unbind(1)
    there = there & (slot >= 0) & (slot < slots) & (index >= 0) & (index < pages.hot_rows.shape[1])
    size = pages.page_size
    begin = slot * group.owner.shape[1] + index * size
    cells = (begin[:, None] + torch.arange(size, device=slot.device)).view(-1)
    each = there[:, None].expand(-1, size).reshape(-1)
    scatter(group.owner, cells, torch.full_like(cells, -1), each)
    scatter(group.stamp, cells, torch.zeros_like(cells), each)
    scatter(pages.clock, slot, torch.zeros_like(slot), there)


def resolve(
    chosen: torch.Tensor, query_slots: torch.Tensor, pages: SparsePages, group: HotRows, errors: torch.Tensor
) -> Found:
    """See `interface.Sparse`."""
    size, top_k = pages.page_size, chosen.shape[1]
    slots = query_slots.long()
    wanted = chosen >= 0
    position = chosen.masked_fill(~wanted, 0).long()
    page = pages.page_table.index_select(0, slots).gather(1, position // size).long()
    resident, cold = wanted & (page >= 0), wanted & (page < 0)
    rows = (page * pages.page_stride + position % size).masked_fill(~resident, -1)
    hot_pages = pages.hot_rows.index_select(0, slots).long()
    sparse = hot_pages[:, :1] >= 0
    lost = cold & ~sparse
    rows = rows.masked_fill(lost, pages.null_page * pages.page_stride)
    tell(errors, lost, ERROR_READ)

    now = pages.clock.index_select(0, slots).long()[:, None]
    count = group.count
    owner, stamp = (table[:, :count].index_select(0, slots).long() for table in (group.owner, group.stamp))
    hot = group.row_of.index_select(0, slots).gather(1, position).long()
    known = cold & sparse & (hot >= 0) & (hot < count)
    hit = known & (owner.gather(1, hot.masked_fill(~known, 0)) == position)
    hot = hot.masked_fill(~hit, 0)
    stamp = _put(stamp, hot, now.expand_as(hot), hit)
    rows = torch.where(hit, _entry(hot_pages, hot, pages), rows)
    miss = cold & sparse & ~hit
    missing = miss.sum(dim=-1, keepdim=True)
    rank = miss.cumsum(dim=-1) - 1

    # The least recently used hot row is replaced first; of equally old rows, that with the lowest index.
    age = (now - stamp).clamp(max=_MOST_AGE)
    turn = age.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    given = turn.gather(1, rank.clamp(min=0))
    host = pages.host_table.index_select(0, slots).gather(1, position // size).long()
    tell(errors, miss & (host < 0), ERROR_READ)
    into = _entry(hot_pages, given, pages)
    rows = torch.where(miss, into, rows)
    source = _compact(host.clamp(min=0) * size + position % size, rank, miss)
    target = _compact(into, rank, miss)
    owner = _put(owner, given, position, miss)
    stamp = _put(stamp, given, now.expand_as(given), miss)
    row_of = _put(group.row_of.index_select(0, slots).long(), position, given, miss)
    group.owner[:, :count].index_copy_(0, slots, owner.int())
    group.stamp[:, :count].index_copy_(0, slots, stamp.int())
    group.row_of.index_copy_(0, slots, row_of.to(torch.int16))
    counts = torch.cat(((resident & sparse).sum(-1, keepdim=True), hit.sum(-1, keepdim=True), missing), dim=1)
    return Found(rows.int(), source, target, missing[:, 0].int(), counts.int())


def _entry(hot_pages: torch.Tensor, hot: torch.Tensor, pages: SparsePages) -> torch.Tensor:
    """Returns the entries of hot rows [n, any]; `hot_pages` [n, pages] are the pages of each query's slot."""
    return hot_pages.gather(1, hot // pages.page_size) * pages.page_stride + hot % pages.page_size


def _put(table: torch.Tensor, at: torch.Tensor, values: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """Returns the table [n, width] with values [n, any] written at columns `at`, where `there` is true."""
    extended = torch.cat((table, table[:, :1]), dim=1)
    return extended.scatter_(1, at.masked_fill(~there, table.shape[1]), values)[:, :-1].contiguous()


def _compact(values: torch.Tensor, rank: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """Moves values [n, k] to the columns `rank`, where `there` is true. Other columns become 0."""
    return _put(torch.zeros_like(values), rank.clamp(min=0), values, there)


def gather(found: Found, host: torch.Tensor, host_stride: int, page_size: int, pool: torch.Tensor) -> None:
    """See `interface.Sparse`."""
    top_k, width = found.rows.shape[1], pool.shape[1]
    there = torch.arange(top_k, device=pool.device) < found.missing[:, None]
    source = found.source.masked_fill(~there, 0)
    at = (source // page_size * host_stride + source % page_size * width).view(-1, 1)
    rows = host.index_select(0, (at + torch.arange(width, device=pool.device)).view(-1)).view(-1, top_k, width)
    # Positions that are not missing also write, but only a row of their own query: rows of other requests may be
    # restored at this moment.
    own = found.rows.amax(dim=-1, keepdim=True).clamp(min=0).long()
    any_ = found.missing[:, None] > 0
    spare = torch.where(any_, found.target[:, :1], own)
    value = torch.where(any_, rows[:, 0], pool.index_select(0, own[:, 0]))
    target = torch.where(there, found.target, spare)
    pool.index_copy_(0, target.view(-1), torch.where(there[..., None], rows, value[:, None]).view(-1, width))


def attend_chosen(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, scale: float
) -> torch.Tensor:
    """See `interface.Sparse`."""
    n, heads, _ = q.shape
    there = rows >= 0
    # A negative row number could lead to NaN, which a weight of 0 does not remove, so another row of the query is read
    # instead.
    entries = torch.where(there, rows, rows.amax(dim=-1, keepdim=True)).clamp_(min=0).long()
    k, v = (
        pool.index_select(0, entries.view(-1)).unflatten(0, tuple(entries.shape)).float() for pool in (keys, values)
    )
    scores = torch.einsum("nkgd,nskd->nkgs", q.float().unflatten(1, (keys.shape[1], -1)), k) * scale
    weights = scores.masked_fill(~there[:, None, None], -torch.inf).softmax(dim=-1)
    out = torch.einsum("nkgs,nskd->nkgd", weights, v).reshape(n, heads, values.shape[2])
    return out.masked_fill(~there.any(dim=-1)[:, None, None], 0).to(q.dtype)
