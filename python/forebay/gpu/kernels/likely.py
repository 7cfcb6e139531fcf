"""Log-probabilities of tokens, and of the likeliest ones of a row: in chunks of a row, which are then joined."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.kernels.largest import CHUNK
from forebay.gpu.kernels.launch import cdiv, launch, power_of_2
from forebay.gpu.sampling import MOST_LIKELY

_NOWHERE = tl.constexpr(2147483647)


@triton.jit
def _largest(x, ids):
    """The largest of numbers, and the lowest id of those that are it."""
    value = tl.max(x, 0)
    return value, tl.min(tl.where(x == value, ids, _NOWHERE), 0)


@triton.jit(do_not_specialize=["most"])
def chunks_kernel(
    logits, tops, sums, values, ids, stride, chunks, vocabulary, most, CHUNK: tl.constexpr, MOST: tl.constexpr
):
    """A chunk of a row: its largest logits, and the sum of powers relative to the first; the grid is rows, chunks."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + i, mask=i < vocabulary, other=float("-inf")).to(tl.float32)
    # No comparison with a NaN says anything.
    x = tl.where(x == x, x, float("-inf"))
    top = tl.max(x, 0)
    at = row * chunks + chunk
    tl.store(tops + at, top)
    tl.store(sums + at, tl.sum(tl.exp(x - top), 0))
    for number in range(most):
        value, place = _largest(x, i)
        tl.store(values + at * MOST + number, value)
        tl.store(ids + at * MOST + number, place)
        x = tl.where(i == place, float("-inf"), x)


@triton.jit(do_not_specialize=["most"])
def rows_kernel(
    logits,
    tokens,
    tops,
    sums,
    values,
    ids,
    found,
    logprobs,
    stride,
    chunks,
    most,
    MOST: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The likeliest tokens of one row among those of its chunks, behind the given one; the grid is rows."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS_BLOCK)
    top = tl.load(tops + row * chunks + c, mask=c < chunks, other=float("-inf"))
    sum_ = tl.load(sums + row * chunks + c, mask=c < chunks, other=0.0)
    largest = tl.max(top, 0)
    total = largest + tl.log(tl.sum(sum_ * tl.exp(top - largest), 0))
    out = row * (1 + most)
    token = tl.load(tokens + row)
    tl.store(found + out, token)
    tl.store(logprobs + out, tl.load(logits + row * stride + token).to(tl.float32) - total)
    b = tl.arange(0, BLOCK)
    inside = (b < chunks * MOST) & (b % MOST < most)
    x = tl.load(values + row * chunks * MOST + b, mask=inside, other=float("-inf"))
    place = tl.load(ids + row * chunks * MOST + b, mask=inside, other=_NOWHERE)
    for number in range(most):
        value, best = _largest(x, place)
        tl.store(found + out + 1 + number, best.to(tl.int64))
        tl.store(logprobs + out + 1 + number, value - total)
        x = tl.where(place == best, float("-inf"), x)


def likely(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `interface.Sampling`."""
    rows, vocabulary = logits.shape
    chunks = cdiv(vocabulary, CHUNK)
    tops, sums = torch.empty(2, rows, chunks, dtype=torch.float32, device=logits.device)
    values = torch.empty(rows, chunks, MOST_LIKELY, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, chunks, MOST_LIKELY, dtype=torch.int32, device=logits.device)
    found = torch.empty(rows, 1 + most, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, 1 + most, dtype=torch.float32, device=logits.device)
    launch(
        chunks_kernel,
        (rows, chunks),
        *(logits, tops, sums, values, ids, logits.stride(0), chunks, vocabulary, most),
        CHUNK=CHUNK,
        MOST=MOST_LIKELY,
        num_warps=8,
    )
    launch(
        rows_kernel,
        (rows,),
        *(logits, tokens, tops, sums, values, ids, found, logprobs, logits.stride(0), chunks, most),
        MOST=MOST_LIKELY,
        CHUNKS_BLOCK=power_of_2(chunks),
        BLOCK=power_of_2(chunks * MOST_LIKELY),
        num_warps=4,
    )
    return found, logprobs
