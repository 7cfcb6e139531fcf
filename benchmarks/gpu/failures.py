"""Errors of a GPU that its process does not survive."""

from __future__ import annotations

_LASTING = ("illegal memory access", "device-side assert", "misaligned address")


def lost(error: str) -> bool:
    """True for an error after which CUDA computes nothing more in this process."""
    return any(name in error for name in _LASTING)
