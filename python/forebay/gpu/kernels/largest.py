"""The largest logit of each row, and whether all logits are finite: computed by chunks of a row, then joined."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.kernels.launch import cdiv, launch, power_of_2

CHUNK = 4096
"""The number of logits that a program reads."""


@triton.jit
def scan_kernel(logits, tops, places, finites, stride, chunks, vocabulary, CHUNK: tl.constexpr):
    """Finds a chunk's largest logit and its first index, and checks whether all are finite. Grid: rows, chunks."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = i < vocabulary
    x = tl.load(logits + row * stride + i, mask=inside, other=float("-inf")).to(tl.float32)
    infinite = inside & ((tl.abs(x) < float("inf")) == 0)
    # Comparisons with a NaN are always false.
    x = tl.where(x == x, x, float("-inf"))
    top = tl.max(x, 0)
    at = row * chunks + chunk
    tl.store(tops + at, top)
    tl.store(places + at, tl.min(tl.where((x == top) & inside, i, vocabulary - 1), 0))
    tl.store(finites + at, tl.sum(infinite.to(tl.int32), 0) == 0)


@triton.jit
def pick_kernel(tops, places, finites, tokens, finite, chunks, BLOCK: tl.constexpr):
    """Joins the chunks of one row: the first one with the largest logit wins; grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < chunks
    top = tl.load(tops + row * chunks + i, mask=inside, other=float("-inf"))
    place = tl.load(places + row * chunks + i, mask=inside, other=0)
    fine = tl.load(finites + row * chunks + i, mask=inside, other=1).to(tl.int32)
    best = (top == tl.max(top, 0)) & inside
    tl.store(tokens + row, tl.min(tl.where(best, place, 2147483647), 0).to(tl.int64))
    tl.store(finite + row, tl.min(fine, 0) > 0)


def scan(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the largest logits float32, their indices int32, and whether all are finite, [rows, chunks] each."""
    rows, vocabulary = logits.shape
    chunks = cdiv(vocabulary, CHUNK)
    tops = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    finites = torch.empty(rows, chunks, dtype=torch.bool, device=logits.device)
    launch(
        scan_kernel,
        (rows, chunks),
        *(logits, tops, places, finites, logits.stride(0), chunks, vocabulary),
        CHUNK=CHUNK,
        num_warps=8,
    )
    return tops, places, finites


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `interface.Sampling`."""
    tops, places, finites = scan(logits)
    rows, chunks = tops.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
    grid = (rows,)
    launch(pick_kernel, grid, tops, places, finites, tokens, finite, chunks, BLOCK=power_of_2(chunks), num_warps=1)
    return tokens, finite
