"""The inner loop of all attention: queries of one key head process positions, a tile at a time.

The softmax is FlashAttention's (Dao et al. 2022): it keeps the largest score so far, the sum of weights relative to it,
and the weighted sum of values. Scores are exponents of 2. Tiles to which all queries attend completely need no masks: a
separate loop computes them if there may be many.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forebay.gpu.kernels.eight_bits import load_kept
from forebay.gpu.kernels.gating import tanh
from forebay.gpu.kernels.shape import LOG2_E

_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def seen_from(position, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Returns the start of the tile with the first position that a query attends to."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position + 1 - WINDOW, 0) // TILE * TILE
    return first


@triton.jit
def beside_sinks(top, total, sinks, head, alive, SINKS: tl.constexpr):
    """Includes sinks. Returns, per head, a factor for the sums of values of `walk`, and the new sum of weights.

    Both are relative to the larger of the largest score and the sink.
    """
    share = tl.where(total == total, 1.0, 1.0)
    if SINKS:
        sink = tl.load(sinks + head, mask=alive, other=0.0).to(tl.float32) * _LOG2_E
        higher = tl.maximum(top, sink)
        share = tl.exp2(top - higher)
        total = total * share + tl.exp2(sink - higher)
    return share, total


@triton.jit
def walk(
    q,
    q_extra,
    last,
    begin,
    plain,
    end,
    keys,
    values,
    lookup,
    key_stride,
    value_stride,
    page_stride,
    null_page,
    scale,
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
    WINDOW: tl.constexpr = 0,
    CAP: tl.constexpr = 0.0,
):
    """Returns sums of values [M, DIM_BLOCK], largest scores [M] and sums of weights [M], over positions `begin .. end`.

    Query m attends to positions up to `last[m]`, and of these to the last WINDOW; 0: all. With a CAP, `scale` gives
    scores in units of the cap, and CAP is an exponent of 2; 0: no cap. A head's key is `[DIM | EXTRA]` elements. `q`
    [M, DIM_BLOCK] and `q_extra` [M, EXTRA_BLOCK] are the query's two parts. Values are DIM elements; SHARED: the first
    part of the keys. `keys` and `values` begin at the key head. `lookup` is the row's line of the page table. With PAGE
    0, the line has the entries themselves, one per position, and -1 for none. PLAIN: all queries attend to the
    positions `begin .. plain`, which are whole tiles; there is no window then.
    """
    sums = tl.zeros([M, DIM_BLOCK], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    if PLAIN:
        sums, top, total = _tiles(
            sums,
            top,
            total,
            q,
            q_extra,
            last,
            begin,
            plain,
            keys,
            values,
            lookup,
            key_stride,
            value_stride,
            page_stride,
            null_page,
            scale,
            False,
            DIM,
            DIM_BLOCK,
            EXTRA,
            EXTRA_BLOCK,
            SHARED,
            PAGE,
            TILE,
            DOT,
            WINDOW,
            CAP,
        )
        begin = plain
    return _tiles(
        sums,
        top,
        total,
        q,
        q_extra,
        last,
        begin,
        end,
        keys,
        values,
        lookup,
        key_stride,
        value_stride,
        page_stride,
        null_page,
        scale,
        True,
        DIM,
        DIM_BLOCK,
        EXTRA,
        EXTRA_BLOCK,
        SHARED,
        PAGE,
        TILE,
        DOT,
        WINDOW,
        CAP,
    )


@triton.jit
def _tiles(
    sums,
    top,
    total,
    q,
    q_extra,
    last,
    begin,
    end,
    keys,
    values,
    lookup,
    key_stride,
    value_stride,
    page_stride,
    null_page,
    scale,
    MASKED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    EXTRA: tl.constexpr,
    EXTRA_BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    DOT: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
):
    """Continues the sums of `walk` over the tiles of `begin .. end`.

    MASKED False: all queries attend to all positions of these tiles.
    """
    t = tl.arange(0, TILE)
    d = tl.arange(0, DIM_BLOCK)
    e = tl.arange(0, EXTRA_BLOCK)
    for at in range(begin, end, TILE):
        position = at + t
        inside = position < end
        if PAGE == 0:
            entry = tl.load(lookup + position, mask=inside, other=-1).to(tl.int64)
            inside = entry >= 0
            entry = tl.where(inside, entry, 0)
        else:
            if MASKED:
                page = tl.load(lookup + position // PAGE, mask=inside, other=0).to(tl.int64)
            else:
                page = tl.load(lookup + position // PAGE).to(tl.int64)
            page = tl.where(page < 0, null_page, page)
            entry = page * page_stride + position % PAGE
        there = (d < DIM)[None, :]
        if MASKED:
            there = inside[:, None] & there
        key_at = keys + entry[:, None] * key_stride
        key = load_kept(key_at + d[None, :], there, DOT)
        score = tl.dot(q, tl.trans(key), input_precision="ieee")
        if EXTRA > 0:
            also = (e < EXTRA)[None, :]
            if MASKED:
                also = inside[:, None] & also
            more = load_kept(key_at + DIM + e[None, :], also, DOT)
            score += tl.dot(q_extra, tl.trans(more), input_precision="ieee")
        score = score * scale
        if CAP > 0.0:
            score = tanh(score) * CAP
        if MASKED:
            seen = inside[None, :] & (position[None, :] <= last[:, None])
            if WINDOW > 0:
                seen = seen & (position[None, :] > last[:, None] - WINDOW)
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        # A query that has not attended to any position yet has no largest score to subtract.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score - base[:, None])
        faded = tl.exp2(top - base)
        total = total * faded + tl.sum(weight, 1)
        if SHARED:
            value = key
        else:
            value = load_kept(values + entry[:, None] * value_stride + d[None, :], there, DOT)
        sums = sums * faded[:, None] + tl.dot(weight.to(DOT), value, input_precision="ieee")
        top = higher
    return sums, top, total
