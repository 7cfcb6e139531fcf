"""Paged attention of rows with one token. Positions are divided into parts (`parts`), so that all programs are busy."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.interface import PagedRows
from forebay.gpu.kernels.launch import dependents, launch
from forebay.gpu.kernels.parts import MOST, RECORD_WORDS, Work, keep_part
from forebay.gpu.kernels.shape import Scoring, Shape
from forebay.gpu.kernels.walk import walk

_WORDS = tl.constexpr(RECORD_WORDS)


@triton.jit(do_not_specialize=["null_page"])
def decodes_kernel(
    q,
    keys,
    values,
    out,
    sums,
    weights,
    counts,
    work,
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
    MOST: tl.constexpr,
    JOINS: tl.constexpr,
    DOT: tl.constexpr,
    OVERLAP: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Computes a part of a row for a block of a key head's query heads; grid: items of `Work`, key heads * blocks."""
    dependents(OVERLAP)
    record = work + tl.program_id(0) * _WORDS
    token = tl.load(record).to(tl.int64)
    slot = tl.load(record + 1).to(tl.int64)
    end = tl.load(record + 2)
    begin, until = tl.load(record + 3), tl.load(record + 4)
    count, first_cell, number = tl.load(record + 5), tl.load(record + 6), tl.load(record + 7)
    if token < 0:
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
    summed, top, total = walk(
        query,
        extra,
        tl.zeros([BLOCK], tl.int32) + (end - 1),
        begin,
        begin,
        until,
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
    keep_part(
        out,
        sums,
        weights,
        sinks,
        counts,
        first_cell * tl.num_programs(1) + tl.program_id(1),
        token,
        count,
        first_cell,
        number,
        key_head * GROUP,
        head,
        alive,
        summed,
        top,
        total,
        HEADS,
        GROUP,
        DIM,
        DIM_BLOCK,
        MOST,
        JOINS,
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
    tiles = shape.decode_tiles()
    work = Work.of(rows, shape, tiles, scoring.window)
    launch(
        decodes_kernel,
        (work.items, shape.blocks(tiles)),
        *(q, keys, values, out, work.sums, work.weights, work.counts, work.records, rows.page_table),
        out if scoring.sinks is None else scoring.sinks,
        *(q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1)),
        *(rows.page_table.stride(0), rows.page_stride, rows.null_page, scoring.scale),
        **scoring.constants(),
        **shape.constants(),
        **tiles.options(),
        BLOCK=tiles.m,
        PAGE=rows.page_size,
        MOST=MOST,
        JOINS=work.joins,
        overlap=len(q) == 1,
    )
    work.join(out, rows, shape, scoring.sinks)
