"""Words between the host's pinned memory and the device's, which the device reads and writes in place.

A copy by a copy engine waits for the kernels before it and for its own start. A kernel that reads or writes over the
bus is one more kernel of the step. No GPU has run it.
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
