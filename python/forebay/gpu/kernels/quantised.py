"""Products with quantised matrices of 8-bit floats and of 4-bit integers, read in their stored format.

Codes are converted to the activations' type when they are loaded, which is exact. Products of inputs that share a scale
are summed first and then multiplied by the scale, in float32. Dense matrices and experts use the same kernel. A tile
consists of some tokens, or of some copies of tokens for one expert (`grouped`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from forebay.gpu.interface import Codes
from forebay.gpu.kernels.eight_bits import LARGEST, of_eight_bits, to_eight_bits
from forebay.gpu.kernels.gating import gate
from forebay.gpu.kernels.grouped import sort_copies, sum_kernel, tile_of
from forebay.gpu.kernels.launch import cdiv, dot_type, is_roomy, launch, power_of_2

_BLOCK = 1024
_MOST_COLUMNS = 64
"""The largest number of inputs that a product reads per loop step."""
_LEAST_SCALE = tl.constexpr(1e-12)


@triton.jit(do_not_specialize=["tokens"])
def product_kernel(
    x,
    codes,
    scale,
    zeros,
    bias,
    out,
    order,
    first,
    tokens,
    x_stride,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    FOLD: tl.constexpr,
    BIAS: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    EACH: tl.constexpr,
    SCATTER: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    DOT: tl.constexpr,
):
    """Multiplies M tokens by N rows of a matrix; grid: tiles, blocks of rows. K: bytes of codes per loop step.

    EXPERTS 0: a dense matrix. EACH: x has a row per token, and each token has this many experts; 0: x has a row per
    copy, in sorted order. SCATTER: results are stored in the order of copies before sorting.
    """
    if EXPERTS:
        expert, at, end = tile_of(tl.program_id(0), first, EXPERTS, EXPERTS_BLOCK, M)
    else:
        expert = tl.program_id(0) * 0
        at = tl.program_id(0) * M
        end = tokens
    if at >= end:
        return
    copy = at + tl.arange(0, M)
    inside = copy < end
    source = copy
    if EACH:
        source = tl.load(order + copy, mask=inside, other=0) // EACH
    n = tl.program_id(1) * N + tl.arange(0, N)
    there = n < ROWS
    row = expert.to(tl.int64) * ROWS + n
    k = tl.arange(0, K)
    WIDTH: tl.constexpr = INPUTS // 2 if FOLD else INPUTS
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    x_at = x + source.to(tl.int64)[:, None] * x_stride + k[None, :]
    code_at = codes + row[:, None] * WIDTH + k[None, :]
    scale_at = scale + (row // BLOCK_ROWS) * GROUPS
    total = tl.zeros([M, N], tl.float32)
    for begin in range(0, WIDTH, K):
        if FOLD:
            group = 2 * begin // GROUP
            byte = tl.load(code_at + begin, mask=there[:, None], other=0).to(tl.int32)
            zero = tl.load(zeros + row * GROUPS + group, mask=there, other=0).to(tl.int32)[:, None]
            low = ((byte & 15) - zero).to(tl.float32).to(DOT)
            high = ((byte >> 4) - zero).to(tl.float32).to(DOT)
            a = tl.load(x_at + 2 * begin, mask=inside[:, None], other=0.0).to(DOT)
            b = tl.load(x_at + 2 * begin + K, mask=inside[:, None], other=0.0).to(DOT)
            if GROUP >= INPUTS:
                total = tl.dot(a, tl.trans(low), total, input_precision="ieee")
                total = tl.dot(b, tl.trans(high), total, input_precision="ieee")
            else:
                part = tl.dot(a, tl.trans(low), input_precision="ieee")
                part = tl.dot(b, tl.trans(high), part, input_precision="ieee")
                total += part * tl.load(scale_at + group, mask=there, other=0.0)[None, :]
        else:
            real = (begin + k < INPUTS)[None, :]
            group = begin // GROUP
            values = of_eight_bits(tl.load(code_at + begin, mask=there[:, None] & real, other=0)).to(DOT)
            a = tl.load(x_at + begin, mask=inside[:, None] & real, other=0.0).to(DOT)
            if GROUP >= INPUTS:
                total = tl.dot(a, tl.trans(values), total, input_precision="ieee")
            else:
                part = tl.dot(a, tl.trans(values), input_precision="ieee")
                total += part * tl.load(scale_at + group, mask=there, other=0.0)[None, :]
    if GROUP >= INPUTS:
        total = total * tl.load(scale_at, mask=there, other=0.0)[None, :]
    if BIAS:
        total += tl.load(bias + n, mask=there, other=0.0).to(tl.float32)[None, :]
    place = copy
    if SCATTER:
        place = tl.load(order + copy, mask=inside, other=0)
    tl.store(out + place.to(tl.int64)[:, None] * ROWS + n[None, :], total, mask=inside[:, None] & there[None, :])


def product(x: torch.Tensor, matrix: Codes, bias: torch.Tensor | None) -> torch.Tensor:
    """See `interface.Quantised`."""
    tokens, rows = len(x), len(matrix.codes)
    out = x.new_empty(tokens, rows)
    _product(x, matrix, bias, out, rows, tokens, 64 if tokens > 16 else 16)
    return out


def experts_of_codes(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: Codes, down: Codes
) -> torch.Tensor:
    """See `interface.Quantised`."""
    (tokens, each), hidden = ids.shape, gate_up.inputs
    copies, count = tokens * each, len(down.codes) // hidden
    groups = sort_copies(ids, count)
    m = 64 if copies >= 32 * count else 16
    both = x.new_empty(copies, len(gate_up.codes) // count)
    _product(x, gate_up, None, both, both.shape[1], copies, m, groups, each=each)
    outputs = x.new_empty(copies, hidden)
    _product(gate(both), down, None, outputs, hidden, copies, m, groups)
    out = x.new_empty(tokens, hidden)
    grid = tokens, cdiv(hidden, _BLOCK)
    launch(sum_kernel, grid, outputs, weights, out, HIDDEN=hidden, EACH=each, BLOCK=_BLOCK, num_warps=4)
    return out


def _product(
    x: torch.Tensor,
    matrix: Codes,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    rows: int,
    copies: int,
    m: int,
    groups: tuple[torch.Tensor, torch.Tensor] | None = None,
    each: int = 0,
) -> None:
    """Launches the product kernel.

    `groups`: the copies sorted by expert, as `sort_copies` returns them; None: there are no experts.
    """
    count = 0 if groups is None else len(groups[1]) - 1
    order, first = (x, x) if groups is None else groups
    tiles = cdiv(copies, m) if groups is None else min(copies, cdiv(copies, m) + count)
    narrow = x.dtype == torch.float32
    n, k = (32, 32) if narrow else (128 if m == 64 else 64, _MOST_COLUMNS)
    sizes: dict[str, Any] = {"M": min(m, 32) if narrow else m, "N": n, "DOT": dot_type(x.dtype)}
    sizes |= {"num_warps": 8 if m == 64 else 4, "num_stages": 3 if is_roomy(x.device) else 2}
    if narrow:
        tiles = cdiv(copies, sizes["M"]) if groups is None else min(copies, cdiv(copies, sizes["M"]) + count)
    zeros = matrix.codes if matrix.zeros is None else matrix.zeros
    launch(
        product_kernel,
        (tiles, cdiv(rows, n)),
        x,
        matrix.codes,
        matrix.scale,
        zeros,
        out if bias is None else bias,
        out,
        order,
        first,
        copies,
        x.stride(0),
        ROWS=rows,
        INPUTS=matrix.inputs,
        GROUP=matrix.group,
        BLOCK_ROWS=matrix.block_rows,
        FOLD=matrix.fold,
        BIAS=bias is not None,
        EXPERTS=count,
        EXPERTS_BLOCK=power_of_2(count),
        EACH=each,
        SCATTER=bool(count) and not each,
        K=matrix.fold // 2 if matrix.fold else min(k, matrix.group & -matrix.group),
        **sizes,
    )


@triton.jit
def quantise_kernel(x, codes, scale, x_stride, INPUTS: tl.constexpr, BLOCK: tl.constexpr):
    """Quantises one token to 8-bit floats with a scale; grid: tokens."""
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    most = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, INPUTS, BLOCK):
        part = tl.load(x + token * x_stride + begin + k, mask=begin + k < INPUTS, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(part))
    of_token = tl.maximum(tl.max(most, 0) / LARGEST, _LEAST_SCALE)
    tl.store(scale + token, of_token)
    for begin in range(0, INPUTS, BLOCK):
        inside = begin + k < INPUTS
        part = tl.load(x + token * x_stride + begin + k, mask=inside, other=0.0).to(tl.float32) / of_token
        part = tl.minimum(tl.maximum(part, -LARGEST), LARGEST)
        tl.store(codes + token * INPUTS + begin + k, to_eight_bits(part).to(tl.uint8), mask=inside)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `interface.Quantised`."""
    tokens, inputs = x.shape
    codes = torch.empty(tokens, inputs, dtype=torch.uint8, device=x.device)
    scale = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    block = min(power_of_2(inputs), 2 * _BLOCK)
    launch(quantise_kernel, (tokens,), x, codes, scale, x.stride(0), INPUTS=inputs, BLOCK=block, num_warps=4)
    return codes.view(torch.float8_e4m3fn), scale
