"""The lookup of chosen positions in hot pages and in hot rows. Positions found in neither get a hot row.

Each query has one program. Only this program writes the state of its slot, since a sparse slot has one query per step.
Shapes are fixed, and only the error word is written with atomics, so the result depends only on the state. The least
recently used rows are evicted. Ages are exact up to 30 steps, and rows of equal age are evicted in the order of their
row indices. The result is defined by `attention.hot_rows.find`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.hot import Found, HotRows, SparsePages
from forebay.gpu.kernels.apply import column
from forebay.gpu.kernels.launch import launch, power_of_2
from forebay.gpu.tables import ERROR_READ, Received, column_id
from forebay.protocol.constants import PAGE_WRITE_WORDS, SLOT_WORDS, SlotRecord

_AGES = tl.constexpr(32)
_BLOCK = 512
_PROGRAMS = 64
_READ = tl.constexpr(ERROR_READ)
_TRIPLE = tl.constexpr(PAGE_WRITE_WORDS)
_WORDS = tl.constexpr(SLOT_WORDS)
_SLOT = tl.constexpr(int(SlotRecord.SLOT))
_SLOTS = tl.constexpr(column_id("slots"))
_HOT_ROWS = tl.constexpr(column_id("hot_rows"))


@triton.jit
def clear_kernel(body, places, table, slots, width, WIDTH_BLOCK: tl.constexpr):
    """Removes all pages of new slots from a table. A grid of any size can process all of them."""
    at, count = column(places, _SLOTS, _WORDS)
    for number in range(tl.program_id(0), count, tl.num_programs(0)):
        slot = tl.load(body + at + number * _WORDS + _SLOT).to(tl.int64)
        if (slot >= 0) & (slot < slots):
            for begin in range(0, width, WIDTH_BLOCK):
                i = begin + tl.arange(0, WIDTH_BLOCK)
                tl.store(table + slot * width + i, tl.zeros([WIDTH_BLOCK], tl.int32) - 1, mask=i < width)


@triton.jit
def open_kernel(body, places, owner, stamp, clock, slots, pages, line, PAGE: tl.constexpr, PAGE_BLOCK: tl.constexpr):
    """Empties the rows of the pages that a plan assigns to slots. A grid of any size can process all pages."""
    at, count = column(places, _HOT_ROWS, _TRIPLE)
    i = tl.arange(0, PAGE_BLOCK)
    for number in range(tl.program_id(0), count, tl.num_programs(0)):
        record = body + at + number * _TRIPLE
        slot, index = tl.load(record).to(tl.int64), tl.load(record + 1)
        if (slot >= 0) & (slot < slots) & (index >= 0) & (index < pages):
            row = slot * line + index * PAGE + i
            tl.store(owner + row, tl.zeros([PAGE_BLOCK], tl.int32) - 1, mask=i < PAGE)
            tl.store(stamp + row, tl.zeros([PAGE_BLOCK], tl.int32), mask=i < PAGE)
            tl.store(clock + slot, 0)


@triton.jit(do_not_specialize=["null_page"])
def resolve_kernel(
    chosen,
    query_slots,
    page_table,
    host_table,
    hot_rows,
    row_of,
    owner,
    stamp,
    clock,
    rows,
    source,
    target,
    missing,
    counts,
    scratch,
    errors,
    pages,
    hot_pages,
    row_of_stride,
    hot_stride,
    hot_count,
    page_stride,
    null_page,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Finds the entries of one query's positions; grid: queries."""
    query = tl.program_id(0).to(tl.int64)
    slot = tl.load(query_slots + query).to(tl.int64)
    step = tl.load(clock + slot)
    i = tl.arange(0, TOP_K_BLOCK)
    inside = i < TOP_K
    position = tl.load(chosen + query * TOP_K + i, mask=inside, other=-1)
    wanted = position >= 0
    position = tl.where(wanted, position, 0)
    page = tl.load(page_table + slot * pages + position // PAGE, mask=wanted, other=-1).to(tl.int64)
    resident = wanted & (page >= 0)
    row = tl.where(resident, page * page_stride + position % PAGE, -1)
    cold = wanted & (page < 0)
    # This has the shape of the positions, because the interpreter can't combine the mask with a scalar comparison.
    sparse = tl.zeros_like(position) + tl.load(hot_rows + slot * hot_pages) >= 0

    # A position's entry in `row_of` is valid only if the row's owner is the position.
    own = cold & sparse
    hot = tl.load(row_of + slot * row_of_stride + position, mask=own, other=-1).to(tl.int32)
    known = own & (hot >= 0) & (hot < hot_count)
    hit = known & (tl.load(owner + slot * hot_stride + hot, mask=known, other=-1) == position)
    hot = tl.where(hit, hot, 0)
    tl.store(stamp + slot * hot_stride + hot, tl.zeros([TOP_K_BLOCK], tl.int32) + step, mask=hit)
    hot_page = tl.load(hot_rows + slot * hot_pages + hot // PAGE, mask=hit, other=0).to(tl.int64)
    row = tl.where(hit, hot_page * page_stride + hot % PAGE, row)
    miss = own & (hit == 0)
    rank = tl.cumsum(miss.to(tl.int32), 0) - 1
    count = tl.sum(miss.to(tl.int32), 0)
    tl.store(scratch + query * TOP_K + rank, position, mask=miss)
    # It is an error if a position of a slot that is not sparse has no page.
    lost = cold & (sparse == 0)
    row = tl.where(lost, null_page * page_stride, row)
    if tl.sum(lost.to(tl.int32), 0) > 0:
        tl.atomic_or(errors, _READ)
    tl.store(missing + query, count)
    tl.store(counts + query * 3, tl.sum((resident & sparse).to(tl.int32), 0))
    tl.store(counts + query * 3 + 1, tl.sum(hit.to(tl.int32), 0))
    tl.store(counts + query * 3 + 2, count)
    tl.debug_barrier()

    if count > 0:
        ages = tl.zeros([_AGES], tl.int32)
        for begin in range(0, hot_count, BLOCK):
            j = begin + tl.arange(0, BLOCK)
            used = tl.load(stamp + slot * hot_stride + j, mask=j < hot_count, other=0)
            age = tl.minimum(step - used, _AGES - 1)
            ages += tl.histogram(age, _AGES, mask=j < hot_count)
        # The smallest age of evicted rows, and the number of rows that are older.
        of_age = tl.arange(0, _AGES)
        at_least = tl.sum(ages, 0) - tl.cumsum(ages, 0) + ages
        youngest = tl.max(tl.where(at_least >= count, of_age, 0), 0)
        older = tl.sum(tl.where(of_age > youngest, ages, 0), 0)
        before_older, before_equal = tl.cast(0, tl.int32), tl.cast(0, tl.int32)
        for begin in range(0, hot_count, BLOCK):
            j = begin + tl.arange(0, BLOCK)
            there = j < hot_count
            used = tl.load(stamp + slot * hot_stride + j, mask=there, other=0)
            age = tl.minimum(step - used, _AGES - 1)
            is_older, is_equal = there & (age > youngest), there & (age == youngest)
            of_older = before_older + tl.cumsum(is_older.to(tl.int32), 0) - 1
            of_equal = older + before_equal + tl.cumsum(is_equal.to(tl.int32), 0) - 1
            turn = tl.where(is_older, of_older, of_equal)
            take = (is_older | is_equal) & (turn < count)
            turn = tl.where(take, turn, 0)
            new = tl.load(scratch + query * TOP_K + turn, mask=take, other=0)
            tl.store(owner + slot * hot_stride + j, new, mask=take)
            tl.store(stamp + slot * hot_stride + j, tl.zeros([BLOCK], tl.int32) + step, mask=take)
            tl.store(row_of + slot * row_of_stride + new, j.to(tl.int16), mask=take)
            host = tl.load(host_table + slot * pages + new // PAGE, mask=take, other=0).to(tl.int64)
            if tl.min(host, 0) < 0:
                tl.atomic_or(errors, _READ)
            host = tl.maximum(host, 0)
            to = tl.load(hot_rows + slot * hot_pages + j // PAGE, mask=take, other=0).to(tl.int64)
            tl.store(source + query * TOP_K + turn, host * PAGE + new % PAGE, mask=take)
            tl.store(target + query * TOP_K + turn, to * page_stride + j % PAGE, mask=take)
            before_older += tl.sum(is_older.to(tl.int32), 0)
            before_equal += tl.sum(is_equal.to(tl.int32), 0)
        tl.debug_barrier()
        row = tl.where(miss, tl.load(target + query * TOP_K + rank, mask=miss, other=-1), row)
    tl.store(rows + query * TOP_K + i, row.to(tl.int32), mask=inside)


def clear_slots(received: Received, table: torch.Tensor, slots: int) -> None:
    """See `interface.Sparse`."""
    width = table.shape[1]
    launch(
        clear_kernel,
        (_PROGRAMS,),
        *(received.body, received.places, table, slots, width),
        WIDTH_BLOCK=min(_BLOCK, power_of_2(width)),
        num_warps=4,
    )


def open_hot_rows(received: Received, pages: SparsePages, group: HotRows, slots: int) -> None:
    """See `interface.Sparse`."""
    launch(
        open_kernel,
        (_PROGRAMS,),
        *(received.body, received.places, group.owner, group.stamp, pages.clock),
        *(slots, pages.hot_rows.shape[1], group.owner.stride(0)),
        PAGE=pages.page_size,
        PAGE_BLOCK=power_of_2(pages.page_size),
        num_warps=1,
    )


def resolve(
    chosen: torch.Tensor, query_slots: torch.Tensor, pages: SparsePages, group: HotRows, errors: torch.Tensor
) -> Found:
    """See `interface.Sparse`."""
    queries, top_k = chosen.shape
    found = Found(
        rows=torch.empty_like(chosen),
        source=torch.empty(queries, top_k, dtype=torch.int64, device=chosen.device),
        target=torch.empty(queries, top_k, dtype=torch.int64, device=chosen.device),
        missing=torch.empty(queries, dtype=torch.int32, device=chosen.device),
        counts=torch.empty(queries, 3, dtype=torch.int32, device=chosen.device),
    )
    launch(
        resolve_kernel,
        (queries,),
        *(chosen, query_slots, pages.page_table, pages.host_table, pages.hot_rows),
        *(group.row_of, group.owner, group.stamp, pages.clock),
        *(found.rows, found.source, found.target, found.missing, found.counts, torch.empty_like(chosen), errors),
        *(pages.page_table.shape[1], pages.hot_rows.shape[1], group.row_of.stride(0), group.owner.stride(0)),
        *(group.count, pages.page_stride, pages.null_page),
        TOP_K=top_k,
        TOP_K_BLOCK=power_of_2(top_k),
        PAGE=pages.page_size,
        BLOCK=min(_BLOCK, power_of_2(group.count)),
        num_warps=8,
    )
    return found
