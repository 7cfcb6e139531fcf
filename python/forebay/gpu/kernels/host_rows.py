"""Copies single rows from host memory to hot rows. The device reads pinned memory directly."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.hot import Found
from forebay.gpu.kernels.launch import launch, power_of_2

READS_HOST = True
_PROGRAMS = 16
"""The number of programs per query: enough for the reads in flight to hide the latency of host memory."""
_ROWS = 4


@triton.jit
def gather_kernel(
    host,
    pool,
    source,
    target,
    missing,
    host_stride,
    row_stride,
    TOP_K: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Copies a part of one query's missing rows; grid: queries, programs per query."""
    query = tl.program_id(0).to(tl.int64)
    count = tl.load(missing + query)
    w = tl.arange(0, WIDTH_BLOCK)
    for begin in range(tl.program_id(1) * ROWS, count, tl.num_programs(1) * ROWS):
        i = begin + tl.arange(0, ROWS)
        inside = i < count
        from_ = tl.load(source + query * TOP_K + i, mask=inside, other=0)
        to = tl.load(target + query * TOP_K + i, mask=inside, other=0)
        at = from_ // PAGE * host_stride + from_ % PAGE * WIDTH
        wide = inside[:, None] & (w < WIDTH)[None, :]
        row = tl.load(host + at[:, None] + w[None, :], mask=wide)
        tl.store(pool + to[:, None] * row_stride + w[None, :], row, mask=wide)


def gather(found: Found, host: torch.Tensor, host_stride: int, page_size: int, pool: torch.Tensor) -> None:
    """See `interface.Sparse`."""
    queries, top_k = found.rows.shape
    width = pool.shape[1]
    launch(
        gather_kernel,
        (queries, _PROGRAMS),
        *(host, pool, found.source, found.target, found.missing, host_stride, pool.stride(0)),
        TOP_K=top_k,
        PAGE=page_size,
        WIDTH=width,
        WIDTH_BLOCK=power_of_2(width),
        ROWS=_ROWS,
        num_warps=4,
    )
