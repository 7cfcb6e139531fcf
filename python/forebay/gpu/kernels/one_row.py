"""Products of one row with a matrix. Their time is that of the matrix's bytes.

Products are summed element by element in float32, without the units for products of tiles. A program computes some
outputs alone, so the order of a sum does not depend on the GPU. It begins to read its part of the matrix before the
kernel ends that makes the row (`launch.dependents`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.interface import Codes
from forebay.gpu.kernels.eight_bits import of_eight_bits
from forebay.gpu.kernels.launch import cdiv, dependents, launch, power_of_2

_OUTPUTS = 4
"""Outputs of a program. With more of them, a matrix of few rows does not fill an H100."""
_INPUTS = 1024
"""Inputs of a step."""
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
    """BLOCK_N outputs; grid: blocks of outputs."""
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
def one_row_of_codes_kernel(
    x,
    codes,
    scale,
    zeros,
    bias,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """As `one_row_kernel`; BLOCK_K: bytes of codes in a step."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    there = n < N
    row = n.to(tl.int64)
    WIDTH: tl.constexpr = K // 2 if FOLD else K
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    code_at = codes + row[:, None] * WIDTH + k[None, :]
    scale_at = scale + (row // BLOCK_ROWS * GROUPS)[:, None]
    dependents(OVERLAP)
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for begin in tl.range(0, WIDTH, BLOCK_K, num_stages=STAGES):
        byte_at = begin + k
        more = byte_at < WIDTH
        mask = there[:, None] & more[None, :]
        byte = tl.load(code_at + begin, mask=mask, other=0)
        if FOLD:
            HALF: tl.constexpr = FOLD // 2
            low_at = byte_at // HALF * FOLD + byte_at % HALF
            group = (low_at // GROUP)[None, :]
            zero = tl.load(zeros + row[:, None] * GROUPS + group, mask=mask, other=0).to(tl.int32)
            code = byte.to(tl.int32)
            low = ((code & 15) - zero).to(tl.float32)
            high = ((code >> 4) - zero).to(tl.float32)
            a = tl.load(x + low_at, mask=more, other=0.0).to(tl.float32)
            b = tl.load(x + low_at + HALF, mask=more, other=0.0).to(tl.float32)
            part = low * a[None, :] + high * b[None, :]
        else:
            group = (byte_at // GROUP)[None, :]
            part = of_eight_bits(byte) * tl.load(x + byte_at, mask=more, other=0.0).to(tl.float32)[None, :]
        sums += part * tl.load(scale_at + group, mask=mask, other=0.0)
    total = tl.sum(sums, 1)
    if BIAS:
        total += tl.load(bias + n, mask=there, other=0.0).to(tl.float32)
    tl.store(out + n, total, mask=there)


def one_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `interface.OneRow`."""
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


def one_row_of_codes(x: torch.Tensor, matrix: Codes, bias: torch.Tensor | None) -> torch.Tensor:
    """See `interface.OneRow`."""
    outputs = len(matrix.codes)
    out = x.new_empty(1, outputs)
    launch(
        one_row_of_codes_kernel,
        (cdiv(outputs, _OUTPUTS),),
        *(x, matrix.codes, matrix.scale, matrix.codes if matrix.zeros is None else matrix.zeros),
        *(out if bias is None else bias, out),
        N=outputs,
        K=matrix.inputs,
        GROUP=matrix.group,
        BLOCK_ROWS=matrix.block_rows,
        FOLD=matrix.fold,
        BLOCK_N=_OUTPUTS,
        # A byte of 4-bit codes is two inputs.
        BLOCK_K=min(_INPUTS // 2 if matrix.fold else _INPUTS, power_of_2(matrix.codes.shape[1])),
        BIAS=bias is not None,
        STAGES=_STAGES,
        overlap=True,
        num_warps=4,
    )
    return out
