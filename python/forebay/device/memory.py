"""Memory that steps read all over, in large pages if the system has them.

Many systems give large pages only on request. With small pages a step waits for page tables too, and prefetches stop at
every 4 KiB.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterable

import torch

_ALIGNMENT = 64


def fresh(size: int) -> torch.Tensor:
    """Zeros, uint8 `[size]`, which take memory only where they are written."""
    # torch.zeros writes its zeros: seconds for gigabytes, and all of it resident from the start.
    mapped = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)[:size]


def _room(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class HugePages:
    """Room for tensors whose sizes are known in advance. A single tensor could be smaller than a large page."""

    def __init__(self, sizes: Iterable[int]) -> None:
        """`sizes` in bytes."""
        self._bytes = fresh(sum(map(_room, sizes)))
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The next tensor, of zeros. The memory lives as long as any of them. ValueError: there is no room for it."""
        size = math.prod(shape) * dtype.itemsize
        found = self._bytes[self._used : self._used + size]
        if len(found) < size:
            raise ValueError(f"no room for {size} bytes: {len(found)} are left")
        self._used += _room(size)
        return found.view(dtype).view(shape)
