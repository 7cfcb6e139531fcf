"""The gate of a feed-forward layer (Shazeer 2020)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.kernels.launch import cdiv, dependents, launch

_BLOCK = 1024
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "swigluoai")
"""The activations of gates. Kernels use the index."""


@triton.jit
def silu(x):
    """x * sigmoid(x), in float32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """The hyperbolic tangent, in float32. It is also correct for large x, for which exp is infinite."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def gated(x, up, ACTIVATION: tl.constexpr):
    """Returns activation(x) * up, in float32. ACTIVATION 0: SiLU, 1: GELU with erf, 2: GELU with tanh.

    3: gate and up are clamped (gpt-oss). NaN stays NaN.
    """
    if ACTIVATION == 0:
        out = silu(x) * up
    elif ACTIVATION == 1:
        out = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476)) * up
    elif ACTIVATION == 2:
        # The constant is twice the square root of 2 / pi. This form loses no precision where tanh would be close to -1.
        out = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x))) * up
    else:
        gate = tl.where(x > 7.0, 7.0, x)
        more = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
        out = gate / (1.0 + tl.exp(-1.702 * gate)) * more
    return out


@triton.jit
def gate_kernel(
    gate_up,
    out,
    stride,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes a block of one token's elements; grid: tokens, blocks."""
    dependents(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < INNER
    at = gate_up + token * stride + i
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + INNER, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * INNER + i, gated(gate, up, ACTIVATION), mask=inside)


def gate(gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """See `interface.Layers`."""
    tokens, inner = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, inner)
    grid = tokens, cdiv(inner, _BLOCK)
    launch(
        gate_kernel,
        grid,
        *(gate_up, out, gate_up.stride(0)),
        INNER=inner,
        BLOCK=_BLOCK,
        ACTIVATION=ACTIVATIONS.index(activation),
        overlap=tokens == 1,
        num_warps=4,
    )
    return out
