"""Memory that steps read all over, in large pages where the system has them.

Many systems give large pages only to who asks for them. With small ones a step waits for the page tables as well, and
what is fetched ahead stops at every 4 KiB.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterable

import torch

_ALIGNMENT = 64


def fresh(size: int) -> torch.Tensor:
    """Zeros, uint8 `[size]`, which take memory only where somebody writes."""
    # torch.zeros writes its zeros: seconds for gigabytes, and all of it resident from the start.
    mapped = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)[:size]


def _room(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class HugePages:
    """Room for tensors whose sizes are known before: each alone could be smaller than a large page."""

    def __init__(self, sizes: Iterable[int]) -> None:
        """`sizes` in bytes."""
        self._bytes = fresh(sum(map(_room, sizes)))
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The next one, zeros; the memory lives as long as any of them. ValueError: it has no room for that."""
        size = math.prod(shape) * dtype.itemsize
        found = self._bytes[self._used : self._used + size]
        if len(found) < size:
            raise ValueError(f"no room for {size} bytes: {len(found)} are left")
        self._used += _room(size)
        return found.view(dtype).view(shape)
