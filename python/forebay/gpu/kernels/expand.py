"""Dequantises a matrix, for products with many rows, whose speed the tensor cores limit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.interface import Codes
from forebay.gpu.kernels.eight_bits import of_eight_bits
from forebay.gpu.kernels.launch import cdiv, launch

_ROWS = 8
_BYTES = 512
"""The number of rows, and the number of bytes of codes per row, that a program converts."""


@triton.jit
def expand_kernel(
    codes,
    scale,
    zeros,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Dequantises BLOCK_N rows by BLOCK_K bytes; grid: blocks of rows, blocks of bytes."""
    row = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    byte_at = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    WIDTH: tl.constexpr = K // 2 if FOLD else K
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    mask = (row < N)[:, None] & (byte_at < WIDTH)[None, :]
    byte = tl.load(codes + row[:, None] * WIDTH + byte_at[None, :], mask=mask, other=0)
    scale_at = scale + (row // BLOCK_ROWS * GROUPS)[:, None]
    if FOLD:
        HALF: tl.constexpr = FOLD // 2
        low_at = byte_at // HALF * FOLD + byte_at % HALF
        group = (low_at // GROUP)[None, :]
        zero = tl.load(zeros + row[:, None] * GROUPS + group, mask=mask, other=0).to(tl.int32)
        factor = tl.load(scale_at + group, mask=mask, other=0.0)
        code = byte.to(tl.int32)
        at = out + row[:, None] * K + low_at[None, :]
        tl.store(at, ((code & 15) - zero).to(tl.float32) * factor, mask=mask)
        tl.store(at + HALF, ((code >> 4) - zero).to(tl.float32) * factor, mask=mask)
    else:
        factor = tl.load(scale_at + (byte_at // GROUP)[None, :], mask=mask, other=0.0)
        tl.store(out + row[:, None] * K + byte_at[None, :], of_eight_bits(byte) * factor, mask=mask)


def expand(matrix: Codes, dtype: torch.dtype) -> torch.Tensor:
    """See `interface.Quantised`."""
    rows, width = matrix.codes.shape
    out = torch.empty(rows, matrix.inputs, dtype=dtype, device=matrix.codes.device)
    launch(
        expand_kernel,
        (cdiv(rows, _ROWS), cdiv(width, _BYTES)),
        *(matrix.codes, matrix.scale, matrix.codes if matrix.zeros is None else matrix.zeros, out),
        N=rows,
        K=matrix.inputs,
        GROUP=matrix.group,
        BLOCK_ROWS=matrix.block_rows,
        FOLD=matrix.fold,
        BLOCK_N=_ROWS,
        BLOCK_K=_BYTES,
        num_warps=4,
    )
    return out
