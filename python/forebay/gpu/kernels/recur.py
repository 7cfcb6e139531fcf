"""Recurrences with a state per slot: gated delta nets, also with per-channel decays, and Mamba 2.

A row of one token advances its state position by position, and so does any row in float32, for which tensor cores can't
be used. Longer rows are computed in chunks (Yang et al. 2024, "Gated Delta Networks"; the form of
flash-linear-attention). The first kernel has a program per chunk and head. It computes the interaction of a chunk's
positions: products of queries and keys, and for the delta rule the inverse of a triangular matrix. The second kernel
processes the chunks of a row one after the other, using only products of tiles.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from forebay.gpu.kernels.chunks import row_of_block
from forebay.gpu.kernels.heads import (
    advance_one,
    channel_decays,
    constants,
    head_decays,
    key_head_of,
    strengths_of,
    unit_rows,
)
from forebay.gpu.kernels.launch import cdiv, dot_type, launch, power_of_2
from forebay.gpu.kernels.shape import LEAST_DOT
from forebay.gpu.recurrent import StateHeads, StateRows, StateWeights

_CHUNK = 64
_CHANNEL_CHUNK = 32
"""The chunk length with per-channel decays: each position then takes as many registers as a key."""
_VALUES = 32
"""The number of value elements that a program computes, if keys have up to 128 elements."""


@triton.jit
def positions_kernel(
    mixed,
    a,
    b,
    decay,
    step_bias,
    skip,
    table,
    out,
    first,
    places,
    mixed_stride,
    a_stride,
    b_stride,
    place_stride,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    TILED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHANNELS: tl.constexpr,
    DELTA: tl.constexpr,
    SKIP: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Advances V elements of a row's state, position by position; grid: rows, heads, blocks of elements.

    If WHOLE, this kernel computes all rows; otherwise it skips rows of more than one token.
    """
    row = tl.program_id(0)
    begin = tl.load(first + row)
    count = tl.load(first + row + 1) - begin
    if (count == 0) | ((count != 1) & (WHOLE == 0)):
        return
    head = tl.program_id(1)
    v = tl.program_id(2) * V + tl.arange(0, V)
    k = tl.arange(0, K)
    mask = (k < KEY_DIM)[:, None] & (v < VALUE_DIM)[None, :]
    cells = (head * KEY_DIM + k)[:, None] * VALUE_DIM + v[None, :]
    source = tl.load(places + row * place_stride).to(tl.int64)
    kept = tl.load(places + row * place_stride + 1).to(tl.int64)
    target = tl.load(places + row * place_stride + 2).to(tl.int64)
    state = tl.zeros([K, V], tl.float32)
    size: tl.constexpr = HEADS * KEY_DIM * VALUE_DIM
    if source >= 0:
        state = tl.load(table + source * size + cells, mask=mask, other=0.0)
    if WHOLE:
        for at in range(count - 1):
            state = advance_one(
                state,
                mixed,
                a,
                b,
                decay,
                step_bias,
                skip,
                out,
                (begin + at).to(tl.int64),
                mixed_stride,
                a_stride,
                b_stride,
                head,
                v,
                HEADS,
                KEY_HEADS,
                TILED,
                KEY_DIM,
                VALUE_DIM,
                K,
                CHANNELS,
                DELTA,
                SKIP,
            )
    if kept != target:
        tl.store(table + kept * size + cells, state, mask=mask)
    state = advance_one(
        state,
        mixed,
        a,
        b,
        decay,
        step_bias,
        skip,
        out,
        (begin + count - 1).to(tl.int64),
        mixed_stride,
        a_stride,
        b_stride,
        head,
        v,
        HEADS,
        KEY_HEADS,
        TILED,
        KEY_DIM,
        VALUE_DIM,
        K,
        CHANNELS,
        DELTA,
        SKIP,
    )
    tl.store(table + target * size + cells, state, mask=mask)


@triton.jit
def _whole_of(row, first, places, place_stride):
    """Returns a row's first token, the number of tokens computed in chunks, and whether the last token is separate.

    The last token is separate if the state before it has to be kept. A row of one token has no tokens in chunks.
    """
    begin = tl.load(first + row)
    count = tl.load(first + row + 1) - begin
    apart = tl.load(places + row * place_stride + 1) != tl.load(places + row * place_stride + 2)
    return begin, tl.where(count < 2, 0, count - apart.to(tl.int32)), apart


@triton.jit(do_not_specialize=["rows"])
def mixing_kernel(
    mixed,
    a,
    b,
    decay,
    step_bias,
    inverses,
    scores,
    first,
    places,
    rows,
    mixed_stride,
    a_stride,
    b_stride,
    place_stride,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    TILED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    CHANNELS: tl.constexpr,
    DELTA: tl.constexpr,
    SKIP: tl.constexpr,
    DOT: tl.constexpr,
):
    """Computes the interaction of a chunk's positions, for one head; grid: `tokens // C + rows + 1`, heads.

    `scores` [tokens, heads, C] are products of a position's query with the decayed keys of its chunk, up to its own
    key. `inverses` [tokens, heads, C] are rows of `(1 + M)^-1`, where M has the products of keys with decayed earlier
    keys, times strengths.
    """
    row, number = row_of_block(tl.program_id(0), first, rows, C)
    if row >= rows:
        return
    begin, whole, _ = _whole_of(row, first, places, place_stride)
    if number * C >= whole:
        return
    head = tl.program_id(1)
    i = tl.arange(0, C)
    k = tl.arange(0, K)
    left = tl.minimum(whole - number * C, C)
    inside = i < left
    token = (begin + number * C + i).to(tl.int64)
    mask = inside[:, None] & (k < KEY_DIM)[None, :]
    own = key_head_of(head, HEADS, KEY_HEADS, TILED) * KEY_DIM + k
    at = mixed + token[:, None] * mixed_stride + own[None, :]
    query = unit_rows(tl.load(at, mask=mask, other=0.0).to(tl.float32), DELTA)
    key = unit_rows(tl.load(at + KEY_HEADS * KEY_DIM, mask=mask, other=0.0).to(tl.float32), DELTA)
    if DELTA:
        query *= KEY_DIM**-0.5
    of_keys = tl.zeros([C, C], tl.float32)
    of_queries = tl.zeros([C, C], tl.float32)
    if CHANNELS:
        total = tl.cumsum(channel_decays(a, decay, step_bias, token, mask, a_stride, head, k, KEY_DIM), 0)
        for j in range(left):
            # exp of the difference: separate exponentials would overflow or underflow.
            chosen = (i == j)[:, None]
            there = tl.sum(tl.where(chosen, total, 0.0), 0)
            other = tl.sum(tl.where(chosen, key, 0.0), 0)
            remains = tl.exp(tl.minimum(total - there[None, :], 0.0)) * other[None, :]
            of_queries = tl.where((i == j)[None, :], tl.sum(query * remains, 1)[:, None], of_queries)
            if DELTA:
                of_keys = tl.where((i == j)[None, :], tl.sum(key * remains, 1)[:, None], of_keys)
    else:
        total = tl.cumsum(head_decays(a, decay, step_bias, token, inside, a_stride, head), 0)
        remains = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
        keys = tl.trans(key.to(DOT))
        of_queries = tl.dot(query.to(DOT), keys, input_precision="ieee") * remains
        if DELTA:
            of_keys = tl.dot(key.to(DOT), keys, input_precision="ieee") * remains
    cells = (token * HEADS + head)[:, None] * C + i[None, :]
    tl.store(scores + cells, tl.where(i[:, None] >= i[None, :], of_queries, 0.0), mask=inside[:, None])
    if DELTA:
        strength = strengths_of(a, b, step_bias, token, inside, a_stride, b_stride, head, DELTA)
        # Transposed, so that the factors of one position are a column, which can be multiplied with the lines of the
        # inverse.
        factors = tl.trans(tl.where(i[:, None] > i[None, :], of_keys * strength[:, None], 0.0))
        inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        for line in range(1, left):
            factor = tl.sum(tl.where((i == line)[None, :], factors, 0.0), 1)
            earlier = tl.sum(factor[:, None] * inverse, 0)
            inverse = tl.where((i == line)[:, None], inverse - earlier[None, :], inverse)
        tl.store(inverses + cells, inverse, mask=inside[:, None])


@triton.jit
def scan_kernel(
    mixed,
    a,
    b,
    decay,
    step_bias,
    skip,
    inverses,
    scores,
    table,
    out,
    first,
    places,
    mixed_stride,
    a_stride,
    b_stride,
    place_stride,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    TILED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    CHANNELS: tl.constexpr,
    DELTA: tl.constexpr,
    SKIP: tl.constexpr,
    DOT: tl.constexpr,
):
    """Advances V elements of the state of a row of several tokens; grid: rows, heads, blocks of elements."""
    row = tl.program_id(0)
    begin, whole, apart = _whole_of(row, first, places, place_stride)
    if tl.load(first + row + 1) - begin < 2:
        return
    head = tl.program_id(1)
    i = tl.arange(0, C)
    k = tl.arange(0, K)
    v = tl.program_id(2) * V + tl.arange(0, V)
    in_key, in_value = k < KEY_DIM, v < VALUE_DIM
    own = key_head_of(head, HEADS, KEY_HEADS, TILED) * KEY_DIM + k
    cells = (head * KEY_DIM + k)[:, None] * VALUE_DIM + v[None, :]
    size: tl.constexpr = HEADS * KEY_DIM * VALUE_DIM
    state_mask = in_key[:, None] & in_value[None, :]
    source = tl.load(places + row * place_stride).to(tl.int64)
    state = tl.zeros([K, V], tl.float32)
    if source >= 0:
        state = tl.load(table + source * size + cells, mask=state_mask, other=0.0)
    for at in range(0, whole, C):
        inside = at + i < whole
        token = (begin + at + i).to(tl.int64)
        mask = inside[:, None] & in_key[None, :]
        value_mask = inside[:, None] & in_value[None, :]
        line = mixed + token[:, None] * mixed_stride
        key = unit_rows(
            tl.load(line + (KEY_HEADS * KEY_DIM + own)[None, :], mask=mask, other=0.0).to(tl.float32), DELTA
        )
        value_at = line + (2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v)[None, :]
        value = tl.load(value_at, mask=value_mask, other=0.0).to(tl.float32)
        if CHANNELS:
            steps = channel_decays(a, decay, step_bias, token, mask, a_stride, head, k, KEY_DIM)
            total = tl.cumsum(steps, 0)
            last = tl.sum(steps, 0)
            rest = tl.exp(tl.minimum(last[None, :] - total, 0.0))
        else:
            of_head = head_decays(a, decay, step_bias, token, inside, a_stride, head)
            total = tl.cumsum(of_head, 0)[:, None]
            last = tl.sum(of_head, 0) + k * 0.0
            rest = tl.exp(tl.minimum(tl.sum(of_head, 0) - total, 0.0))
        left = tl.exp(total)
        rounded = state.to(DOT)
        added = value
        if DELTA:
            added -= tl.dot((left * key).to(DOT), rounded, input_precision="ieee")
        added *= strengths_of(a, b, step_bias, token, inside, a_stride, b_stride, head, DELTA)[:, None]
        of_chunk = (token * HEADS + head)[:, None] * C + i[None, :]
        if DELTA:
            inverse = tl.load(inverses + of_chunk, mask=inside[:, None], other=0.0).to(DOT)
            added = tl.dot(inverse, added.to(DOT), input_precision="ieee")
        query = unit_rows(tl.load(line + own[None, :], mask=mask, other=0.0).to(tl.float32), DELTA)
        if DELTA:
            query *= KEY_DIM**-0.5
        made = tl.dot((left * query).to(DOT), rounded, input_precision="ieee")
        score = tl.load(scores + of_chunk, mask=inside[:, None], other=0.0).to(DOT)
        made = tl.dot(score, added.to(DOT), made, input_precision="ieee")
        if SKIP:
            made += tl.load(skip + head) * value
        tl.store(out + (token * HEADS + head)[:, None] * VALUE_DIM + v[None, :], made, mask=value_mask)
        state = state * tl.exp(last)[:, None]
        state = tl.dot(tl.trans((rest * key).to(DOT)), added.to(DOT), state, input_precision="ieee")
    if apart:
        kept = tl.load(places + row * place_stride + 1).to(tl.int64)
        tl.store(table + kept * size + cells, state, mask=state_mask)
        state = advance_one(
            state,
            mixed,
            a,
            b,
            decay,
            step_bias,
            skip,
            out,
            (begin + whole).to(tl.int64),
            mixed_stride,
            a_stride,
            b_stride,
            head,
            v,
            HEADS,
            KEY_HEADS,
            TILED,
            KEY_DIM,
            VALUE_DIM,
            K,
            CHANNELS,
            DELTA,
            SKIP,
        )
    target = tl.load(places + row * place_stride + 2).to(tl.int64)
    tl.store(table + target * size + cells, state, mask=state_mask)


def chunk_of(shape: StateHeads, dtype: torch.dtype) -> int:
    """Returns the number of positions of a chunk; 0: rows are computed position by position."""
    if dtype == torch.float32:
        return 0
    return _CHANNEL_CHUNK if shape.channel_decay else _CHUNK


def recur(
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor | None,
    weights: StateWeights,
    shape: StateHeads,
    table: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """See `interface.Recurrences`."""
    tokens, count, dtype = len(mixed), len(rows.places), mixed.dtype
    b = a if b is None else b
    out = torch.empty(tokens, shape.heads * shape.value_dim, dtype=torch.float32, device=mixed.device)
    block = max(power_of_2(shape.key_dim), LEAST_DOT)
    values = max(min(_VALUES if block <= 128 else _VALUES // 2, power_of_2(shape.value_dim)), LEAST_DOT)
    grid = count, shape.heads, cdiv(shape.value_dim, values)
    inputs = mixed, a, b, weights.decay, weights.step_bias
    skip = weights.decay if weights.skip is None else weights.skip
    strides = mixed.stride(0), a.stride(0), b.stride(0), rows.places.stride(0)
    options: dict[str, Any] = {**constants(shape, weights), "K": block}
    of_rows = rows.first, rows.places
    chunk = chunk_of(shape, dtype) if rows.chunks else 0
    launch(
        positions_kernel,
        grid,
        *(*inputs, skip, table, out, *of_rows, *strides),
        V=values,
        WHOLE=rows.chunks and not chunk,
        num_warps=4,
        **options,
    )
    if not chunk:
        return out
    scores = torch.empty(tokens, shape.heads, chunk, dtype=dtype, device=mixed.device)
    inverses = torch.empty_like(scores) if shape.delta else scores
    of_chunks: dict[str, Any] = {**options, "C": chunk, "DOT": dot_type(dtype)}
    launch(
        mixing_kernel,
        (tokens // chunk + count + 1, shape.heads),
        *(*inputs, inverses, scores, *of_rows, count, *strides),
        **of_chunks,
        num_warps=8 if shape.channel_decay else 4,
    )
    launch(
        scan_kernel,
        grid,
        *(*inputs, skip, inverses, scores, table, out, *of_rows, *strides),
        V=values,
        **of_chunks,
        num_warps=8,
        num_stages=1,
    )
    return out
