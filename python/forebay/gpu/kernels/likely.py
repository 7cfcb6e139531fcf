"""Log-probabilities of given tokens and of the likeliest tokens of a row: computed by chunks of a row, then joined."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.kernels.largest import CHUNK
from forebay.gpu.kernels.launch import cdiv, launch, power_of_2
from forebay.gpu.sampling import MOST_LIKELY
from forebay.gpu.tables import StepBuffers, Tables
from forebay.protocol.constants import SLOT_WORDS, SlotRecord

_WORDS = tl.constexpr(SLOT_WORDS)
_LOGPROBS = tl.constexpr(int(SlotRecord.LOGPROBS))
_NOWHERE = tl.constexpr(2147483647)


@triton.jit
def _largest(x, ids):
    """Returns the largest value, and the lowest id that has it."""
    value = tl.max(x, 0)
    return value, tl.min(tl.where(x == value, ids, _NOWHERE), 0)


@triton.jit
def _asked(slots, words, row, most, BY_SLOT: tl.constexpr):
    """Returns the number of tokens that a row requests, at most `most`; -1: it requests no log-probabilities."""
    asked = most
    if BY_SLOT:
        record = words + tl.load(slots + row).to(tl.int64) * _WORDS
        asked = tl.minimum(tl.load(record + _LOGPROBS), most)
    return asked


@triton.jit(do_not_specialize=["most"])
def chunks_kernel(
    logits,
    tops,
    sums,
    values,
    ids,
    slots,
    words,
    stride,
    chunks,
    vocabulary,
    most,
    CHUNK: tl.constexpr,
    MOST: tl.constexpr,
    BY_SLOT: tl.constexpr,
):
    """Finds a chunk's largest logits, and the sum of exponentials relative to the largest; grid: rows, chunks."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    asked = _asked(slots, words, row, most, BY_SLOT)
    if asked < 0:
        return
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + i, mask=i < vocabulary, other=float("-inf")).to(tl.float32)
    # Comparisons with a NaN are always false.
    x = tl.where(x == x, x, float("-inf"))
    top = tl.max(x, 0)
    at = row * chunks + chunk
    tl.store(tops + at, top)
    tl.store(sums + at, tl.sum(tl.exp(x - top), 0))
    for number in range(asked):
        value, place = _largest(x, i)
        tl.store(values + at * MOST + number, value)
        tl.store(ids + at * MOST + number, place)
        x = tl.where(i == place, float("-inf"), x)


@triton.jit(do_not_specialize=["most", "found_stride"])
def rows_kernel(
    logits,
    tokens,
    tops,
    sums,
    values,
    ids,
    found,
    logprobs,
    slots,
    words,
    stride,
    found_stride,
    chunks,
    most,
    BY_SLOT: tl.constexpr,
    MOST: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the given token of a row, then the likeliest tokens of all chunks; grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    asked = _asked(slots, words, row, most, BY_SLOT)
    if asked < 0:
        return
    c = tl.arange(0, CHUNKS_BLOCK)
    top = tl.load(tops + row * chunks + c, mask=c < chunks, other=float("-inf"))
    sum_ = tl.load(sums + row * chunks + c, mask=c < chunks, other=0.0)
    largest = tl.max(top, 0)
    total = largest + tl.log(tl.sum(sum_ * tl.exp(top - largest), 0))
    out = row * found_stride
    token = tl.load(tokens + row)
    tl.store(found + out, token)
    tl.store(logprobs + out, tl.load(logits + row * stride + token).to(tl.float32) - total)
    b = tl.arange(0, BLOCK)
    inside = (b < chunks * MOST) & (b % MOST < asked)
    x = tl.load(values + row * chunks * MOST + b, mask=inside, other=float("-inf"))
    place = tl.load(ids + row * chunks * MOST + b, mask=inside, other=_NOWHERE)
    for number in range(asked):
        value, best = _largest(x, place)
        tl.store(found + out + 1 + number, best.to(tl.int64))
        tl.store(logprobs + out + 1 + number, value - total)
        x = tl.where(place == best, float("-inf"), x)


def likely(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `interface.Sampling`."""
    rows = len(logits)
    found = torch.empty(rows, 1 + most, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, 1 + most, dtype=torch.float32, device=logits.device)
    _find(logits, tokens, most, found, logprobs)
    return found, logprobs


def tell_likely(
    logits: torch.Tensor, tokens: torch.Tensor, tables: Tables, buffers: StepBuffers, told: torch.Tensor
) -> None:
    """See `interface.Sampling`."""
    most = min(MOST_LIKELY, logits.shape[1])
    _find(logits, tokens, most, told[:, 0], told[:, 1].view(torch.float32), (buffers.sampling, tables.words))


def _find(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    most: int,
    found: torch.Tensor,
    logprobs: torch.Tensor,
    by_slot: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Writes the results as lines of `found` and `logprobs`, which have the same stride.

    `by_slot`: the rows' slots, and the slots' records, which contain the number of tokens that a slot requests. None:
    all rows request `most`.
    """
    rows, vocabulary = logits.shape
    chunks = cdiv(vocabulary, CHUNK)
    tops, sums = torch.empty(2, rows, chunks, dtype=torch.float32, device=logits.device)
    values = torch.empty(rows, chunks, MOST_LIKELY, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, chunks, MOST_LIKELY, dtype=torch.int32, device=logits.device)
    slots, words = (ids, ids) if by_slot is None else by_slot
    launch(
        chunks_kernel,
        (rows, chunks),
        *(logits, tops, sums, values, ids, slots, words, logits.stride(0), chunks, vocabulary, most),
        CHUNK=CHUNK,
        MOST=MOST_LIKELY,
        BY_SLOT=by_slot is not None,
        num_warps=8,
    )
    launch(
        rows_kernel,
        (rows,),
        *(logits, tokens, tops, sums, values, ids, found, logprobs, slots, words),
        *(logits.stride(0), found.stride(0), chunks, most),
        BY_SLOT=by_slot is not None,
        MOST=MOST_LIKELY,
        CHUNKS_BLOCK=power_of_2(chunks),
        BLOCK=power_of_2(chunks * MOST_LIKELY),
        num_warps=4,
    )
