"""Tokens drawn from logits, with one program for each row, and without a sort.

A token's *key* is the bits of its distance from the largest logit, divided by the temperature. No distance is negative,
so keys order tokens like distances do. A token's *mass* is its weight in fixed point, so that sums do not depend on
their order. A filter is a largest key, and a number of kept tokens with this key, lower ids first. Bisection finds it,
mostly among a few thousand candidates: the tokens of the first bins of a histogram. If these are not enough, it
searches all tokens, which takes long.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.kernels.largest import scan
from forebay.gpu.kernels.launch import launch, power_of_2
from forebay.gpu.sampling import FIXED_POINT, Wishes

CANDIDATES = 4096
"""The number of candidates of a row."""
_BLOCK = 2048

_ONE = tl.constexpr(float(1 << FIXED_POINT))
_NO_KEY = tl.constexpr(0x7F800001)  # above that of a weight of 0, which infinity has
_BINS = tl.constexpr(1024)
_BINS_A_UNIT = tl.constexpr(16.0)


@triton.jit
def _weight(key):
    """exp(-distance), 0 for no key."""
    return tl.exp(-tl.minimum(key, _NO_KEY - 1).to(tl.float32, bitcast=True))


@triton.jit
def _mass(key):
    """Weights in fixed point, int64."""
    return (_weight(key) * _ONE).to(tl.int64)


@triton.jit
def _key(logits, at, count, top, temperature):
    """Keys of some tokens, int32; `_NO_KEY` behind the last."""
    x = tl.load(logits + at, mask=at < count, other=0.0).to(tl.float32)
    distance = tl.math.div_rn(top - x, temperature)
    # Of a row that is not finite nothing counts, but keys must stay in order.
    distance = tl.where(distance >= 0, distance, float("inf"))
    return tl.where(at < count, distance.to(tl.int32, bitcast=True), _NO_KEY)


@triton.jit
def _keys(logits, candidates, at, count, top, temperature, FEW: tl.constexpr):
    """Keys of the row's tokens, or of its candidates."""
    if FEW:
        key = tl.load(candidates + at, mask=at < count, other=_NO_KEY)
    else:
        key = _key(logits, at, count, top, temperature)
    return key


@triton.jit
def _upto(logits, candidates, count, top, temperature, key, FEW: tl.constexpr, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The number of tokens that have at most this key, or their mass; int64."""
    total = tl.zeros([BLOCK], tl.int64)
    for begin in range(0, count, BLOCK):
        found = _keys(logits, candidates, begin + tl.arange(0, BLOCK), count, top, temperature, FEW)
        value = _mass(found) if MASS else tl.full([BLOCK], 1, tl.int64)
        total += tl.where(found <= key, value, 0)
    return tl.sum(total, 0)


@triton.jit
def _reach(
    logits, candidates, count, top, temperature, goal, most, FEW: tl.constexpr, MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """The least key, at most `most`, up to which there are `goal` tokens or this mass, and what is below this key."""
    low, high = tl.cast(0, tl.int32), tl.cast(most, tl.int32)
    while low < high:
        # The sum of two keys may be above all int32.
        middle = low + (high - low) // 2
        if _upto(logits, candidates, count, top, temperature, middle, FEW, MASS, BLOCK) >= goal:
            high = middle
        else:
            low = middle + 1
    return low, _upto(logits, candidates, count, top, temperature, low - 1, FEW, MASS, BLOCK)


@triton.jit
def _goal(top_p, mass):
    """The least mass that is a share of `top_p`; int64."""
    return tl.ceil(top_p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64)


@triton.jit
def _filter(
    logits, candidates, count, top, temperature, top_k, top_p, limited, all_mass, FEW: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest key that `top_k` and then `top_p` keep, int32; and the number of kept tokens with it, int64."""
    key, equals = tl.cast(_NO_KEY - 1, tl.int32), tl.cast(count, tl.int64)
    mass = all_mass
    if limited:
        key, below = _reach(logits, candidates, count, top, temperature, top_k.to(tl.int64), key, FEW, False, BLOCK)
        equals = top_k.to(tl.int64) - below
        under = _upto(logits, candidates, count, top, temperature, key - 1, FEW, True, BLOCK)
        mass = under + equals * _mass(key)
    if top_p < 1.0:
        goal = _goal(top_p, mass)
        least, under = _reach(logits, candidates, count, top, temperature, goal, key, FEW, True, BLOCK)
        each = tl.maximum(_mass(least), 1)
        wanted = tl.maximum((goal - under + each - 1) // each, 1)
        equals = tl.where(least == key, tl.minimum(wanted, equals), wanted)
        key = least
    return key, equals


@triton.jit
def _invert(
    logits,
    candidates,
    ids,
    count,
    top,
    temperature,
    key,
    equals,
    min_p,
    bits,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first token, in the order of ids, at which the mass of kept tokens exceeds u times their total."""
    i = tl.arange(0, BLOCK)
    kept, seen = tl.zeros([BLOCK], tl.int64), tl.cast(0, tl.int64)
    for begin in range(0, count, BLOCK):
        found = _keys(logits, candidates, begin + i, count, top, temperature, FEW)
        mass, seen = _kept(found, key, equals, min_p, seen)
        kept += mass
    total = tl.sum(kept, 0)
    # floor(u * total): the upper half of a product of u's 53 bits, which stand highest, and the total.
    goal = tl.umulhi(bits.to(tl.uint64, bitcast=True) & 0xFFFFFFFFFFFFF800, total.to(tl.uint64)).to(tl.int64)
    token, before, seen = tl.cast(0, tl.int64), tl.cast(0, tl.int64), tl.cast(0, tl.int64)
    for begin in range(0, count, BLOCK):
        found = _keys(logits, candidates, begin + i, count, top, temperature, FEW)
        mass, seen = _kept(found, key, equals, min_p, seen)
        behind = before + tl.cumsum(mass, 0)
        id_ = begin + i
        if FEW:
            id_ = tl.load(ids + id_, mask=id_ < count, other=0)
        here = (behind > goal) & (behind - mass <= goal)
        token += tl.sum(tl.where(here, id_, 0).to(tl.int64), 0)
        before += tl.sum(mass, 0)
    return token


@triton.jit
def _kept(found, key, equals, min_p, seen):
    """The mass of kept tokens, 0 for the others, and the number of tokens with the largest key so far."""
    equal = found == key
    rank = seen + tl.cumsum(equal.to(tl.int64), 0)
    keep = (found < key) | (equal & (rank <= equals))
    keep = keep & (_weight(found) >= min_p)
    return tl.where(keep, _mass(found), 0), seen + tl.sum(equal.to(tl.int64), 0)


@triton.jit
def draw_kernel(
    logits,
    tops,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    bits,
    candidates,
    ids,
    tokens,
    stride,
    chunks,
    vocabulary,
    CHUNKS_BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row; the grid is the rows. A row without a temperature keeps its token."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    if temperature <= 0:
        return
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    min_p, drawn = tl.load(min_ps + row), tl.load(bits + row)
    logits += row * stride
    candidates += row * CANDIDATES
    ids += row * CANDIDATES
    c = tl.arange(0, CHUNKS_BLOCK)
    top = tl.max(tl.load(tops + row * chunks + c, mask=c < chunks, other=float("-inf")), 0)
    limited = (top_k > 0) & (top_k < vocabulary)
    few, count = tl.cast(0, tl.int1), tl.cast(0, tl.int32)
    key, equals = tl.cast(_NO_KEY - 1, tl.int32), tl.cast(vocabulary, tl.int64)
    if limited | (top_p < 1.0):
        i = tl.arange(0, BLOCK)
        histogram = tl.zeros([_BINS], tl.int32)
        masses = tl.zeros([BLOCK], tl.int64)
        for begin in range(0, vocabulary, BLOCK):
            found = _key(logits, begin + i, vocabulary, top, temperature)
            masses += _mass(found)
            histogram += tl.histogram(_bin(found), _BINS, mask=found < _NO_KEY)
        all_mass = tl.sum(masses, 0)
        upto = tl.cumsum(histogram, 0)
        bins = tl.arange(0, _BINS)
        edge = tl.sum((upto < top_k).to(tl.int32), 0)
        if limited == 0:
            edge = tl.sum((upto <= CANDIDATES).to(tl.int32), 0) - 1
        there = tl.sum(tl.where(bins == edge, upto, 0), 0)
        if there <= CANDIDATES:
            masses = tl.zeros([BLOCK], tl.int64)
            for begin in range(0, vocabulary, BLOCK):
                found = _key(logits, begin + i, vocabulary, top, temperature)
                candidate = (found < _NO_KEY) & (_bin(found) <= edge)
                place = count + tl.cumsum(candidate.to(tl.int32), 0) - 1
                tl.store(candidates + place, found, mask=candidate)
                tl.store(ids + place, begin + i, mask=candidate)
                masses += tl.where(candidate, _mass(found), 0)
                count += tl.sum(candidate.to(tl.int32), 0)
            few = (count > 0) & (limited | (tl.sum(masses, 0) >= _goal(top_p, all_mass)))
        # What some threads have stored others read.
        tl.debug_barrier()
        if few:
            key, equals = _filter(
                logits, candidates, count, top, temperature, top_k, top_p, limited, all_mass, True, BLOCK
            )
        else:
            key, equals = _filter(
                logits, candidates, vocabulary, top, temperature, top_k, top_p, limited, all_mass, False, BLOCK
            )
    if few:
        token = _invert(logits, candidates, ids, count, top, temperature, key, equals, min_p, drawn, True, BLOCK)
    else:
        token = _invert(logits, candidates, ids, vocabulary, top, temperature, key, equals, min_p, drawn, False, BLOCK)
    tl.store(tokens + row, token)


@triton.jit
def _bin(key):
    """The bin of a key, int32: bins are equally wide, but for the last one, which has no end."""
    distance = key.to(tl.float32, bitcast=True)
    scaled = tl.where(distance < _BINS / _BINS_A_UNIT, distance * _BINS_A_UNIT, _BINS - 1)
    return tl.minimum(scaled.to(tl.int32), _BINS - 1)


def draw(logits: torch.Tensor, wishes: Wishes, tokens: torch.Tensor) -> None:
    """See `interface.Sampling`."""
    rows, vocabulary = logits.shape
    tops, _, _ = scan(logits)
    chunks = tops.shape[1]
    candidates = torch.empty(2, rows, CANDIDATES, dtype=torch.int32, device=logits.device)
    launch(
        draw_kernel,
        (rows,),
        *(logits, tops, wishes.temperature, wishes.top_k, wishes.top_p, wishes.min_p, wishes.bits),
        *(candidates[0], candidates[1], tokens, logits.stride(0), chunks, vocabulary),
        CHUNKS_BLOCK=power_of_2(chunks),
        CANDIDATES=CANDIDATES,
        BLOCK=_BLOCK,
        num_warps=8,
    )
