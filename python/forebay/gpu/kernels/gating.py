"""The gate of a feed-forward part (Shazeer 2020)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.kernels.launch import cdiv, dependents, launch

_BLOCK = 1024


@triton.jit
def silu(x):
    """x * sigmoid(x), in float32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gate_kernel(gate_up, out, stride, INNER: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """A block of one token's elements; the grid is tokens, blocks."""
    dependents(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < INNER
    at = gate_up + token * stride + i
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + INNER, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * INNER + i, silu(gate) * up, mask=inside)


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """See `interface.Layers`."""
    tokens, inner = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, inner)
    grid = tokens, cdiv(inner, _BLOCK)
    launch(
        gate_kernel, grid, gate_up, out, gate_up.stride(0), INNER=inner, BLOCK=_BLOCK, overlap=tokens == 1, num_warps=4
    )
    return out
