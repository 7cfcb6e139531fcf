"""Attention in PyTorch's operators: gathers pages and calls PyTorch's blocked kernel. On any device, best on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from forebay.attention import latent, selection, sparse
from forebay.attention.backend import CAUSAL, Batch, How, IndexBatch, Int64s, LatentHeads, LayerKV
from forebay.attention.masked import masked_attention, positions_mask

DECODE_POSITIONS = 1 << 18
"""The largest number of positions (rows x padded length) in one call, to bound its memory."""
SHORTEST_BUCKET = 6
"""Decode rows shorter than 2^6 positions share a bucket, since their padding costs less than another call."""
QUERY_BLOCK = 256
"""The number of queries that share a call if a chunk has cached positions before it. With fewer, more masked keys are
skipped.
"""


@dataclass(frozen=True)
class DecodeGroup:
    """Decode rows of similar length, padded to the longest."""

    first: int
    count: int
    entries: torch.Tensor  # int64 [count * longest]; padding repeats the row's own last position
    mask: torch.Tensor | None  # additive [count, 1, 1, longest]; None when all rows are equally long
    ends: torch.Tensor  # int64 [count, 1]
    seen: torch.Tensor | None = None
    """The position of each entry, [count, 1, longest], negative for padding; None: positions count up from 0."""


@dataclass(frozen=True)
class ChunkRow:
    """A prompt chunk."""

    first: int
    count: int
    start: int
    entries: torch.Tensor | None  # int64 [start - seen_from + count]; None: nothing is cached before it
    # First query, end query, and additive mask [queries, start + end query]; empty with a window or spans.
    blocks: list[tuple[int, int, torch.Tensor]]
    spans: Sequence[tuple[int, int]] = ()
    """Ranges of positions with bidirectional attention, as in a `Batch`."""
    seen_from: int = 0
    """The position of the first entry."""


@dataclass(frozen=True)
class CpuStep:
    """A step's rows, decode groups first."""

    groups: list[DecodeGroup]
    chunks: list[ChunkRow]
    batch: Batch


class CpuAttention:
    """Implements `AttentionBackend` with PyTorch's operators. No shape depends on a value of a tensor.

    Padding never reads another request's memory: a value that is not finite would get through a mask (0 * nan is nan).
    """

    def __init__(self) -> None:
        self._future = torch.empty(0, 0)

    def order(self, lengths: Int64s, ends: Int64s) -> Int64s:
        """Returns decode rows first, by bucket, then chunks."""
        return np.argsort(_buckets(lengths, ends), kind="stable")

    def prepare(self, batch: Batch, dtype: torch.dtype) -> CpuStep:
        ends = batch.start + batch.length
        buckets = _buckets(batch.length, ends)
        decodes = int(np.count_nonzero(batch.length == 1))
        edges = np.flatnonzero(np.diff(buckets[:decodes])) + 1
        groups = []
        for first, last in zip([0, *edges], [*edges, decodes], strict=True):
            while first < last:
                longest = int(ends[first:last].max())
                count = min(int(last - first), max(1, DECODE_POSITIONS // longest))
                if batch.window is not None:
                    groups.append(_window_group(batch, batch.window, longest, int(first), count))
                else:
                    groups.append(_decode_group(batch, ends, int(first), count, dtype))
                first += count
        chunks = [self.chunk(batch, row, dtype) for row in range(decodes, len(ends))]
        return CpuStep(groups, chunks, batch)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: LayerKV, prepared: CpuStep, how: How = CAUSAL
    ) -> torch.Tensor:
        if how.both_ways:
            raise NotImplementedError(f"rows on pages are attended to in causal order, and {how} is asked for")
        if how != CAUSAL:
            outputs = [_decodes_as(q, kv, group, how) for group in prepared.groups]
        else:
            outputs = [_attend_decodes(q, kv, group) for group in prepared.groups]
        for chunk in prepared.chunks:
            plain = how == CAUSAL and not chunk.spans
            outputs.append(_attend_chunk(q, k, v, kv, chunk) if plain else chunk_as(q, k, v, kv, chunk, how))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def attend_latent(
        self,
        q: torch.Tensor,
        rows: torch.Tensor,
        up: torch.Tensor,
        kv: LayerKV,
        heads: LatentHeads,
        prepared: CpuStep,
        chosen: torch.Tensor | None,
    ) -> torch.Tensor:
        """Decode rows use the absorbed form: otherwise each step would compute keys and values of all positions again.

        Chunks use `latent.of_chunk`.
        """
        outputs = []
        for group in prepared.groups:
            part = slice(group.first, group.first + group.count)
            cached = kv.keys.index_select(0, group.entries).view(group.count, -1, rows.shape[1])
            outputs.append(latent.absorbed(q[part], cached, group.mask, up, heads))
        for chunk in prepared.chunks:
            part = slice(chunk.first, chunk.first + chunk.count)
            seen = rows[part] if chunk.entries is None else kv.keys.index_select(0, chunk.entries)[:, 0]
            outputs.append(latent.of_chunk(q[part], seen, chunk.blocks, up, heads))
        if chosen is not None:
            outputs.append(sparse.attend(q[len(q) - len(chosen) :], kv.keys[:, 0], chosen, up, heads))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def prepare_index(self, batch: IndexBatch) -> selection.IndexStep:
        return selection.prepare(batch)

    def choose(
        self, q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, prepared: selection.IndexStep
    ) -> torch.Tensor:
        return selection.choose(q, weights, keys, prepared)

    def chunk(self, batch: Batch, row: int, dtype: torch.dtype) -> ChunkRow:
        """Returns the prompt chunk in a row of the batch."""
        first, count, start = int(batch.offset[row]), int(batch.length[row]), int(batch.start[row])
        spans = batch.spans[row] if batch.spans else ()
        if start == 0:
            return ChunkRow(first, count, start, None, [], spans)
        device = batch.slots.device
        seen_from = 0 if batch.window is None else max(0, start + 1 - batch.window)
        positions = torch.arange(seen_from, start + count, device=device)
        table = batch.page_table.index_select(0, batch.slots[row : row + 1])[0]
        pages = table.index_select(0, positions // batch.page_size).long()
        entries = pages * batch.page_stride + positions % batch.page_size
        if batch.window is not None or spans:
            # Rows with a window or spans get their masks in `chunk_as`.
            return ChunkRow(first, count, start, entries, [], spans, seen_from)
        blocks = []
        for begin in range(0, count, QUERY_BLOCK):
            end = min(begin + QUERY_BLOCK, count)
            blocks.append((begin, end, self._causal(end - begin, start + begin, dtype, device)))
        return ChunkRow(first, count, start, entries, blocks)

    def _causal(self, queries: int, before: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns an additive mask [queries, before + queries]: query i attends to keys up to `before + i`.

        It is a slice of one cached mask, which grows: zeros, followed by the triangle of a whole block.
        """
        known = self._future.shape[1] - QUERY_BLOCK
        if known < before or self._future.dtype != dtype:
            known = max(before, 2 * known)
            triangle = torch.full((QUERY_BLOCK, QUERY_BLOCK), -torch.inf, dtype=dtype, device=device).triu_(1)
            self._future = torch.cat((triangle.new_zeros(QUERY_BLOCK, known), triangle), dim=1)
        return self._future[:queries, known - before : known + queries]


def _buckets(lengths: Int64s, ends: Int64s) -> Int64s:
    """Returns the sort key of rows: the binary logarithm of a decode row's length; a larger constant for a chunk."""
    exponents = np.maximum(np.frexp(ends)[1], SHORTEST_BUCKET)
    return np.where(lengths == 1, exponents, 64)


def _decode_group(batch: Batch, all_ends: Int64s, first: int, count: int, dtype: torch.dtype) -> DecodeGroup:
    rows = slice(first, first + count)
    ends, slots = batch.ends[rows, None], batch.slots[rows]
    longest, shortest = int(all_ends[rows].max()), int(all_ends[rows].min())
    ps, stride = batch.page_size, batch.page_stride
    pages = batch.page_table[:, : -(-longest // ps)].index_select(0, slots).long()
    positions = torch.arange(longest, device=slots.device)
    # Page table entries after a row's end are stale: replace them by the row's last entry before keys are read.
    last = pages.gather(1, (ends - 1) // ps) * stride + (ends - 1) % ps
    entries = (pages[:, :, None] * stride + torch.arange(ps, device=slots.device)).view(count, -1)[:, :longest]
    if shortest == longest:
        return DecodeGroup(first, count, entries.reshape(-1), None, ends)
    inside = positions < ends
    entries = torch.where(inside, entries, last).view(-1)
    mask = torch.zeros(count, longest, dtype=dtype, device=slots.device).masked_fill_(~inside, -torch.inf)
    return DecodeGroup(first, count, entries, mask[:, None, None], ends)


def _window_group(batch: Batch, window: int, longest: int, first: int, count: int) -> DecodeGroup:
    """Returns a group of rows of which only the last `window` positions have pages."""
    rows = slice(first, first + count)
    ends, slots, size = batch.ends[rows, None], batch.slots[rows], batch.page_size
    width = min(window, longest)
    seen = ends - width + torch.arange(width, device=slots.device)
    # In a shorter row, the last position is repeated as padding.
    positions = torch.where(seen < 0, ends - 1, seen)
    index = slots[:, None] * batch.page_table.shape[1] + positions // size
    pages = batch.page_table.view(-1).index_select(0, index.view(-1)).view(index.shape).long()
    entries = (pages * batch.page_stride + positions % size).view(-1)
    return DecodeGroup(first, count, entries, None, ends, seen[:, None])


def _attend_decodes(q: torch.Tensor, kv: LayerKV, group: DecodeGroup) -> torch.Tensor:
    k, v = _cached(kv, group)
    # The query heads of a key-value head are passed as queries of one head, so each key is read once, not once per
    # head.
    q = q[group.first : group.first + group.count].view(group.count, k.shape[1], -1, k.shape[3])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask).reshape(group.count, -1)


def _cached(kv: LayerKV, group: DecodeGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns keys and values [count, kv_heads, longest, dim] of a group's rows."""
    k, v = (pool.index_select(0, group.entries).unflatten(0, (group.count, -1)).transpose(1, 2) for pool in kv)
    return k, v


def _decodes_as(q: torch.Tensor, kv: LayerKV, group: DecodeGroup, how: How) -> torch.Tensor:
    """Like `_attend_decodes`, with the options of `how`."""
    k, v = _cached(kv, group)
    if group.seen is None:
        mask = positions_mask(group.ends - 1, torch.arange(k.shape[2], device=q.device), how)
    else:
        mask = positions_mask(group.ends - 1, group.seen, how) & (group.seen >= 0)
    mask = mask[:, None]
    q = q[group.first : group.first + group.count, :, None]
    return masked_attention(q, k, v, mask, how).flatten(1)


def chunk_as(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: LayerKV, chunk: ChunkRow, how: How) -> torch.Tensor:
    """Returns the attention [count, heads * head_dim] of a chunk, with all options of `how`, and with its spans."""
    rows = slice(chunk.first, chunk.first + chunk.count)
    if chunk.entries is None:
        k, v = k[rows], v[rows]
    else:
        k, v = (pool.index_select(0, chunk.entries) for pool in kv)
    k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    outputs = []
    for begin in range(0, chunk.count, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, chunk.count)
        queries = torch.arange(chunk.start + begin, chunk.start + end, device=q.device)
        last, behind = _reach(queries, chunk.start + begin, chunk.start + end, chunk.spans)
        seen = torch.arange(chunk.seen_from, behind, device=q.device)
        mask = positions_mask(queries, seen, how, last)
        block = q[chunk.first + begin : chunk.first + end].transpose(0, 1)[None]
        outputs.append(_heads_last(masked_attention(block, k[:, :, : len(seen)], v[:, :, : len(seen)], mask, how)))
    return torch.cat(outputs)


def _reach(
    queries: torch.Tensor, begin: int, end: int, spans: Sequence[tuple[int, int]]
) -> tuple[torch.Tensor | None, int]:
    """Returns the last position that each of the queries `begin .. end` attends to, and the end of all these positions.

    None in place of the positions: each query attends up to its own position.
    """
    met = [(first, behind) for first, behind in spans if first < end and begin < behind]
    if not met:
        return None, end
    last = queries.clone()
    for first, behind in met:
        last[max(first - begin, 0) : min(behind, end) - begin] = behind - 1
    return last, max(end, *(behind for _, behind in met))


def _attend_chunk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: LayerKV, chunk: ChunkRow) -> torch.Tensor:
    rows = slice(chunk.first, chunk.first + chunk.count)
    q = q[rows].transpose(0, 1)[None]
    if chunk.entries is None:
        k, v = k[rows].transpose(0, 1)[None], v[rows].transpose(0, 1)[None]
        return _heads_last(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    k = kv.keys.index_select(0, chunk.entries).transpose(0, 1)[None]
    v = kv.values.index_select(0, chunk.entries).transpose(0, 1)[None]
    outputs = []
    for begin, end, mask in chunk.blocks:
        seen = mask.shape[1]
        block = F.scaled_dot_product_attention(
            q[:, :, begin:end], k[:, :, :seen], v[:, :, :seen], attn_mask=mask, enable_gqa=True
        )
        outputs.append(_heads_last(block))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _heads_last(output: torch.Tensor) -> torch.Tensor:
    """Reshapes [1, heads, tokens, head_dim] to [tokens, heads * head_dim]."""
    return output[0].transpose(0, 1).reshape(output.shape[2], -1)
