"""8-bit floats (e4m3) in pools of bytes, in PyTorch's operators."""

from __future__ import annotations

import torch

LARGEST = 448.0


def kept(x: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    """Converts x to a pool's element type: bytes are 8-bit floats, clamped to 448. NaN stays NaN."""
    if pool.dtype == torch.uint8:
        return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    return x.to(pool.dtype)


def numbers(elements: torch.Tensor) -> torch.Tensor:
    """Converts a pool's elements to float32."""
    return (elements.view(torch.float8_e4m3fn) if elements.dtype == torch.uint8 else elements).float()
