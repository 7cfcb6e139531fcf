"""Paged attention of rows of one token. Their positions are read in parts, which a second kernel joins.

With few rows there are more processors than key heads. All parts of a row are equally long. The device computes their
length from the row's, so a graph fits every length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.interface import PagedRows
from forebay.gpu.kernels.chunks import seen_from
from forebay.gpu.kernels.join import Parts, keep_part, part_length
from forebay.gpu.kernels.launch import dependents, launch
from forebay.gpu.kernels.shape import Scoring, Shape, splits
from forebay.gpu.kernels.walk import walk


@triton.jit(do_not_specialize=["null_page"])
def decodes_kernel(
    q,
    keys,
    values,
    out,
    sums,
    weights,
    slots,
    ends,
    first,
    page_table,
    sinks,
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
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    EXTRA: tl.constexpr,
    EXTRA_BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    DOT: tl.constexpr,
    OVERLAP: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One part of one row for a block of the query heads of one key head; grid: rows, key heads * blocks, SPLITS."""
    dependents(OVERLAP)
    row = tl.program_id(0)
    token = tl.load(first + row).to(tl.int64)
    length = tl.load(first + row + 1) - token
    end = tl.load(ends + row)
    from_ = seen_from(end - 1, WINDOW, TILE)
    per_split = part_length(end - from_, SPLITS, TILE)
    begin = from_ + tl.program_id(2) * per_split
    # Rows of several tokens are chunks, and padding may have none.
    if length != 1:
        return
    blocks: tl.constexpr = (GROUP + BLOCK - 1) // BLOCK
    key_head = tl.program_id(1) // blocks
    m = tl.program_id(1) % blocks * BLOCK + tl.arange(0, BLOCK)
    alive = m < GROUP
    head = key_head * GROUP + m
    d = tl.arange(0, DIM_BLOCK)
    e = tl.arange(0, EXTRA_BLOCK)
    q_at = q + token * q_stride + head[:, None] * head_stride
    wide = alive[:, None] & (d < DIM)[None, :]
    query = tl.load(q_at + d[None, :], mask=wide, other=0.0).to(DOT)
    extra = query
    if EXTRA > 0:
        extra = tl.load(q_at + DIM + e[None, :], mask=alive[:, None] & (e < EXTRA)[None, :], other=0.0).to(DOT)
    slot = tl.load(slots + row).to(tl.int64)
    summed, top, total = walk(
        query,
        extra,
        tl.zeros([BLOCK], tl.int32) + (end - 1),
        begin,
        begin,
        tl.minimum(begin + per_split, end),
        keys + key_head.to(tl.int64) * key_head_stride,
        values + key_head.to(tl.int64) * value_head_stride,
        page_table + slot * table_stride,
        key_stride,
        value_stride,
        page_stride,
        null_page,
        scale,
        BLOCK,
        DIM,
        DIM_BLOCK,
        EXTRA,
        EXTRA_BLOCK,
        SHARED,
        PAGE,
        TILE,
        DOT,
        False,
        WINDOW,
        CAP,
    )
    split = tl.program_id(2)
    keep_part(
        out,
        sums,
        weights,
        row,
        token,
        split,
        head,
        alive,
        summed,
        top,
        total,
        sinks,
        HEADS,
        DIM,
        DIM_BLOCK,
        SPLITS,
        SINKS,
    )


def attend_decodes(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: PagedRows,
    scoring: Scoring,
    shape: Shape,
    out: torch.Tensor,
) -> None:
    """Writes `out` [n, heads, dim] for the tokens of rows with one token."""
    count, tiles = len(rows.slots), shape.decode_tiles()
    blocks = shape.blocks(tiles)
    parts = Parts.make(count, shape, splits(count * blocks, tiles.programs), out)
    launch(
        decodes_kernel,
        (count, blocks, parts.count),
        *(q, keys, values, out, parts.sums, parts.weights, rows.slots, rows.ends, rows.first, rows.page_table),
        out if scoring.sinks is None else scoring.sinks,
        *(q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1)),
        *(rows.page_table.stride(0), rows.page_stride, rows.null_page, scoring.scale),
        **scoring.constants(),
        **shape.constants(),
        **tiles.options(),
        BLOCK=tiles.m,
        PAGE=rows.page_size,
        SPLITS=parts.count,
        overlap=len(q) == 1,
    )
    parts.join(out, rows.first, shape, scoring.sinks)
