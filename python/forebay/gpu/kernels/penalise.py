"""Penalties for tokens that occurred in a row, or were generated: one pass over the logits of rows with penalties.

In a graph, the kernel reads a row's penalties by the row's slot. The host provides the index of the line with the row's
token counts, which are updated after sampling.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.kernels.launch import cdiv, launch
from forebay.gpu.tables import StepBuffers, Tables
from forebay.protocol.constants import SLOT_FLOATS_WORDS, SlotFloats

_BLOCK = 2048
_ROWS = 128
_FLOATS = tl.constexpr(SLOT_FLOATS_WORDS)
_REPETITION = tl.constexpr(int(SlotFloats.REPETITION_PENALTY))
_PRESENCE = tl.constexpr(int(SlotFloats.PRESENCE_PENALTY))
_FREQUENCY = tl.constexpr(int(SlotFloats.FREQUENCY_PENALTY))


@triton.jit
def _penalised(x, seen, generated, repetition, presence, frequency):
    x = tl.where(seen > 0, tl.where(x > 0, x / repetition, x * repetition), x)
    return x - frequency * generated.to(tl.float32) - presence * (generated > 0).to(tl.float32)


@triton.jit
def penalise_kernel(
    logits, rows, counts, lines, penalties, stride, vocabulary, line_stride, penalty_stride, BLOCK: tl.constexpr
):
    """Penalises a block of one row's logits; grid: rows, blocks."""
    number = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < vocabulary
    at = logits + tl.load(rows + number) * stride + i
    line = counts + tl.load(lines + number) * line_stride + i
    repetition = tl.load(penalties + number * penalty_stride)
    presence = tl.load(penalties + number * penalty_stride + 1)
    frequency = tl.load(penalties + number * penalty_stride + 2)
    x = tl.load(at, mask=inside, other=0.0)
    seen = tl.load(line, mask=inside, other=0)
    generated = tl.load(line + vocabulary, mask=inside, other=0)
    tl.store(at, _penalised(x, seen, generated, repetition, presence, frequency), mask=inside)


@triton.jit
def adjust_kernel(logits, lines, counts, slots, floats, out, stride, vocabulary, line_stride, BLOCK: tl.constexpr):
    """Copies a block of one row's logits, with its slot's penalties; grid: rows, blocks."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < vocabulary
    x = tl.load(logits + row * stride + i, mask=inside, other=0.0)
    line = tl.load(lines + row).to(tl.int64)
    if line >= 0:
        numbers = floats + tl.load(slots + row).to(tl.int64) * _FLOATS
        at = counts + line * line_stride + i
        seen = tl.load(at, mask=inside, other=0)
        generated = tl.load(at + vocabulary, mask=inside, other=0)
        repetition = tl.load(numbers + _REPETITION)
        x = _penalised(x, seen, generated, repetition, tl.load(numbers + _PRESENCE), tl.load(numbers + _FREQUENCY))
    tl.store(out + row * vocabulary + i, x, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def count_kernel(tokens, lines, counts, rows, vocabulary, line_stride, BLOCK: tl.constexpr):
    """Counts the tokens of a block of rows; grid: blocks."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    line = tl.load(lines + row, mask=inside, other=-1).to(tl.int64)
    there = line >= 0
    token = tl.load(tokens + row, mask=inside, other=0)
    at = counts + tl.where(there, line, 0) * line_stride + token
    tl.store(at, tl.load(at, mask=there, other=0) + 1, mask=there)
    tl.store(at + vocabulary, tl.load(at + vocabulary, mask=there, other=0) + 1, mask=there)


def penalise(
    logits: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor, lines: torch.Tensor, penalties: torch.Tensor
) -> None:
    """See `interface.Sampling`."""
    vocabulary = logits.shape[1]
    launch(
        penalise_kernel,
        (len(rows), cdiv(vocabulary, _BLOCK)),
        *(logits, rows, counts, lines, penalties, logits.stride(0), vocabulary, counts.stride(0), penalties.stride(0)),
        BLOCK=_BLOCK,
        num_warps=4,
    )


def adjust(
    logits: torch.Tensor, lines: torch.Tensor, counts: torch.Tensor, tables: Tables, buffers: StepBuffers
) -> torch.Tensor:
    """See `interface.Sampling`."""
    rows, vocabulary = logits.shape
    out = torch.empty(rows, vocabulary, dtype=torch.float32, device=logits.device)
    launch(
        adjust_kernel,
        (rows, cdiv(vocabulary, _BLOCK)),
        *(logits, lines, counts, buffers.sampling, tables.floats, out),
        *(logits.stride(0), vocabulary, counts.stride(0)),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out


def count_tokens(tokens: torch.Tensor, lines: torch.Tensor, counts: torch.Tensor) -> None:
    """See `interface.Sampling`."""
    launch(
        count_kernel,
        (cdiv(len(tokens), _ROWS),),
        *(tokens, lines, counts, len(tokens), counts.shape[2], counts.stride(0)),
        BLOCK=_ROWS,
        num_warps=4,
    )
