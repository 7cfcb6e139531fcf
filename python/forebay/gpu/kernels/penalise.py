"""Penalties of tokens that a row has seen, or has generated: one pass over the logits of the rows that have some."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.kernels.launch import cdiv, launch

_BLOCK = 2048


@triton.jit
def penalise_kernel(
    logits, rows, counts, lines, penalties, stride, vocabulary, line_stride, penalty_stride, BLOCK: tl.constexpr
):
    """A block of one row's logits; the grid is rows, blocks."""
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
    x = tl.where(seen > 0, tl.where(x > 0, x / repetition, x * repetition), x)
    x = x - frequency * generated.to(tl.float32) - presence * (generated > 0).to(tl.float32)
    tl.store(at, x, mask=inside)


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
