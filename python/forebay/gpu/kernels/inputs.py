"""The inputs of a step's rows: tokens, positions, and entries to write, from the words of the plan itself."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.kernels.apply import column
from forebay.gpu.kernels.launch import cdiv, launch
from forebay.gpu.tables import (
    ERROR_RANGE,
    ERROR_READ,
    ERROR_TOKEN,
    ERROR_WRITE,
    Received,
    StepBuffers,
    Tables,
    column_id,
)
from forebay.protocol.constants import FLAG_SAMPLE, ROW_WORDS

_ROWS = tl.constexpr(column_id("rows"))
_WORDS = tl.constexpr(ROW_WORDS)
_SAMPLE = tl.constexpr(FLAG_SAMPLE)
_RANGE = tl.constexpr(ERROR_RANGE)
_WRITE = tl.constexpr(ERROR_WRITE)
_READ = tl.constexpr(ERROR_READ)
_TOKEN = tl.constexpr(ERROR_TOKEN)


@triton.jit(do_not_specialize=["rows", "tokens"])
def rows_kernel(
    body,
    places,
    slots,
    ends,
    first,
    last,
    sampling,
    errors,
    rows,
    tokens,
    null_slot,
    context_length,
    BLOCK: tl.constexpr,
):
    """Prepares the plan's rows, then padding; one program. An invalid row becomes one token of the null slot."""
    at, count = column(places, _ROWS, _WORDS)
    if count > rows:
        tl.atomic_or(errors, _RANGE)
    before = 0
    for begin in range(0, rows, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        inside, planned = i < rows, (i < rows) & (i < count)
        record = body + at + i * _WORDS
        slot = tl.load(record, mask=planned, other=0)
        start = tl.load(record + 1, mask=planned, other=0)
        length = tl.load(record + 2, mask=planned, other=0)
        flags = tl.load(record + 3, mask=planned, other=0)
        fine = (slot >= 0) & (slot < null_slot) & (start >= 0) & (length >= 1) & (length <= context_length)
        fine = planned & fine & (start <= context_length - length)
        slot = tl.where(fine, slot, null_slot)
        start = tl.where(fine, start, 0)
        length = tl.where(inside, tl.where(fine, length, 1), 0)
        behind = before + tl.cumsum(length, 0)
        cut = tl.minimum(behind, tokens)
        token = tl.minimum(behind - length, tokens)
        bad = planned & ((fine == 0) | (cut < behind))
        if tl.sum(bad.to(tl.int32), 0) > 0:
            tl.atomic_or(errors, _RANGE)
        tl.store(slots + i, slot, mask=inside)
        tl.store(ends + i, start + cut - token, mask=inside)
        tl.store(first + i, token, mask=inside)
        tl.store(last + i, tl.maximum(cut - 1, 0).to(tl.int64), mask=inside)
        samples = fine & ((flags & _SAMPLE) > 0)
        tl.store(sampling + i, tl.where(samples, slot, null_slot), mask=inside)
        before += tl.sum(length, 0)
    tl.store(first + rows, tl.minimum(before, tokens))


@triton.jit(do_not_specialize=["rows", "tokens", "steps", "null_page"])
def tokens_kernel(
    slots,
    ends,
    first,
    token_pool,
    page_table,
    hot_rows,
    input_tokens,
    positions,
    writes,
    errors,
    rows,
    tokens,
    steps,
    pool_stride,
    pages,
    hot_pages,
    vocabulary,
    page_stride,
    null_page,
    null_slot,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPARSE: tl.constexpr,
):
    """Prepares a block of tokens, or checks a row's pages; grid: blocks + rows.

    `steps`: the number of steps of a binary search among rows.
    """
    blocks = tl.cdiv(tokens, BLOCK)
    if tl.program_id(0) < blocks:
        t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = t < tokens
        low = tl.zeros([BLOCK], tl.int32)
        high = tl.zeros([BLOCK], tl.int32) + (rows - 1)
        for _ in range(steps):
            middle = (low + high + 1) // 2
            there = tl.load(first + middle, mask=low < high, other=0) <= t
            low = tl.where((low < high) & there, middle, low)
            high = tl.where((low < high) & (there == 0), middle - 1, high)
        behind = tl.load(first + low + 1)
        somebody = t < behind
        slot = tl.where(somebody, tl.load(slots + low), null_slot).to(tl.int64)
        position = tl.where(somebody, tl.load(ends + low) - behind + t, 0)
        token = tl.load(token_pool + slot * pool_stride + position)
        known = (token >= 0) & (token < vocabulary)
        page = tl.load(page_table + slot * pages + position // PAGE)
        missing = page < 0
        if tl.sum((inside & (known == 0)).to(tl.int32), 0) > 0:
            tl.atomic_or(errors, _TOKEN)
        if tl.sum((inside & missing).to(tl.int32), 0) > 0:
            tl.atomic_or(errors, _WRITE)
        entry = tl.where(missing, null_page, page).to(tl.int64) * page_stride + position % PAGE
        tl.store(input_tokens + t, tl.where(known, token, 0), mask=inside)
        tl.store(positions + t, position.to(tl.int64), mask=inside)
        tl.store(writes + t, entry, mask=inside)
    else:
        row = tl.program_id(0) - blocks
        own = tl.load(slots + row).to(tl.int64)
        used = tl.cdiv(tl.load(ends + row), PAGE)
        if SPARSE:
            # Positions of a sparse slot may have no hot page: they are read from hot rows.
            if tl.load(hot_rows + own * hot_pages) >= 0:
                used = 0
        for begin in range(0, used, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            if tl.min(tl.load(page_table + own * pages + i, mask=i < used, other=0), 0) < 0:
                tl.atomic_or(errors, _READ)


def prepare(
    received: Received, tables: Tables, buffers: StepBuffers, errors: torch.Tensor, hot_rows: torch.Tensor | None
) -> None:
    """See `interface.Plans`."""
    rows, tokens = len(buffers.slots), len(buffers.tokens)
    pool_stride, pages = tables.token_pool.shape[1], tables.page_table.shape[1]
    launch(
        rows_kernel,
        (1,),
        *(received.body, received.places, buffers.slots, buffers.ends, buffers.first, buffers.last, buffers.sampling),
        *(errors, rows, tokens, tables.null_slot, pool_stride - 1),
        BLOCK=256,
        num_warps=4,
    )
    block = 128
    launch(
        tokens_kernel,
        (cdiv(tokens, block) + rows,),
        *(buffers.slots, buffers.ends, buffers.first, tables.token_pool, tables.page_table),
        *(tables.page_table if hot_rows is None else hot_rows, buffers.tokens, buffers.positions, buffers.writes),
        *(errors, rows, tokens, rows.bit_length(), pool_stride, pages, 0 if hot_rows is None else hot_rows.shape[1]),
        *(tables.vocabulary, tables.page_stride, tables.page_count, tables.null_slot),
        PAGE=tables.page_size,
        BLOCK=block,
        SPARSE=hot_rows is not None,
        num_warps=4,
    )
