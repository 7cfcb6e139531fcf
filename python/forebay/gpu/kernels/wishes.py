"""The sampling parameters of rows, which the device reads by slot, and the storage of sampled tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.kernels.launch import cdiv, launch
from forebay.gpu.sampling import Wishes
from forebay.gpu.tables import StepBuffers, Tables
from forebay.protocol.constants import SLOT_FLOATS_WORDS, SLOT_WORDS, SlotFloats, SlotRecord

_WORDS = tl.constexpr(SLOT_WORDS)
_FLOATS = tl.constexpr(SLOT_FLOATS_WORDS)
_TOP_K = tl.constexpr(int(SlotRecord.TOP_K))
_SEED_LOW = tl.constexpr(int(SlotRecord.SEED_LO))
_SEED_HIGH = tl.constexpr(int(SlotRecord.SEED_HI))
_TEMPERATURE = tl.constexpr(int(SlotFloats.TEMPERATURE))
_TOP_P = tl.constexpr(int(SlotFloats.TOP_P))
_MIN_P = tl.constexpr(int(SlotFloats.MIN_P))
_BLOCK = 128


@triton.jit
def splitmix64(x):
    """The finaliser of SplitMix64 (Steele et al. 2014) of uint64, modulo 2^64; the same as `compute.uniform`."""
    z = x + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit(do_not_specialize=["rows"])
def ask_kernel(words, floats, slots, positions, temperature, top_k, top_p, min_p, bits, rows, BLOCK: tl.constexpr):
    """Loads the sampling parameters of a block of rows; grid: blocks."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    slot = tl.load(slots + row, mask=inside, other=0).to(tl.int64)
    record, numbers = words + slot * _WORDS, floats + slot * _FLOATS
    tl.store(temperature + row, tl.load(numbers + _TEMPERATURE, mask=inside), mask=inside)
    tl.store(top_p + row, tl.load(numbers + _TOP_P, mask=inside), mask=inside)
    tl.store(min_p + row, tl.load(numbers + _MIN_P, mask=inside), mask=inside)
    tl.store(top_k + row, tl.load(record + _TOP_K, mask=inside), mask=inside)
    low = tl.load(record + _SEED_LOW, mask=inside, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(record + _SEED_HIGH, mask=inside, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    position = tl.load(positions + row, mask=inside, other=0).to(tl.uint64)
    drawn = splitmix64((low | (high << 32)) + position * 0x9E3779B97F4A7C15)
    tl.store(bits + row, drawn.to(tl.int64, bitcast=True), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def keep_kernel(tokens, finite, sampling, ends, token_pool, errors, block, rows, stride, BLOCK: tl.constexpr):
    """Stores the tokens of a block of rows in their slots, for the next step; grid: blocks."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    fine = tl.load(finite + row, mask=inside, other=0).to(tl.int32) > 0
    token = tl.where(fine, tl.load(tokens + row, mask=inside, other=0), 0).to(tl.int32)
    slot = tl.load(sampling + row, mask=inside, other=0).to(tl.int64)
    tl.store(token_pool + slot * stride + tl.load(ends + row, mask=inside, other=0), token, mask=inside)
    tl.store(block + 1 + row, token, mask=inside)
    tl.store(block + 1 + rows + row, fine.to(tl.int32), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(block, tl.load(errors))
        tl.store(errors, 0)


def ask(tables: Tables, buffers: StepBuffers) -> Wishes:
    """See `interface.Sampling`."""
    rows = len(buffers.sampling)
    wishes = Wishes.make(rows, buffers.sampling.device)
    launch(
        ask_kernel,
        (cdiv(rows, _BLOCK),),
        *(tables.words, tables.floats, buffers.sampling, buffers.ends),
        *(wishes.temperature, wishes.top_k, wishes.top_p, wishes.min_p, wishes.bits, rows),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return wishes


def keep(
    tokens: torch.Tensor,
    finite: torch.Tensor,
    tables: Tables,
    buffers: StepBuffers,
    errors: torch.Tensor,
    block: torch.Tensor,
) -> torch.Tensor:
    """See `interface.Sampling`."""
    rows = len(tokens)
    launch(
        keep_kernel,
        (cdiv(rows, _BLOCK),),
        *(tokens, finite, buffers.sampling, buffers.ends, tables.token_pool, errors, block),
        *(rows, tables.token_pool.shape[1]),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return block[1 : 1 + rows]
