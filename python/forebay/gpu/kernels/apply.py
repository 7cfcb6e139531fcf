"""A plan's writes to the tables: new slots, and pages. The device reads the words of the plan itself."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.kernels.launch import launch
from forebay.gpu.tables import ERROR_RANGE, Received, Tables, column_id
from forebay.protocol.constants import PAGE_WRITE_WORDS, SLOT_FLOATS_WORDS, SLOT_WORDS, SlotRecord

_PROGRAMS = 64
"""The number of programs: enough that, in a typical step, each does at most one write.

The grid is the same for all steps, and programs loop.
"""

_SLOTS = tl.constexpr(column_id("slots"))
_FLOATS = tl.constexpr(column_id("slot_floats"))
_TOKENS = tl.constexpr(column_id("tokens"))
_WORDS = tl.constexpr(SLOT_WORDS)
_FLOAT_WORDS = tl.constexpr(SLOT_FLOATS_WORDS)
_TRIPLE = tl.constexpr(PAGE_WRITE_WORDS)
_SLOT = tl.constexpr(int(SlotRecord.SLOT))
_COUNT = tl.constexpr(int(SlotRecord.TOKEN_COUNT))
_ARENA = tl.constexpr(int(SlotRecord.ARENA_OFFSET))
_RANGE = tl.constexpr(ERROR_RANGE)


@triton.jit
def column(places, id_, RECORD: tl.constexpr):
    """Returns the first word of a column, and its number of records."""
    return tl.load(places + 2 * id_), tl.load(places + 2 * id_ + 1) // RECORD


@triton.jit(do_not_specialize=["most"])
def table_kernel(body, places, table, errors, slots, width, least, most, COLUMN: tl.constexpr, BLOCK: tl.constexpr):
    """Writes triples (slot, index, value) of a column to a table. Values outside of `least .. most` become -1."""
    at, count = column(places, COLUMN, _TRIPLE)
    for begin in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        i = begin + tl.arange(0, BLOCK)
        inside = i < count
        record = body + at + i * _TRIPLE
        slot = tl.load(record, mask=inside, other=0)
        index = tl.load(record + 1, mask=inside, other=0)
        value = tl.load(record + 2, mask=inside, other=0)
        cell = inside & (slot >= 0) & (slot < slots) & (index >= 0) & (index < width)
        known = (value >= least) & (value < most)
        # An invalid value is written as -1, because the old page may already belong to another request.
        tl.store(table + slot.to(tl.int64) * width + index, tl.where(known, value, -1), mask=cell)
        if tl.sum((inside & ((cell & known) == 0)).to(tl.int32), 0) > 0:
            tl.atomic_or(errors, _RANGE)


@triton.jit
def slots_kernel(
    body,
    places,
    arena_tokens,
    token_pool,
    words,
    floats,
    errors,
    slots,
    stride,
    BLOCK: tl.constexpr,
    WORDS_BLOCK: tl.constexpr,
    FLOATS_BLOCK: tl.constexpr,
):
    """Writes new slots: their records, parameters and tokens. Tokens come from the plan, or from the arena's copy."""
    at, count = column(places, _SLOTS, _WORDS)
    floats_at, _ = column(places, _FLOATS, _FLOAT_WORDS)
    tokens_at, _ = column(places, _TOKENS, 1)
    for number in range(tl.program_id(0), count, tl.num_programs(0)):
        record = body + at + number * _WORDS
        slot = tl.load(record + _SLOT).to(tl.int64)
        length = tl.load(record + _COUNT)
        if (slot < 0) | (slot >= slots) | (length < 0) | (length > stride):
            tl.atomic_or(errors, _RANGE)
        else:
            # The tokens of all slots are concatenated in the plan, and likewise in the arena's copy.
            in_arena = tl.load(record + _ARENA) >= 0
            before = tl.zeros([BLOCK], tl.int32)
            for begin in range(0, number, BLOCK):
                other = begin + tl.arange(0, BLOCK)
                earlier = other < number
                lengths = tl.load(body + at + other * _WORDS + _COUNT, mask=earlier, other=0)
                offsets = tl.load(body + at + other * _WORDS + _ARENA, mask=earlier, other=0)
                before += tl.where((offsets >= 0) == in_arena, lengths, 0)
            source = tl.where(in_arena, 0, tokens_at) + tl.sum(before, 0)
            for begin in range(0, length, BLOCK):
                i = begin + tl.arange(0, BLOCK)
                inside = i < length
                if in_arena:
                    token = tl.load(arena_tokens + source + i, mask=inside, other=0)
                else:
                    token = tl.load(body + source + i, mask=inside, other=0)
                tl.store(token_pool + slot * stride + i, token, mask=inside)
            w = tl.arange(0, WORDS_BLOCK)
            tl.store(words + slot * _WORDS + w, tl.load(record + w, mask=w < _WORDS, other=0), mask=w < _WORDS)
            f = tl.arange(0, FLOATS_BLOCK)
            there = f < _FLOAT_WORDS
            bits = tl.load(body + floats_at + number * _FLOAT_WORDS + f, mask=there, other=0)
            tl.store(floats + slot * _FLOAT_WORDS + f, bits.to(tl.float32, bitcast=True), mask=there)


def write_table(
    received: Received, name: str, table: torch.Tensor, least: int, most: int, errors: torch.Tensor
) -> None:
    """See `interface.Plans`."""
    launch(
        table_kernel,
        (_PROGRAMS,),
        *(received.body, received.places, table, errors, len(table) - 1, table.shape[1], least, most),
        COLUMN=column_id(name),
        BLOCK=128,
        num_warps=4,
    )


def apply_slots(received: Received, tables: Tables, errors: torch.Tensor) -> None:
    """See `interface.Plans`."""
    launch(
        slots_kernel,
        (_PROGRAMS,),
        *(received.body, received.places, received.arena_tokens, tables.token_pool, tables.words, tables.floats),
        *(errors, tables.null_slot, tables.token_pool.shape[1]),
        BLOCK=1024,
        WORDS_BLOCK=16,
        FLOATS_BLOCK=8,
        num_warps=4,
    )
