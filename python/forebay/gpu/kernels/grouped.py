"""Mixtures of experts: one grouped product for all experts. Only the device has the sizes of the groups.

A token has one *copy* for each of its experts. A counting sort makes the copies of an expert adjacent. A tile of the
product consists of some copies of one expert. The counts determine the expert of a tile, so the grid is an upper bound.
The terms of a token are added one by one, in the order of its experts' ids and in float32, as in `layers.ops`. Copies
with an id after the last expert are sorted after all tiles.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from forebay.gpu.kernels.gating import ACTIVATIONS, gated
from forebay.gpu.kernels.launch import cdiv, dot_type, is_roomy, launch, power_of_2

_BLOCK = 1024


@triton.jit(do_not_specialize=["copies"])
def sort_kernel(ids, order, first, copies, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Sorts an expert's copies: counts the copies of lower experts, then numbers its own. Grid: experts + 1."""
    expert = tl.program_id(0)
    lower = 0
    for begin in range(0, copies, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        id_ = tl.load(ids + i, mask=i < copies, other=EXPERTS).to(tl.int32)
        lower += tl.sum((id_ < expert).to(tl.int32), 0)
    tl.store(first + expert, lower)
    for begin in range(0, copies, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        mine = tl.load(ids + i, mask=i < copies, other=EXPERTS + 1).to(tl.int32) == expert
        tl.store(order + lower + tl.cumsum(mine.to(tl.int32), 0) - 1, i, mask=mine)
        lower += tl.sum(mine.to(tl.int32), 0)


@triton.jit
def tile_of(number, first, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr):
    """Returns the expert of a tile of M copies, the tile's first copy, and the end of the expert's copies.

    A tile after the last one has no copies.
    """
    e = tl.arange(0, BLOCK)
    inside = e < EXPERTS
    begin = tl.load(first + e, mask=inside, other=0)
    count = tl.load(first + e + 1, mask=inside, other=0) - begin
    tiles = tl.cdiv(count, M)
    behind = tl.cumsum(tiles, 0)
    expert = tl.sum(((behind <= number) & inside).to(tl.int32), 0)
    chosen = e == expert
    at = tl.sum(tl.where(chosen, begin + (number - behind + tiles) * M, 0), 0)
    end = tl.sum(tl.where(chosen, begin + count, 0), 0)
    return expert, at, end


@triton.jit
def gate_up_kernel(
    x,
    gate_up,
    biases,
    inner,
    order,
    first,
    x_stride,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    EACH: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    DOT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIASES: tl.constexpr,
):
    """Computes gated rows of M copies of one expert, N elements; grid: tiles, blocks. EACH: experts per token."""
    expert, at, end = tile_of(tl.program_id(0), first, EXPERTS, EXPERTS_BLOCK, M)
    if at >= end:
        return
    copy = at + tl.arange(0, M)
    inside = copy < end
    token = tl.load(order + copy, mask=inside, other=0) // EACH
    n = tl.program_id(1) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    x_at = x + token.to(tl.int64)[:, None] * x_stride
    weight_at = gate_up + (expert.to(tl.int64) * 2 * INNER + n)[:, None] * HIDDEN
    gates = tl.zeros([M, N], tl.float32)
    ups = tl.zeros([M, N], tl.float32)
    for begin in range(0, HIDDEN, K):
        there = (begin + k < HIDDEN)[None, :]
        rows = tl.load(x_at + begin + k[None, :], mask=inside[:, None] & there, other=0.0).to(DOT)
        weights = (n < INNER)[:, None] & there
        gate = tl.load(weight_at + begin + k[None, :], mask=weights, other=0.0).to(DOT)
        gates = tl.dot(rows, tl.trans(gate), gates, input_precision="ieee")
        up = tl.load(weight_at + INNER * HIDDEN + begin + k[None, :], mask=weights, other=0.0).to(DOT)
        ups = tl.dot(rows, tl.trans(up), ups, input_precision="ieee")
    out_at = inner + copy.to(tl.int64)[:, None] * INNER + n[None, :]
    if BIASES:
        bias_at = biases + expert * 2 * INNER + n
        gates += tl.load(bias_at, mask=n < INNER, other=0.0).to(tl.float32)[None, :]
        ups += tl.load(bias_at + INNER, mask=n < INNER, other=0.0).to(tl.float32)[None, :]
    tl.store(out_at, gated(gates, ups, ACTIVATION), mask=inside[:, None] & (n < INNER)[None, :])


@triton.jit
def down_kernel(
    inner,
    down,
    biases,
    outputs,
    order,
    first,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    DOT: tl.constexpr,
    BIASES: tl.constexpr,
):
    """Computes the down projection of M copies of one expert, in the order before sorting; grid: tiles, blocks."""
    expert, at, end = tile_of(tl.program_id(0), first, EXPERTS, EXPERTS_BLOCK, M)
    if at >= end:
        return
    copy = at + tl.arange(0, M)
    inside = copy < end
    n = tl.program_id(1) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    inner_at = inner + copy.to(tl.int64)[:, None] * INNER
    weight_at = down + (expert.to(tl.int64) * HIDDEN + n)[:, None] * INNER
    total = tl.zeros([M, N], tl.float32)
    for begin in range(0, INNER, K):
        there = (begin + k < INNER)[None, :]
        rows = tl.load(inner_at + begin + k[None, :], mask=inside[:, None] & there, other=0.0).to(DOT)
        weight = tl.load(weight_at + begin + k[None, :], mask=(n < HIDDEN)[:, None] & there, other=0.0).to(DOT)
        total = tl.dot(rows, tl.trans(weight), total, input_precision="ieee")
    if BIASES:
        total += tl.load(biases + expert * HIDDEN + n, mask=n < HIDDEN, other=0.0).to(tl.float32)[None, :]
    place = tl.load(order + copy, mask=inside, other=0).to(tl.int64)
    tl.store(outputs + place[:, None] * HIDDEN + n[None, :], total, mask=inside[:, None] & (n < HIDDEN)[None, :])


@triton.jit
def sum_kernel(outputs, weights, out, HIDDEN: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr):
    """Computes the weighted sum of a token's experts, for a block of elements; grid: tokens, blocks."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(EACH):
        copy = token * EACH + place
        weight = tl.load(weights + copy)
        # A copy without an expert has no output, and a weight of 0.
        term = tl.load(outputs + copy * HIDDEN + i, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(weight != 0, term * weight, 0.0)
    tl.store(out + token * HIDDEN + i, total, mask=inside)


def sort_copies(ids: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorts copies by expert, from ids [tokens, each]. Returns int32 [copies], and each expert's first [count + 1]."""
    copies = ids.numel()
    order = torch.empty(copies, dtype=torch.int32, device=ids.device)
    first = torch.empty(count + 1, dtype=torch.int32, device=ids.device)
    launch(sort_kernel, (count + 1,), ids, order, first, copies, EXPERTS=count, BLOCK=_BLOCK, num_warps=4)
    return order, first


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    """See `interface.Experts`."""
    (tokens, each), (count, hidden, inner_size) = ids.shape, down.shape
    copies = tokens * each
    order, first = sort_copies(ids, count)
    # With few copies per expert, reading weights dominates, and padding costs nothing.
    m = 64 if copies >= 32 * count else 16
    narrow = x.dtype == torch.float32
    n, k = (32, 32) if narrow else (128 if m == 64 else 64, 64)
    # Each expert may have one tile that is not full.
    tiles = min(copies, cdiv(copies, m) + count)
    shared: dict[str, Any] = {
        "EXPERTS": count,
        "EXPERTS_BLOCK": power_of_2(count),
        "HIDDEN": hidden,
        "INNER": inner_size,
    }
    sizes: dict[str, Any] = {"M": m, "N": n, "K": k, "DOT": dot_type(x.dtype), "num_warps": 8 if m == 64 else 4}
    sizes["num_stages"] = 3 if is_roomy(x.device) else 2
    inner = x.new_empty(copies, inner_size)
    grid = tiles, cdiv(inner_size, n)
    of_gates, of_outputs = (x, x) if biases is None else biases
    has_biases = biases is not None
    launch(
        gate_up_kernel,
        grid,
        *(x, gate_up, of_gates, inner, order, first, x.stride(0)),
        **shared,
        **sizes,
        EACH=each,
        ACTIVATION=ACTIVATIONS.index(activation),
        BIASES=has_biases,
    )
    outputs = x.new_empty(copies, hidden)
    grid = tiles, cdiv(hidden, n)
    launch(
        down_kernel,
        grid,
        *(inner, down, of_outputs, outputs, order, first),
        **shared,
        **sizes,
        BIASES=has_biases,
    )
    out = x.new_empty(tokens, hidden)
    grid = tokens, cdiv(hidden, _BLOCK)
    launch(sum_kernel, grid, outputs, weights, out, HIDDEN=hidden, EACH=each, BLOCK=_BLOCK, num_warps=4)
    return out
