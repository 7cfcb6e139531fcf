"""Attention to the rows that each query has chosen, given by row indices, as in FlashMLA's sparse kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.kernels.launch import launch, power_of_2
from forebay.gpu.kernels.parts import joined, keep_part, part_length
from forebay.gpu.kernels.shape import LOG2_E, Shape, splits
from forebay.gpu.kernels.walk import walk


@triton.jit
def chosen_kernel(
    q,
    keys,
    values,
    out,
    sums,
    weights,
    rows,
    q_stride,
    head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    scale,
    TOP_K: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    EXTRA: tl.constexpr,
    EXTRA_BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Computes part of a query's rows, for a block of a key head's query heads.

    Grid: queries, key heads * blocks, SPLITS.
    """
    query = tl.program_id(0)
    token = query.to(tl.int64)
    per_split = part_length(TOP_K, SPLITS, TILE)
    begin = tl.program_id(2) * per_split
    blocks: tl.constexpr = (GROUP + BLOCK - 1) // BLOCK
    key_head = tl.program_id(1) // blocks
    m = tl.program_id(1) % blocks * BLOCK + tl.arange(0, BLOCK)
    alive = m < GROUP
    head = key_head * GROUP + m
    d = tl.arange(0, DIM_BLOCK)
    e = tl.arange(0, EXTRA_BLOCK)
    q_at = q + token * q_stride + head[:, None] * head_stride
    mine = tl.load(q_at + d[None, :], mask=alive[:, None] & (d < DIM)[None, :], other=0.0).to(DOT)
    extra = mine
    if EXTRA > 0:
        extra = tl.load(q_at + DIM + e[None, :], mask=alive[:, None] & (e < EXTRA)[None, :], other=0.0).to(DOT)
    summed, top, total = walk(
        mine,
        extra,
        tl.zeros([BLOCK], tl.int32) + TOP_K,
        begin,
        begin,
        tl.minimum(begin + per_split, TOP_K),
        keys + key_head.to(tl.int64) * key_head_stride,
        values + key_head.to(tl.int64) * value_head_stride,
        rows + token * TOP_K,
        key_stride,
        value_stride,
        0,
        0,
        scale,
        BLOCK,
        DIM,
        DIM_BLOCK,
        EXTRA,
        EXTRA_BLOCK,
        SHARED,
        0,
        TILE,
        DOT,
        False,
    )
    keep_part(
        out,
        sums,
        weights,
        sums,
        sums,
        0,
        token,
        SPLITS,
        query * SPLITS,
        tl.program_id(2),
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
        SPLITS,
        False,
        False,
    )


@triton.jit
def join_chosen_kernel(
    sums,
    weights,
    out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Joins the parts of one query and head; grid: queries, HEADS."""
    query, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, DIM_BLOCK)
    result = joined(sums, weights, sums, query * SPLITS, head, SPLITS, HEADS, DIM, DIM_BLOCK, SPLITS, False)
    tl.store(out + (query.to(tl.int64) * HEADS + head) * DIM + d, result, mask=d < DIM)


def attend_chosen(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, scale: float
) -> torch.Tensor:
    """See `interface.Sparse`."""
    shape = Shape.of(q, keys, values)
    tiles = shape.decode_tiles()
    blocks = shape.blocks(tiles)
    queries, top_k = rows.shape
    out = q.new_empty(queries, shape.heads, shape.dim)
    parts = splits(queries * blocks, tiles.programs)
    # A single part needs no join, so it needs no memory for one.
    cells = queries * parts if parts > 1 else 0
    sums = torch.empty(cells, shape.heads, shape.dim, dtype=torch.float32, device=q.device)
    weights = torch.empty(cells, shape.heads, 2, dtype=torch.float32, device=q.device)
    launch(
        chosen_kernel,
        (queries, blocks, parts),
        *(q, keys, values, out, sums, weights, rows),
        *(q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1)),
        scale * LOG2_E,
        **shape.constants(),
        **tiles.options(),
        BLOCK=tiles.m,
        TOP_K=top_k,
        SPLITS=parts,
    )
    if parts > 1:
        launch(
            join_chosen_kernel,
            (queries, shape.heads),
            *(sums, weights, out),
            HEADS=shape.heads,
            DIM=shape.dim,
            DIM_BLOCK=power_of_2(shape.dim),
            SPLITS=parts,
            num_warps=4,
        )
    return out
