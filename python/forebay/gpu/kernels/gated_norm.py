"""The gated norm after a recurrence: each group of a token's outputs is normalised separately."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.kernels.gating import silu
from forebay.gpu.kernels.launch import launch, power_of_2

NORMS = ("none", "before_gate", "after_gate")
"""The positions of the norm. Kernels use the index."""
_ALONE = 1024
"""The number of elements that a program processes together if there is no norm."""


@triton.jit(do_not_specialize=["rows"])
def gated_norm_kernel(
    y,
    gate,
    weight,
    out,
    first,
    rows,
    gate_stride,
    eps,
    VALUES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    SHARED: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    """Normalises and gates a group of a token's outputs; grid: tokens, groups. SHARED: all groups use the same weight.

    Tokens of no row get 0.
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    i = tl.arange(0, BLOCK)
    at = group * SIZE + i
    inside = (i < SIZE) & (at < VALUES)
    if token >= tl.load(first + rows):
        tl.store(out + token * VALUES + at, tl.zeros([BLOCK], tl.float32), mask=inside)
        return
    value = tl.load(y + token * VALUES + at, mask=inside, other=0.0)
    strength = tl.load(gate + token * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    strength = tl.sigmoid(strength) if SIGMOID else silu(strength)
    if NORM != 1:
        value *= strength
    if NORM != 0:
        value *= tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
        value *= tl.load(weight + (i if SHARED else at), mask=inside, other=0.0).to(tl.float32)
    if NORM == 1:
        value *= strength
    tl.store(out + token * VALUES + at, value, mask=inside)


def gated_norm(
    y: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    norm: str,
    size: int,
    sigmoid: bool,
    first: torch.Tensor,
) -> torch.Tensor:
    """See `interface.Recurrences`."""
    tokens, values = y.shape
    group = _ALONE if weight is None else size
    block = power_of_2(min(group, values))
    out = torch.empty(tokens, values, dtype=gate.dtype, device=y.device)
    launch(
        gated_norm_kernel,
        (tokens, -(-values // group)),
        *(y, gate, gate if weight is None else weight, out, first, len(first) - 1, gate.stride(0), eps),
        VALUES=values,
        SIZE=group,
        BLOCK=block,
        NORM=NORMS.index(norm),
        SHARED=weight is not None and len(weight) == size,
        SIGMOID=sigmoid,
        num_warps=max(1, min(8, block // 512)),
    )
    return out
