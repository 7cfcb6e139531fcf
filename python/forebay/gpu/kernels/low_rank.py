"""LoRA with several adapters for one matrix product, as in Punica (Chen et al. 2023): `y += B (A x)`.

The tokens of a step are sorted by the places of their adapters, once for all products. A tile consists of some tokens
of one place, so an adapter's matrices are read once for all of them. Grids are upper bounds, as for experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.kernels.grouped import sort_copies, tile_of
from forebay.gpu.kernels.launch import cdiv, dot_type, is_roomy, launch, power_of_2
from forebay.gpu.kernels.shape import LEAST_DOT
from forebay.gpu.low_rank import LowRankStack, PlacedTokens

_LARGE = 64
"""The number of tokens of a tile if there are many tokens."""
_SPAN = 1024
"""The number of inputs in each part of a sum. With few tokens, an undivided sum would keep only a few programs busy."""
_MOST_PARTS = 8
_RANKS = 64


@triton.jit(do_not_specialize=["tokens", "span"])
def shrink_kernel(
    x,
    a,
    sums,
    order,
    first,
    tokens,
    span,
    inputs,
    ranks,
    x_stride,
    PLACES: tl.constexpr,
    PLACES_BLOCK: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    DOT: tl.constexpr,
):
    """Computes a part of `A x`: M tokens of a place, N ranks; grid: tiles, blocks of ranks, parts of `span` inputs."""
    place, at, end = tile_of(tl.program_id(0), first, PLACES, PLACES_BLOCK, M)
    if at >= end:
        return
    copy = at + tl.arange(0, M)
    inside = copy < end
    token = tl.load(order + copy, mask=inside, other=0).to(tl.int64)
    n = tl.program_id(1) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    x_at = x + token[:, None] * x_stride
    a_at = a + (place.to(tl.int64) * ranks + n)[:, None] * inputs
    begin = tl.program_id(2) * span
    total = tl.zeros([M, N], tl.float32)
    for more in range(0, span, K):
        there = (begin + more + k < inputs)[None, :]
        part = tl.load(x_at + begin + more + k[None, :], mask=inside[:, None] & there, other=0.0).to(DOT)
        matrix = tl.load(a_at + begin + more + k[None, :], mask=(n < ranks)[:, None] & there, other=0.0).to(DOT)
        total = tl.dot(part, tl.trans(matrix), total, input_precision="ieee")
    line = tl.program_id(2).to(tl.int64) * tokens + token
    tl.store(sums + line[:, None] * ranks + n[None, :], total, mask=inside[:, None] & (n < ranks)[None, :])


@triton.jit(do_not_specialize=["tokens", "parts"])
def expand_kernel(
    sums,
    b,
    y,
    starts,
    order,
    first,
    tokens,
    parts,
    outputs,
    ranks,
    y_stride,
    PLACES: tl.constexpr,
    PLACES_BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    DOT: tl.constexpr,
):
    """Adds `B s` to y: M tokens of a place, N outputs of a module; grid: tiles, modules, blocks of outputs.

    The sum of the `parts` of `A x` is rounded before the product with `B`, and that product is rounded before the
    addition, as with separate operators.
    """
    place, at, end = tile_of(tl.program_id(0), first, PLACES, PLACES_BLOCK, M)
    begin = tl.load(starts + tl.program_id(1))
    n = begin + tl.program_id(2) * N + tl.arange(0, N)
    behind = tl.load(starts + tl.program_id(1) + 1)
    if (at >= end) | (begin + tl.program_id(2) * N >= behind):
        return
    copy = at + tl.arange(0, M)
    inside = copy < end
    token = tl.load(order + copy, mask=inside, other=0).to(tl.int64)
    r = tl.arange(0, R)
    total = tl.zeros([M, N], tl.float32)
    for rank in range(0, RANK, R):
        there = (rank + r < RANK)[None, :]
        own = tl.program_id(1) * RANK + rank + r
        small = tl.zeros([M, R], tl.float32)
        for part in range(parts):
            line = (part * tokens + token)[:, None] * ranks + own[None, :]
            small += tl.load(sums + line, mask=inside[:, None] & there, other=0.0)
        small = small.to(y.dtype.element_ty).to(DOT)
        b_at = b + (place.to(tl.int64) * outputs + n)[:, None] * RANK + rank + r[None, :]
        matrix = tl.load(b_at, mask=(n < behind)[:, None] & there, other=0.0).to(DOT)
        total = tl.dot(small, tl.trans(matrix), total, input_precision="ieee")
    y_at = y + token[:, None] * y_stride + n[None, :]
    mask = inside[:, None] & (n < behind)[None, :]
    old = tl.load(y_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_at, old + total.to(y.dtype.element_ty).to(tl.float32), mask=mask)


def add_low_rank(x: torch.Tensor, y: torch.Tensor, stack: LowRankStack, tokens: PlacedTokens) -> None:
    """See `interface.LowRank`."""
    count = len(x)
    (places, ranks, inputs), (outputs, rank) = stack.a.shape, stack.b.shape[1:]
    sorted_ = tokens.works.get(places)
    if sorted_ is None:
        sorted_ = tokens.works[places] = sort_copies(tokens.places[:, None], places)
    order, first = sorted_
    m = _LARGE if count >= 32 * places else LEAST_DOT
    tiles = min(count, cdiv(count, m) + places)
    k = 32 if x.dtype == torch.float32 else 64
    parts = 1 if m == _LARGE else min(_MOST_PARTS, cdiv(inputs, _SPAN))
    span = cdiv(cdiv(inputs, parts), k) * k
    sums = torch.empty(parts, count, ranks, dtype=torch.float32, device=x.device)
    shared = {
        "PLACES": places,
        "PLACES_BLOCK": power_of_2(places),
        "M": m,
        "DOT": dot_type(x.dtype),
        "num_warps": 4,
        "num_stages": 3 if is_roomy(x.device) else 2,
    }
    n = 32
    launch(
        shrink_kernel,
        (tiles, cdiv(ranks, n), parts),
        *(x, stack.a, sums, order, first, count, span, inputs, ranks, x.stride(0)),
        **shared,
        N=n,
        K=k,
    )
    n = 32 if x.dtype == torch.float32 else 64
    launch(
        expand_kernel,
        (tiles, len(stack.starts) - 1, cdiv(stack.widest, n)),
        *(sums, stack.b, y, stack.starts, order, first, count, parts, outputs, ranks, y.stride(0)),
        **shared,
        RANK=rank,
        N=n,
        R=LEAST_DOT if x.dtype == torch.float32 else max(LEAST_DOT, min(_RANKS, power_of_2(rank))),
    )
