"""The steps from a projection to heads: normalise, apply RoPE (Su et al. 2021), and store keys and values in pages.

Results overwrite the projection. A program overwrites only elements that it has already read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.kernels.eight_bits import kept
from forebay.gpu.kernels.launch import cdiv, dependents, launch, power_of_2

_ELEMENTS = 2048
"""The largest number of elements of heads that one program processes."""


@triton.jit
def rotate_kernel(
    qkv,
    q_weight,
    k_weight,
    cos,
    sin,
    writes,
    keys,
    values,
    qkv_stride,
    angle_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    eps,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    TURNED: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Processes a block of one token's heads; grid: tokens, blocks. The first TURNED elements of a head are rotated."""
    dependents(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    half: tl.constexpr = TURNED // 2
    rest: tl.constexpr = DIM - TURNED
    i = tl.arange(0, HALF_BLOCK)
    j = tl.arange(0, REST_BLOCK)
    alive = head < QUERIES + 2 * KEYS
    is_query, turns = head < QUERIES, head < QUERIES + KEYS
    in_half = alive[:, None] & (i < half)[None, :]
    in_rest = alive[:, None] & (j < rest)[None, :]
    dtype = qkv.dtype.element_ty

    a_at = qkv + token * qkv_stride + head[:, None] * DIM + i[None, :]
    c_at = qkv + token * qkv_stride + head[:, None] * DIM + TURNED + j[None, :]
    a = tl.load(a_at, mask=in_half, other=0.0).to(tl.float32)
    b = tl.load(a_at + half, mask=in_half, other=0.0).to(tl.float32)
    c = tl.load(c_at, mask=in_rest, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)
        factor = tl.where(turns, tl.rsqrt(squares / DIM + eps), 1.0)[:, None]
        a_weight = _weight(q_weight, k_weight, i, i < half, is_query, turns)
        b_weight = _weight(q_weight, k_weight, half + i, i < half, is_query, turns)
        c_weight = _weight(q_weight, k_weight, TURNED + j, j < rest, is_query, turns)
        a = (a * factor * a_weight).to(dtype).to(tl.float32)
        b = (b * factor * b_weight).to(dtype).to(tl.float32)
        c = (c * factor * c_weight).to(dtype).to(tl.float32)
    angle_at = token * angle_stride + i
    cosine = tl.load(cos + angle_at, mask=i < half, other=0.0).to(tl.float32)[None, :]
    # The second half of the signed sines is the sine itself.
    sine = tl.load(sin + angle_at + half, mask=i < half, other=0.0).to(tl.float32)[None, :]
    x = tl.where(turns[:, None], a * cosine - b * sine, a)
    y = tl.where(turns[:, None], b * cosine + a * sine, b)

    tl.store(a_at, x, mask=in_half & turns[:, None])
    tl.store(a_at + half, y, mask=in_half & turns[:, None])
    if NORM and rest > 0:
        tl.store(c_at, c, mask=in_rest & turns[:, None])
    entry = tl.load(writes + token).to(tl.int64)
    is_key = (turns & (head >= QUERIES))[:, None]
    key_at = keys + entry * key_stride + (head - QUERIES)[:, None] * key_head_stride
    tl.store(key_at + i[None, :], kept(x, keys), mask=in_half & is_key)
    tl.store(key_at + half + i[None, :], kept(y, keys), mask=in_half & is_key)
    tl.store(key_at + TURNED + j[None, :], kept(c, keys), mask=in_rest & is_key)
    is_value = (alive & (head >= QUERIES + KEYS))[:, None]
    value_at = values + entry * value_stride + (head - QUERIES - KEYS)[:, None] * value_head_stride
    tl.store(value_at + i[None, :], kept(x, values), mask=in_half & is_value)
    tl.store(value_at + half + i[None, :], kept(y, values), mask=in_half & is_value)
    tl.store(value_at + TURNED + j[None, :], kept(c, values), mask=in_rest & is_value)


@triton.jit
def _weight(q_weight, k_weight, at, inside, is_query, turns):
    """Loads the norms' weights for each head and element. Value heads have the weight 1."""
    of_query = tl.load(q_weight + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    of_key = tl.load(k_weight + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    return tl.where(is_query[:, None], of_query, tl.where(turns[:, None], of_key, 1.0))


def rotate_and_keep(
    qkv: torch.Tensor,
    queries: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    writes: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `interface.Layers`."""
    count, dim, turned = keys.shape[1], keys.shape[2], cos.shape[-1]
    heads = queries + 2 * count
    q_weight, k_weight = (qkv, qkv) if norms is None else norms
    per_program = min(power_of_2(heads), max(1, _ELEMENTS // power_of_2(dim)))
    launch(
        rotate_kernel,
        (len(qkv), cdiv(heads, per_program)),
        *(qkv, q_weight, k_weight, cos, signed_sin, writes, keys, values, qkv.stride(0), cos.stride(0)),
        *(keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), eps),
        QUERIES=queries,
        KEYS=count,
        DIM=dim,
        TURNED=turned,
        HALF_BLOCK=power_of_2(turned // 2),
        REST_BLOCK=power_of_2(dim - turned),
        HEADS_BLOCK=per_program,
        NORM=norms is not None,
        overlap=len(qkv) == 1,
        num_warps=4,
    )
    q, k, v = qkv.unflatten(1, (heads, dim)).split((queries, count, count), dim=1)
    return q, k, v
