"""The product of a single row with a matrix. Its speed is limited by reading the matrix.

Products are summed element by element in float32, without tensor cores. One program computes the whole sum of an
output, so its order does not depend on the GPU. The program starts to read its part of the matrix before the kernel
that computes the row has ended (`launch.dependents`).

A gate after the product can be fused: a program then computes outputs of both halves. This saves a launch and a round
trip through memory. The fused kernel has never run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.kernels.gating import ACTIVATIONS, gated
from forebay.gpu.kernels.launch import cdiv, dependents, launch, power_of_2

_OUTPUTS = 4
"""The number of outputs of a program. With more, a matrix with few rows does not fill an H100."""
_INPUTS = 1024
"""The number of inputs that a program reads per loop step."""
_STAGES = 3


@triton.jit
def one_row_kernel(
    x,
    weight,
    bias,
    out,
    weight_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Computes BLOCK_N outputs; grid: blocks of outputs."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = (n < N)[:, None]
    row = weight + n.to(tl.int64)[:, None] * weight_stride + k[None, :]
    first = tl.load(row, mask=inside & (k < K)[None, :], other=0.0)
    dependents(OVERLAP)
    sums = first.to(tl.float32) * tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    for at in tl.range(BLOCK_K, K, BLOCK_K, num_stages=STAGES):
        more = k < K - at
        part = tl.load(row + at, mask=inside & more[None, :], other=0.0).to(tl.float32)
        sums += part * tl.load(x + at + k, mask=more, other=0.0).to(tl.float32)[None, :]
    total = tl.sum(sums, 1)
    if BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + n, total, mask=n < N)


@triton.jit
def gated_row_kernel(
    x,
    weight,
    bias,
    out,
    weight_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Computes BLOCK_N of N gates and their ups, whose weights are N rows further; grid: blocks of gates."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = (n < N)[:, None]
    gates = weight + n.to(tl.int64)[:, None] * weight_stride + k[None, :]
    ups = weight + (n + N).to(tl.int64)[:, None] * weight_stride + k[None, :]
    first = tl.load(gates, mask=inside & (k < K)[None, :], other=0.0)
    second = tl.load(ups, mask=inside & (k < K)[None, :], other=0.0)
    dependents(OVERLAP)
    given = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    of_gates, of_ups = first.to(tl.float32) * given, second.to(tl.float32) * given
    for at in tl.range(BLOCK_K, K, BLOCK_K, num_stages=STAGES):
        more = k < K - at
        given = tl.load(x + at + k, mask=more, other=0.0).to(tl.float32)[None, :]
        of_gates += tl.load(gates + at, mask=inside & more[None, :], other=0.0).to(tl.float32) * given
        of_ups += tl.load(ups + at, mask=inside & more[None, :], other=0.0).to(tl.float32) * given
    gate, up = tl.sum(of_gates, 1), tl.sum(of_ups, 1)
    if BIAS:
        gate += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        up += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)
    # Round like the two separate operators.
    dtype = out.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    tl.store(out + n, gated(gate, up, ACTIVATION), mask=n < N)


def one_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `interface.Layers`."""
    outputs, inputs = weight.shape
    out = x.new_empty(1, outputs)
    launch(
        one_row_kernel,
        (cdiv(outputs, _OUTPUTS),),
        *(x, weight, out if bias is None else bias, out, weight.stride(0)),
        N=outputs,
        K=inputs,
        BLOCK_N=_OUTPUTS,
        BLOCK_K=min(_INPUTS, power_of_2(inputs)),
        BIAS=bias is not None,
        STAGES=_STAGES,
        overlap=True,
        num_warps=4,
    )
    return out


def one_row_gated(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str = "silu"
) -> torch.Tensor:
    """See `interface.Layers`."""
    inner, inputs = len(weight) // 2, weight.shape[1]
    out = x.new_empty(1, inner)
    # Half as many outputs, because each has a gate and an up: a program then reads as much as without a gate.
    outputs = _OUTPUTS // 2
    launch(
        gated_row_kernel,
        (cdiv(inner, outputs),),
        *(x, weight, out if bias is None else bias, out, weight.stride(0)),
        N=inner,
        K=inputs,
        BLOCK_N=outputs,
        BLOCK_K=min(_INPUTS, power_of_2(inputs)),
        BIAS=bias is not None,
        ACTIVATION=ACTIVATIONS.index(activation),
        STAGES=_STAGES,
        overlap=True,
        num_warps=4,
    )
    return out
