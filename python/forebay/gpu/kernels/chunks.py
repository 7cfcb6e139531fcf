"""Paged attention of rows with several tokens: prompts, or chunks of prompts after cached positions.

A program computes a block of consecutive tokens of a row, and all query heads of one key head. The device finds the row
of each block. So the grid is an upper bound, which depends only on the numbers of tokens and rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.interface import PagedRows
from forebay.gpu.kernels.launch import cdiv, launch
from forebay.gpu.kernels.shape import Scoring, Shape
from forebay.gpu.kernels.walk import beside_sinks, seen_from, walk


@triton.jit
def row_of_block(block, first, rows, SIZE: tl.constexpr):
    """Returns the row of a block of SIZE tokens, and the block's index in the row.

    For a block after the last row, the returned row is `rows`. Row i has the blocks from `first[i] // SIZE + i` on.
    These blocks are enough for the row's tokens, and computing them needs no sums over rows.
    """
    low, high = 0, rows
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(first + middle) // SIZE + middle <= block:
            low = middle
        else:
            high = middle - 1
    return low, block - (tl.load(first + low) // SIZE + low)


@triton.jit(do_not_specialize=["rows", "tokens", "null_page"])
def chunks_kernel(
    q,
    keys,
    values,
    out,
    slots,
    ends,
    first,
    page_table,
    sinks,
    rows,
    tokens,
    q_stride,
    head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    table_stride,
    page_stride,
    null_page,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    M: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    EXTRA: tl.constexpr,
    EXTRA_BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    DOT: tl.constexpr,
    PLAIN: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Attention of SIZE tokens of a row, for BLOCK query heads of one key head. M is at least SIZE * BLOCK.

    The grid is `tokens // SIZE + rows + 1`, key heads * blocks of heads. Blocks after the last row have tokens of no
    row, and write zeros.
    """
    row, number = row_of_block(tl.program_id(0), first, rows, SIZE)
    blocks: tl.constexpr = (GROUP + BLOCK - 1) // BLOCK
    key_head = tl.program_id(1) // blocks
    m = tl.arange(0, M)
    local = number * SIZE + m // BLOCK
    of_group = tl.program_id(1) % blocks * BLOCK + m % BLOCK
    head = key_head * GROUP + of_group
    d = tl.arange(0, DIM_BLOCK)
    e = tl.arange(0, EXTRA_BLOCK)
    begin = tl.load(first + row)
    token = (begin + local).to(tl.int64)
    mine = (m < SIZE * BLOCK) & (of_group < GROUP)
    out_at = out + (token[:, None] * HEADS + head[:, None]) * DIM + d[None, :]
    if row == rows:
        zeros = tl.zeros([M, DIM_BLOCK], tl.float32)
        tl.store(out_at, zeros, mask=(mine & (token < tokens))[:, None] & (d < DIM)[None, :])
        return
    length = tl.load(first + row + 1) - begin
    if (length <= 1) | (number * SIZE >= length):
        return
    alive = mine & (local < length)
    wide = alive[:, None] & (d < DIM)[None, :]
    q_at = q + token[:, None] * q_stride + head[:, None] * head_stride
    query = tl.load(q_at + d[None, :], mask=wide, other=0.0).to(DOT)
    extra = query
    if EXTRA > 0:
        extra = tl.load(q_at + DIM + e[None, :], mask=alive[:, None] & (e < EXTRA)[None, :], other=0.0).to(DOT)
    end = tl.load(ends + row)
    start = end - length
    slot = tl.load(slots + row).to(tl.int64)
    summed, top, total = walk(
        query,
        extra,
        start + local,
        seen_from(start + number * SIZE, WINDOW, TILE),
        # The first query attends to positions up to its own; the others attend to more.
        (start + number * SIZE + 1) // TILE * TILE,
        tl.minimum(start + (number + 1) * SIZE, end),
        keys + key_head.to(tl.int64) * key_head_stride,
        values + key_head.to(tl.int64) * value_head_stride,
        page_table + slot * table_stride,
        key_stride,
        value_stride,
        page_stride,
        null_page,
        scale,
        M,
        DIM,
        DIM_BLOCK,
        EXTRA,
        EXTRA_BLOCK,
        SHARED,
        PAGE,
        TILE,
        DOT,
        PLAIN,
        WINDOW,
        CAP,
    )
    share, total = beside_sinks(top, total, sinks, head, alive, SINKS)
    tl.store(out_at, summed * (share / total)[:, None], mask=wide)


def attend_chunks(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: PagedRows,
    scoring: Scoring,
    shape: Shape,
    out: torch.Tensor,
) -> None:
    """Writes `out` [n, heads, dim] for the tokens of rows with several tokens, and for tokens of no row."""
    count, tokens, tiles = len(rows.slots), len(q), shape.chunk_tiles()
    block = min(shape.group, tiles.m)
    size = tiles.m // block
    launch(
        chunks_kernel,
        (tokens // size + count + 1, shape.kv_heads * cdiv(shape.group, block)),
        *(q, keys, values, out, rows.slots, rows.ends, rows.first, rows.page_table),
        *(out if scoring.sinks is None else scoring.sinks, count, tokens),
        *(q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1)),
        *(rows.page_table.stride(0), rows.page_stride, rows.null_page, scoring.scale),
        **scoring.constants(),
        **shape.constants(),
        **tiles.options(),
        SIZE=size,
        BLOCK=block,
        M=tiles.m,
        PAGE=rows.page_size,
        # In float32 there are not enough registers for two loops, and a window does not start at a tile.
        PLAIN=shape.dtype != torch.float32 and not scoring.window,
    )
