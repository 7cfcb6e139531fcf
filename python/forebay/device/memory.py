"""Memory for random access, in huge pages if the system has them.

Many systems use huge pages only on request. With small pages, a step also waits for page-table walks, and the hardware
prefetcher stops every 4 KiB.
"""

from __future__ import annotations

import contextlib
import mmap

import torch


def fresh(size: int) -> torch.Tensor:
    """Allocates zeros, uint8 `[size]`. Physical memory is only allocated when it is written."""
    # torch.zeros writes zeros: that takes seconds for gigabytes, and allocates all of the memory at the start.
    mapped = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)[:size]
