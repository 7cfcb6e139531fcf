"""Memory that steps read all over, in large pages if the system has them.

Many systems give large pages only on request. With small pages a step waits for page tables too, and prefetches stop at
every 4 KiB.
"""

from __future__ import annotations

import contextlib
import mmap

import torch


def fresh(size: int) -> torch.Tensor:
    """Zeros, uint8 `[size]`, which take memory only where they are written."""
    # torch.zeros writes its zeros: seconds for gigabytes, and all of it resident from the start.
    mapped = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)[:size]
