"""The positions that queries choose: scores by an index (DeepSeek Sparse Attention, 2025), and the best scores.

A query's score of a position is `sum over heads of weight * relu(query . key)`, in float32. A radix selection finds the
best scores digit by digit, from the highest digit down, without a sort. So positions come in ascending order, and of
equal scores the lower positions win.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.interface import PagedRows
from forebay.gpu.kernels.chunks import row_of_block
from forebay.gpu.kernels.launch import cdiv, dot_type, launch, power_of_2

SCORE_BYTES = 64 << 20
"""The largest total size in bytes of the scores that are in memory at a time, unless a single block of queries needs
more.
"""
_BLOCK = 4096
_LEAST_DOT = 16

_DIGIT = tl.constexpr(8)
_DIGITS = tl.constexpr(256)


@triton.jit(do_not_specialize=["rows", "begin", "null_page"])
def scores_kernel(
    q,
    weights,
    keys,
    scores,
    seen,
    target,
    slots,
    ends,
    first,
    page_table,
    rows,
    begin,
    q_stride,
    head_stride,
    weight_stride,
    key_stride,
    table_stride,
    page_stride,
    null_page,
    width,
    top_k,
    HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SIZE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Scores SIZE consecutive queries of a row on a tile of positions; grid: blocks of queries, tiles.

    Line `l` of `scores` is a query of the blocks from `begin` on. `target[l]` is the query's index, or -1 for no query.
    `seen[l]` is the number of positions that it can attend to. The line has a score for each of these positions, unless
    the query keeps all of them.
    """
    row, number = row_of_block(begin + tl.program_id(0), first, rows, SIZE)
    line = tl.program_id(0) * SIZE
    token = tl.load(first + row) + number * SIZE
    alive, end = 0, 0
    if row < rows:
        behind = tl.load(first + row + 1)
        alive = tl.maximum(tl.minimum(behind - token, SIZE), 0)
        # The number of positions that the block's first token attends to: one more than there are before it.
        end = tl.load(ends + row) - behind + token + 1
    if tl.program_id(1) == 0:
        for s in tl.static_range(SIZE):
            tl.store(target + line + s, tl.where(s < alive, token + s, -1))
            tl.store(seen + line + s, tl.where(s < alive, end + s, 0))
    position = tl.program_id(1) * TILE + tl.arange(0, TILE)
    last = end + alive - 1
    if (alive > 0) & (last > top_k) & (tl.program_id(1) * TILE < last):
        slot = tl.load(slots + row).to(tl.int64)
        inside = position < last
        page = tl.load(page_table + slot * table_stride + position // PAGE, mask=inside, other=0).to(tl.int64)
        entry = tl.where(page < 0, null_page, page) * page_stride + position % PAGE
        d = tl.arange(0, DIM_BLOCK)
        h = tl.arange(0, HEADS_BLOCK)
        there = inside[:, None] & (d < DIM)[None, :]
        key = tl.trans(tl.load(keys + entry[:, None] * key_stride + d[None, :], mask=there, other=0.0).to(DOT))
        for s in range(alive):
            mine = (token + s).to(tl.int64)
            q_at = q + mine * q_stride + h[:, None] * head_stride + d[None, :]
            query = tl.load(q_at, mask=(h < HEADS)[:, None] & (d < DIM)[None, :], other=0.0).to(DOT)
            weight = tl.load(weights + mine * weight_stride + h, mask=h < HEADS, other=0.0)
            product = tl.dot(query, key, input_precision="ieee")
            score = tl.sum(tl.maximum(product, 0.0) * weight[:, None], 0)
            at = scores + (line + s).to(tl.int64) * width + position
            tl.store(at, score, mask=inside & (position < end + s))


@triton.jit
def _descending(score):
    """Returns unsigned keys, smaller for larger scores. Both zeros are equal, and NaN counts as the largest."""
    score = tl.where(score == 0.0, 0.0, tl.where(score == score, score, float("inf")))
    bits = score.to(tl.int32, bitcast=True)
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (~ascending).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def best_kernel(
    scores, seen, target, chosen, width, TOP_K: tl.constexpr, TOP_K_BLOCK: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes the best positions of one line of scores, ascending; grid: lines."""
    line = tl.program_id(0).to(tl.int64)
    to = tl.load(target + line).to(tl.int64)
    if to < 0:
        return
    count = tl.load(seen + line)
    chosen += to * TOP_K
    if count <= TOP_K:
        k = tl.arange(0, TOP_K_BLOCK)
        tl.store(chosen + k, tl.where(k < count, k, -1), mask=k < TOP_K)
        return
    scores += line * width
    i = tl.arange(0, BLOCK)
    bins = tl.arange(0, _DIGITS)
    left = tl.cast(TOP_K, tl.int32)
    prefix = tl.cast(0, tl.uint32)
    for step in tl.static_range(32 // _DIGIT):
        histogram = tl.zeros([_DIGITS], tl.int32)
        for begin in range(0, count, BLOCK):
            inside = begin + i < count
            key = _descending(tl.load(scores + begin + i, mask=inside, other=0.0))
            if step > 0:
                inside = inside & ((key >> (32 - _DIGIT * step)) == prefix)
            histogram += tl.histogram(
                ((key >> (32 - _DIGIT * (step + 1))) & (_DIGITS - 1)).to(tl.int32), _DIGITS, mask=inside
            )
        upto = tl.cumsum(histogram, 0)
        digit = tl.sum((upto < left).to(tl.int32), 0)
        left -= tl.sum(tl.where(bins < digit, histogram, 0), 0)
        prefix = (prefix << _DIGIT) | digit.to(tl.uint32)
    # Several positions may have the smallest score that is kept. The first `left` of these are kept.
    kept, equals = tl.cast(0, tl.int32), tl.cast(0, tl.int32)
    for begin in range(0, count, BLOCK):
        inside = begin + i < count
        key = _descending(tl.load(scores + begin + i, mask=inside, other=0.0))
        equal = inside & (key == prefix)
        rank = equals + tl.cumsum(equal.to(tl.int32), 0)
        keep = (inside & (key < prefix)) | (equal & (rank <= left))
        place = kept + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(chosen + place, begin + i, mask=keep)
        kept += tl.sum(keep.to(tl.int32), 0)
        equals += tl.sum(equal.to(tl.int32), 0)


def best(scores: torch.Tensor, seen: torch.Tensor, target: torch.Tensor, chosen: torch.Tensor) -> None:
    """Writes the best positions of each line of `scores` [m, width] to `chosen` int32 [n, top_k].

    Of line `l`, only the first `seen[l]` scores count. `target[l]` is the line of `chosen`; -1: the line is skipped.
    Both are int32 [m].
    """
    top_k = chosen.shape[1]
    launch(
        best_kernel,
        (len(scores),),
        *(scores, seen, target, chosen, scores.stride(0)),
        TOP_K=top_k,
        TOP_K_BLOCK=power_of_2(top_k),
        BLOCK=_BLOCK,
        num_warps=8,
    )


def choose(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, rows: PagedRows, top_k: int) -> torch.Tensor:
    """See `interface.Sparse`."""
    queries, heads, dim = q.shape
    size = 8 if rows.chunks else 1
    tile = 16 if keys.dtype == torch.float32 else 128
    # One block per row is added for rows that start within a block. No block is needed for tokens of no row, unlike in
    # attention.
    blocks, width = queries // size + len(rows.slots), rows.page_table.shape[1] * rows.page_size
    at_once = min(blocks, max(1, SCORE_BYTES // (4 * width * size)))
    chosen = torch.full((queries, top_k), -1, dtype=torch.int32, device=q.device)
    scores = torch.empty(at_once * size, width, dtype=torch.float32, device=q.device)
    seen = torch.empty(at_once * size, dtype=torch.int32, device=q.device)
    target = torch.empty(at_once * size, dtype=torch.int32, device=q.device)
    for begin in range(0, blocks, at_once):
        launch(
            scores_kernel,
            (min(at_once, blocks - begin), cdiv(width, tile)),
            *(q, weights, keys, scores, seen, target, rows.slots, rows.ends, rows.first, rows.page_table),
            *(len(rows.slots), begin, q.stride(0), q.stride(1), weights.stride(0), keys.stride(0)),
            *(rows.page_table.stride(0), rows.page_stride, rows.null_page, width, top_k),
            HEADS=heads,
            HEADS_BLOCK=max(power_of_2(heads), _LEAST_DOT),
            DIM=dim,
            DIM_BLOCK=max(power_of_2(dim), _LEAST_DOT),
            PAGE=rows.page_size,
            TILE=tile,
            SIZE=size,
            DOT=dot_type(keys.dtype),
            num_warps=8,
            num_stages=2,
        )
        lines = min(at_once, blocks - begin) * size
        best(scores[:lines], seen, target, chosen)
    return chosen
