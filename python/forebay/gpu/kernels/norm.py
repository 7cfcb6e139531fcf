"""Adds a residual and normalises the sum, in one pass over a token's state instead of two."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.kernels.launch import dependents, launch, power_of_2


@triton.jit
def norm_kernel(
    x,
    residual,
    weight,
    out,
    x_stride,
    residual_stride,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes one token; grid: tokens."""
    dependents(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < HIDDEN
    state = tl.load(x + token * x_stride + i, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        residual_at = residual + token * residual_stride + i
        state += tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
        # Round before the norm, because the next layer reads the rounded sum.
        state = state.to(residual.dtype.element_ty).to(tl.float32)
        tl.store(residual_at, state, mask=inside)
    normal = state * tl.rsqrt(tl.sum(state * state, 0) / HIDDEN + eps)
    scaled = normal * tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + i, scaled, mask=inside)


def add_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `interface.Layers`."""
    tokens, hidden = x.shape
    summed = x if residual is None else residual
    out = x.new_empty(tokens, hidden)
    block = power_of_2(hidden)
    launch(
        norm_kernel,
        (tokens,),
        *(x, summed, weight, out, x.stride(0), summed.stride(0), eps),
        HIDDEN=hidden,
        BLOCK=block,
        ADD=residual is not None,
        overlap=tokens == 1,
        num_warps=max(1, min(16, block // 512)),
    )
    return out, summed
