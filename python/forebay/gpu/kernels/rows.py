"""The data that latent attention stores for each position: a latent row and an index key.

Both are normalised, partly rotated, and stored in pages.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.kernels.launch import launch, power_of_2


@triton.jit
def _turn(at, cos, sin, inside, i, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Returns the two rotated halves of the 2 HALF elements from `at` on.

    PAIRS: adjacent elements are rotated together; otherwise, the corresponding elements of both halves.
    """
    step: tl.constexpr = 2 if PAIRS else 1
    other: tl.constexpr = 1 if PAIRS else HALF
    a = tl.load(at + i * step, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(at + i * step + other, mask=inside, other=0.0).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def latent_kernel(
    made,
    weight,
    cos,
    sin,
    writes,
    pool,
    out,
    made_stride,
    angle_stride,
    row_stride,
    eps,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Processes one token, `[RANK | 2 HALF]`: normalises the first part, and rotates the second; grid: tokens."""
    token = tl.program_id(0).to(tl.int64)
    at = made + token * made_stride
    k = tl.arange(0, RANK_BLOCK)
    i = tl.arange(0, HALF_BLOCK)
    in_rank, in_half = k < RANK, i < HALF
    latent = tl.load(at + k, mask=in_rank, other=0.0).to(tl.float32)
    latent = latent * tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
    latent = latent * tl.load(weight + k, mask=in_rank, other=0.0).to(tl.float32)
    cosine = tl.load(cos + token * angle_stride + i, mask=in_half, other=0.0).to(tl.float32)
    sine = tl.load(sin + token * angle_stride + HALF + i, mask=in_half, other=0.0).to(tl.float32)
    x, y = _turn(at + RANK, cosine, sine, in_half, i, HALF, PAIRS)
    entry = tl.load(writes + token).to(tl.int64)
    for to in tl.static_range(2):
        row = out + token * (RANK + 2 * HALF) if to == 0 else pool + entry * row_stride
        tl.store(row + k, latent, mask=in_rank)
        tl.store(row + RANK + i, x, mask=in_half)
        tl.store(row + RANK + HALF + i, y, mask=in_half)


@triton.jit
def index_key_kernel(
    made,
    weight,
    bias,
    cos,
    sin,
    writes,
    pool,
    made_stride,
    angle_stride,
    row_stride,
    eps,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Processes one token's key of DIM elements: layer norm with bias, then RoPE on the first 2 HALF elements.

    Grid: tokens.
    """
    token = tl.program_id(0).to(tl.int64)
    at = made + token * made_stride
    d = tl.arange(0, DIM_BLOCK)
    i = tl.arange(0, HALF_BLOCK)
    in_key, in_half = d < DIM, i < HALF
    dtype = pool.dtype.element_ty
    key = tl.load(at + d, mask=in_key, other=0.0).to(tl.float32)
    mean = tl.sum(key, 0) / DIM
    spread = tl.where(in_key, key - mean, 0.0)
    factor = tl.rsqrt(tl.sum(spread * spread, 0) / DIM + eps)
    scale = tl.load(weight + d, mask=in_key, other=0.0).to(tl.float32)
    shift = tl.load(bias + d, mask=in_key, other=0.0).to(tl.float32)
    entry = tl.load(writes + token).to(tl.int64)
    rest = (d >= 2 * HALF) & in_key
    tl.store(pool + entry * row_stride + d, spread * factor * scale + shift, mask=rest)

    step: tl.constexpr = 2 if PAIRS else 1
    other: tl.constexpr = 1 if PAIRS else HALF
    first, second = i * step, i * step + other
    a = (tl.load(at + first, mask=in_half, other=0.0).to(tl.float32) - mean) * factor
    b = (tl.load(at + second, mask=in_half, other=0.0).to(tl.float32) - mean) * factor
    a = a * tl.load(weight + first, mask=in_half, other=0.0).to(tl.float32)
    b = b * tl.load(weight + second, mask=in_half, other=0.0).to(tl.float32)
    a = (a + tl.load(bias + first, mask=in_half, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    b = (b + tl.load(bias + second, mask=in_half, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    cosine = tl.load(cos + token * angle_stride + i, mask=in_half, other=0.0).to(tl.float32)
    sine = tl.load(sin + token * angle_stride + HALF + i, mask=in_half, other=0.0).to(tl.float32)
    tl.store(pool + entry * row_stride + i, a * cosine - b * sine, mask=in_half)
    tl.store(pool + entry * row_stride + HALF + i, b * cosine + a * sine, mask=in_half)


def keep_latent(
    made: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    pairs: bool,
    pool: torch.Tensor,
    writes: torch.Tensor,
) -> torch.Tensor:
    """See `interface.Layers`."""
    rank, half = len(weight), cos.shape[-1] // 2
    out = made.new_empty(made.shape)
    launch(
        latent_kernel,
        (len(made),),
        *(made, weight, cos, signed_sin, writes, pool, out, made.stride(0), cos.stride(0), pool.stride(0), eps),
        RANK=rank,
        HALF=half,
        RANK_BLOCK=power_of_2(rank),
        HALF_BLOCK=power_of_2(half),
        PAIRS=pairs,
        num_warps=4,
    )
    return out


def keep_index_keys(
    made: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    pairs: bool,
    pool: torch.Tensor,
    writes: torch.Tensor,
) -> None:
    """See `interface.Layers`."""
    dim, half = len(weight), cos.shape[-1] // 2
    launch(
        index_key_kernel,
        (len(made),),
        *(made, weight, bias, cos, signed_sin, writes, pool, made.stride(0), cos.stride(0), pool.stride(0), eps),
        DIM=dim,
        HALF=half,
        DIM_BLOCK=power_of_2(dim),
        HALF_BLOCK=power_of_2(half),
        PAIRS=pairs,
        num_warps=1,
    )
