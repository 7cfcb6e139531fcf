"""Memory that steps read at random, in huge pages if the system has them.

Many systems give huge pages only on request. With small pages, a step also waits for page-table walks, and prefetches
stop every 4 KiB.
"""

from __future__ import annotations

import contextlib
import mmap

import torch


def fresh(size: int) -> torch.Tensor:
    """Zeros, uint8 `[size]`, for which memory is only allocated where they are written."""
    # torch.zeros writes zeros: that takes seconds for gigabytes, and allocates all of the memory at the start.
    mapped = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)[:size]
