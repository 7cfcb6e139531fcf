"""Copies of words between pinned host memory and device memory, by a kernel that accesses both directly.

A copy engine first waits for earlier kernels, and then takes time to start. A kernel that reads or writes over the bus
costs just one more kernel. These copies have not run on a GPU yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.kernels.launch import cdiv, launch

_BLOCK = 512


@triton.jit(do_not_specialize=["count"])
def words_kernel(source, target, count, BLOCK: tl.constexpr):
    """Copies a block of words; grid: blocks."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, mask=i < count), mask=i < count)


def move_words(source: torch.Tensor, target: torch.Tensor) -> None:
    """See `interface.Plans`."""
    count = source.numel()
    launch(words_kernel, (cdiv(count, _BLOCK),), *(source, target, count), BLOCK=_BLOCK, num_warps=4)
