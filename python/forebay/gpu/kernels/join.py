"""The join of results that programs have found in parts of one row's positions (flash decoding, Dao et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from forebay.gpu.kernels.launch import dependents, launch, power_of_2
from forebay.gpu.kernels.shape import LOG2_E, Shape

_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def part_length(end, SPLITS: tl.constexpr, TILE: tl.constexpr):
    """The length of each part except the last, for `end` positions: whole tiles."""
    return tl.cdiv(tl.cdiv(end, SPLITS), TILE) * TILE


@triton.jit
def beside_sinks(top, total, sinks, head, alive, SINKS: tl.constexpr):
    """The share of a walk's sums of values, and the sum of weights, of some heads: sinks take weight too.

    Both are relative to the larger of the largest score and the sink.
    """
    share = tl.where(total == total, 1.0, 1.0)
    if SINKS:
        sink = tl.load(sinks + head, mask=alive, other=0.0).to(tl.float32) * _LOG2_E
        higher = tl.maximum(top, sink)
        share = tl.exp2(top - higher)
        total = total * share + tl.exp2(sink - higher)
    return share, total


@triton.jit
def keep_part(
    out,
    sums,
    weights,
    row,
    token,
    split,
    head,
    alive,
    summed,
    top,
    total,
    sinks,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Stores a walk's results of some heads [m]: the final result for a single part, and otherwise data for the join.

    A part without positions has weight 0.
    """
    d = tl.arange(0, DIM_BLOCK)
    wide = alive[:, None] & (d < DIM)[None, :]
    if SPLITS == 1:
        share, total = beside_sinks(top, total, sinks, head, alive, SINKS)
        result = summed * (share / tl.where(total == 0.0, 1.0, total))[:, None]
        tl.store(out + (token * HEADS + head[:, None]) * DIM + d[None, :], result, mask=wide)
    else:
        cell = (row.to(tl.int64) * HEADS + head) * SPLITS + split
        tl.store(sums + cell[:, None] * DIM + d[None, :], summed, mask=wide)
        tl.store(weights + cell * 2, top, mask=alive)
        tl.store(weights + cell * 2 + 1, total, mask=alive)


@triton.jit
def join_kernel(
    sums,
    weights,
    out,
    first,
    sinks,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One row and head; the grid is rows, HEADS. ROWS: rows are those of `first`, without chunks."""
    dependents(OVERLAP)
    row, head = tl.program_id(0), tl.program_id(1)
    token = row.to(tl.int64)
    if ROWS:
        token = tl.load(first + row).to(tl.int64)
        if tl.load(first + row + 1) - token != 1:
            return
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, DIM_BLOCK)
    cell = (row.to(tl.int64) * HEADS + head) * SPLITS + s
    top, total = tl.load(weights + cell * 2), tl.load(weights + cell * 2 + 1)
    highest = tl.max(top, 0)
    share = tl.where(total > 0.0, tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest)), 0.0)
    part = tl.load(sums + cell[:, None] * DIM + d[None, :], mask=(total > 0.0)[:, None] & (d < DIM)[None, :], other=0.0)
    weight = tl.sum(total * share, 0)
    of_parts, weight = beside_sinks(highest, weight, sinks, head, True, SINKS)
    joined = tl.sum(part * share[:, None], 0) * (of_parts / tl.where(weight == 0.0, 1.0, weight))
    tl.store(out + (token * HEADS + head) * DIM + d, joined, mask=d < DIM)


@dataclass(frozen=True)
class Parts:
    """Memory for the parts of rows."""

    count: int
    sums: torch.Tensor  # float32 [rows, heads, count, dim]
    weights: torch.Tensor  # float32 [rows, heads, count, 2]: largest scores, and sums of weights

    @classmethod
    def make(cls, rows: int, shape: Shape, count: int, out: torch.Tensor) -> Parts:
        """Memory for `count` parts of each row. A single part needs none."""
        if count == 1:
            return cls(1, out, out)

        def empty(width: int) -> torch.Tensor:
            return torch.empty(rows, shape.heads, count, width, dtype=torch.float32, device=out.device)

        return cls(count, empty(shape.dim), empty(2))

    def join(
        self, out: torch.Tensor, first: torch.Tensor | None, shape: Shape, sinks: torch.Tensor | None = None
    ) -> None:
        """Writes `out` [n, heads, dim]. `first` is as in `PagedRows`; None: row i is token i."""
        if self.count == 1:
            return
        launch(
            join_kernel,
            (len(self.sums), shape.heads),
            *(self.sums, self.weights, out, out if first is None else first, out if sinks is None else sinks),
            HEADS=shape.heads,
            DIM=shape.dim,
            DIM_BLOCK=power_of_2(shape.dim),
            SPLITS=self.count,
            ROWS=first is not None,
            SINKS=sinks is not None,
            overlap=len(out) == 1,
            num_warps=4,
        )
