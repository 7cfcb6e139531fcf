"""Copies of words between pinned host memory and device memory, which a kernel reads and writes directly.

A copy engine first waits for the earlier kernels, and then needs time to start. A kernel that reads or writes over the
bus costs just one more kernel. No GPU has run it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.kernels.launch import cdiv, launch

_BLOCK = 512


@triton.jit(do_not_specialize=["count"])
def words_kernel(source, target, count, BLOCK: tl.constexpr):
    """A block of words; the grid is blocks."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, mask=i < count), mask=i < count)


def move_words(source: torch.Tensor, target: torch.Tensor) -> None:
    """See `interface.Plans`."""
    count = source.numel()
    launch(words_kernel, (cdiv(count, _BLOCK),), *(source, target, count), BLOCK=_BLOCK, num_warps=4)
