"""The product of few rows with a matrix in 16 bits. Its time is that of the matrix's bytes.

A program computes some outputs of all rows. Nothing is summed across programs, so a sum's order does not depend on the
GPU. One row is multiplied element by element; several go through the units for products, 16 at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.kernels.launch import cdiv, dependents, dot_type, launch

MOST_ROWS = 16


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
    """BLOCK_N outputs of one row; grid: blocks of outputs."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row = weight + n.to(tl.int64)[:, None] * weight_stride + k[None, :]
    inside = (n < N)[:, None]
    # What no earlier kernel has written is read before these end.
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
def few_rows_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    x_stride,
    weight_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
    DOT: tl.constexpr,
):
    """BLOCK_N outputs of up to M rows; grid: blocks of outputs."""
    m = tl.arange(0, M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    matrix = weight + n.to(tl.int64)[:, None] * weight_stride + k[None, :]
    states = x + m[:, None] * x_stride + k[None, :]
    dependents(OVERLAP)
    sums = tl.zeros([BLOCK_N, M], tl.float32)
    for at in range(0, K, BLOCK_K):
        more = (k < K - at)[None, :]
        part = tl.load(matrix + at, mask=(n < N)[:, None] & more, other=0.0).to(DOT)
        state = tl.load(states + at, mask=(m < rows)[:, None] & more, other=0.0).to(DOT)
        sums += tl.dot(part, tl.trans(state), input_precision="ieee")
    if BIAS:
        sums += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    tl.store(out + m[None, :] * N + n[:, None], sums, mask=(n < N)[:, None] & (m < rows)[None, :])


def product_of_few(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    one: tuple[int, int, int, int] = (8, 512, 4, 2),
    few: tuple[int, int, int, int] = (16, 256, 4, 4),
) -> torch.Tensor:
    """`x W^T + b` [n, rows] of at most 16 rows x [n, inputs]. One: outputs, inputs, warps, stages of a program."""
    rows, inputs = x.shape
    outputs = len(weight)
    out = x.new_empty(rows, outputs)
    constants = {"N": outputs, "K": inputs, "BIAS": bias is not None, "overlap": True}
    offset = out if bias is None else bias
    if rows == 1:
        block_n, block_k, warps, stages = one
        launch(
            one_row_kernel,
            (cdiv(outputs, block_n),),
            *(x, weight, offset, out, weight.stride(0)),
            **constants,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            STAGES=stages,
            num_warps=warps,
        )
        return out
    block_n, block_k, warps, stages = few
    launch(
        few_rows_kernel,
        (cdiv(outputs, block_n),),
        *(x, weight, offset, out, rows, x.stride(0), weight.stride(0)),
        **constants,
        M=MOST_ROWS,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        DOT=dot_type(x.dtype),
        num_warps=warps,
        num_stages=stages,
    )
    return out
