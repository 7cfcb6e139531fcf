"""Draws tokens from logits, without a sort. Each row is divided into chunks, which different programs process.

A token's *key* is the bits of its distance from the largest logit, divided by the temperature. No distance is negative,
so keys have the same order as distances. A token's *mass* is its weight in fixed point, so that sums do not depend on
their order. A filter keeps tokens up to a largest key, and a number of tokens with exactly this key, lower ids first.
Bisection finds this key, mostly among a few thousand candidates: the tokens of the first bins of a histogram. If these
are not enough, it searches all tokens, which is slow.

There are three kernels. The first sums masses and builds histograms of chunks, and the second collects candidates. The
third has a program per row, which reads the candidates once and draws. All sums are of integers, so tokens do not
depend on the number of chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forebay.gpu.kernels.launch import cdiv, launch, power_of_2
from forebay.gpu.sampling import FIXED_POINT, Wishes

CANDIDATES = 4096
"""The largest number of candidates of a row."""
_BLOCK = 2048
_LEAST_CHUNK = 8192
"""The smallest number of logits in a chunk."""
_PROGRAMS = 1056
"""The number of programs that fill an H100: eight per streaming multiprocessor."""

_ONE = tl.constexpr(float(1 << FIXED_POINT))
_NO_KEY = tl.constexpr(0x7F800001)  # above the key of weight 0, which an infinite distance has
_BINS = tl.constexpr(128)
_BIN_BITS = tl.constexpr(20)  # the width of a bin in bits of the key: eight bins for each power of 2 of distances
_FIRST_BIN = tl.constexpr((127 - 8) << 3)  # the first bin has distances up to 2^-8


@triton.jit
def _weight(key):
    """Returns exp(-distance) for keys; 0 for `_NO_KEY`."""
    return tl.exp(-tl.minimum(key, _NO_KEY - 1).to(tl.float32, bitcast=True))


@triton.jit
def _mass(key):
    """Returns weights in fixed point, int64."""
    return (_weight(key) * _ONE).to(tl.int64)


@triton.jit
def _key(logits, at, count, top, temperature):
    """Returns the keys of the tokens `at`, int32; `_NO_KEY` for tokens from `count` on."""
    x = tl.load(logits + at, mask=at < count, other=0.0).to(tl.float32)
    distance = tl.math.div_rn(top - x, temperature)
    # The token of a row whose logits are not all finite is not used, but its keys must be ordered.
    distance = tl.where(distance >= 0, distance, float("inf"))
    return tl.where(at < count, distance.to(tl.int32, bitcast=True), _NO_KEY)


@triton.jit
def _upto(
    logits, found, mass, count, top, temperature, key, FEW: tl.constexpr, MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """Returns the number, or with MASS the mass, of tokens whose key is at most `key`; int64.

    FEW: only the candidates count, with the keys `found` and the masses `mass`. Otherwise all tokens count.
    """
    if FEW:
        if MASS:
            total = tl.sum(tl.where(found <= key, mass, 0), 0)
        else:
            total = tl.sum((found <= key).to(tl.int32), 0).to(tl.int64)
    else:
        each = tl.zeros([BLOCK], tl.int64)
        for begin in range(0, count, BLOCK):
            part = _key(logits, begin + tl.arange(0, BLOCK), count, top, temperature)
            value = _mass(part) if MASS else tl.full([BLOCK], 1, tl.int64)
            each += tl.where(part <= key, value, 0)
        total = tl.sum(each, 0)
    return total


@triton.jit
def _reach(
    logits,
    found,
    mass,
    count,
    top,
    temperature,
    goal,
    most,
    FEW: tl.constexpr,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Returns the smallest key, at most `most`, up to which the number or mass of tokens reaches `goal`.

    Also returns the number or mass of the tokens with smaller keys.
    """
    low, high = tl.cast(0, tl.int32), tl.cast(most, tl.int32)
    while low < high:
        # The sum of two keys may overflow int32.
        middle = low + (high - low) // 2
        if _upto(logits, found, mass, count, top, temperature, middle, FEW, MASS, BLOCK) >= goal:
            high = middle
        else:
            low = middle + 1
    return low, _upto(logits, found, mass, count, top, temperature, low - 1, FEW, MASS, BLOCK)


@triton.jit
def _goal(top_p, mass):
    """Returns the smallest integer that is at least `top_p` times `mass`; int64."""
    return tl.ceil(top_p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64)


@triton.jit
def _filter(
    logits,
    found,
    mass,
    count,
    top,
    temperature,
    top_k,
    top_p,
    limited,
    all_mass,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Applies top-k and then top-p. Returns the largest kept key, int32, and how many tokens with it remain, int64."""
    key, equals = tl.cast(_NO_KEY - 1, tl.int32), tl.cast(count, tl.int64)
    if limited:
        key, below = _reach(logits, found, mass, count, top, temperature, top_k.to(tl.int64), key, FEW, False, BLOCK)
        equals = top_k.to(tl.int64) - below
        under = _upto(logits, found, mass, count, top, temperature, key - 1, FEW, True, BLOCK)
        all_mass = under + equals * _mass(key)
    if top_p < 1.0:
        goal = _goal(top_p, all_mass)
        least, under = _reach(logits, found, mass, count, top, temperature, goal, key, FEW, True, BLOCK)
        each = tl.maximum(_mass(least), 1)
        wanted = tl.maximum((goal - under + each - 1) // each, 1)
        equals = tl.where(least == key, tl.minimum(wanted, equals), wanted)
        key = least
    return key, equals


@triton.jit
def _drawn(bits, total):
    """Returns floor(u * total), int64: the upper half of the product of u, in the highest 53 bits, and `total`."""
    return tl.umulhi(bits.to(tl.uint64, bitcast=True) & 0xFFFFFFFFFFFFF800, total.to(tl.uint64)).to(tl.int64)


@triton.jit
def _total(logits, count, top, temperature, key, equals, min_p, BLOCK: tl.constexpr):
    """Returns the mass of all kept tokens, int64."""
    total, seen = tl.zeros([BLOCK], tl.int64), tl.cast(0, tl.int64)
    for begin in range(0, count, BLOCK):
        found = _key(logits, begin + tl.arange(0, BLOCK), count, top, temperature)
        mass, seen = _kept(found, _mass(found), key, equals, min_p, seen)
        total += mass
    return tl.sum(total, 0)


@triton.jit
def _find(logits, first, end, top, temperature, key, equals, min_p, goal, BLOCK: tl.constexpr):
    """Returns the first token of `first .. end` at which the cumulative mass of kept tokens exceeds `goal`; int64."""
    i = tl.arange(0, BLOCK)
    token, before, seen = tl.cast(0, tl.int64), tl.cast(0, tl.int64), tl.cast(0, tl.int64)
    for begin in range(first, end, BLOCK):
        found = _key(logits, begin + i, end, top, temperature)
        mass, seen = _kept(found, _mass(found), key, equals, min_p, seen)
        token += _at(mass, begin + i, goal - before)
        before += tl.sum(mass, 0)
    return token


@triton.jit
def _at(mass, ids, goal):
    """Returns the id at which the cumulative mass first exceeds `goal`; 0 if it does so in another block."""
    behind = tl.cumsum(mass, 0)
    here = (behind > goal) & (behind - mass <= goal)
    return tl.sum(tl.where(here, ids, 0).to(tl.int64), 0)


@triton.jit
def _kept(found, mass, key, equals, min_p, seen):
    """Returns the mass of kept tokens, 0 for other tokens, and the number of tokens so far whose key equals `key`."""
    equal = found == key
    rank = seen + tl.cumsum(equal.to(tl.int64), 0)
    keep = (found < key) | (equal & (rank <= equals))
    keep = keep & (_weight(found) >= min_p)
    return tl.where(keep, mass, 0), seen + tl.sum(equal.to(tl.int64), 0)


@triton.jit
def _bin(key):
    """Returns the bin of a key, int32, in the order of keys."""
    return tl.minimum(tl.maximum((key >> _BIN_BITS) - _FIRST_BIN, 0), _BINS - 1)


@triton.jit
def _top(logits, tokens, row):
    """Returns the largest logit of a row, which greedy sampling has found."""
    return tl.load(logits + tl.load(tokens + row)).to(tl.float32)


@triton.jit
def _edge(histograms, chunks, chunk, top_k, limited, CANDIDATES: tl.constexpr):
    """Returns the last bin of candidates, the number of tokens up to it, and how many are in chunks before `chunk`."""
    bins = tl.arange(0, _BINS)
    histogram, earlier = tl.zeros([_BINS], tl.int32), tl.zeros([_BINS], tl.int32)
    for c in range(chunks):
        found = tl.load(histograms + c * _BINS + bins)
        histogram += found
        earlier += tl.where(c < chunk, found, 0)
    upto = tl.cumsum(histogram, 0)
    edge = tl.sum((upto < top_k).to(tl.int32), 0)
    if limited == 0:
        edge = tl.sum((upto <= CANDIDATES).to(tl.int32), 0) - 1
    there = tl.sum(tl.where(bins == edge, upto, 0), 0)
    return edge, there, tl.sum(tl.where(bins <= edge, earlier, 0), 0)


@triton.jit(do_not_specialize=["chunk_size"])
def masses_kernel(
    logits,
    greedy,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    masses,
    histograms,
    stride,
    vocabulary,
    chunk_size,
    BLOCK: tl.constexpr,
):
    """Stores the mass of a chunk, and its histogram if a filter needs it; grid: rows, chunks.

    Without `top_k` and `top_p`, the mass is that of the tokens that `min_p` keeps. With `top_k` the mass is not used.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if temperature <= 0:
        return
    top_k, min_p = tl.load(top_ks + row), tl.load(min_ps + row)
    limited = (top_k > 0) & (top_k < vocabulary)
    filtered = limited | (tl.load(top_ps + row) < 1.0)
    logits += row * stride
    top = _top(logits, greedy, row)
    i = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.int64)
    histogram = tl.zeros([_BINS], tl.int32)
    for begin in range(chunk * chunk_size, tl.minimum((chunk + 1) * chunk_size, vocabulary), BLOCK):
        found = _key(logits, begin + i, vocabulary, top, temperature)
        if filtered:
            histogram += tl.histogram(_bin(found), _BINS, mask=found < _NO_KEY)
        if limited == 0:
            each = _mass(found)
            if filtered == 0:
                each = tl.where(_weight(found) >= min_p, each, 0)
            mass += each
    at = row * tl.num_programs(1) + chunk
    tl.store(masses + at, tl.sum(mass, 0))
    if filtered:
        tl.store(histograms + at * _BINS + tl.arange(0, _BINS), histogram)


@triton.jit(do_not_specialize=["chunk_size"])
def candidates_kernel(
    logits,
    greedy,
    temperatures,
    top_ks,
    top_ps,
    histograms,
    candidates,
    ids,
    stride,
    vocabulary,
    chunk_size,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the candidates of a chunk after those of earlier chunks, if all of them fit; grid: rows, chunks."""
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature = tl.load(temperatures + row)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    limited = (top_k > 0) & (top_k < vocabulary)
    if (temperature <= 0) | ((limited == 0) & (top_p >= 1.0)):
        return
    edge, there, count = _edge(histograms + row * chunks * _BINS, chunks, chunk, top_k, limited, CANDIDATES)
    if there > CANDIDATES:
        return
    logits += row * stride
    candidates += row * CANDIDATES
    ids += row * CANDIDATES
    top = _top(logits, greedy, row)
    i = tl.arange(0, BLOCK)
    for begin in range(chunk * chunk_size, tl.minimum((chunk + 1) * chunk_size, vocabulary), BLOCK):
        found = _key(logits, begin + i, vocabulary, top, temperature)
        candidate = (found < _NO_KEY) & (_bin(found) <= edge)
        number = tl.sum(candidate.to(tl.int32), 0)
        # Most blocks have no candidates.
        if number > 0:
            place = count + tl.cumsum(candidate.to(tl.int32), 0) - 1
            tl.store(candidates + place, found, mask=candidate)
            tl.store(ids + place, begin + i, mask=candidate)
            count += number


@triton.jit(do_not_specialize=["chunks", "chunk_size"])
def draw_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    bits,
    masses,
    histograms,
    candidates,
    ids,
    tokens,
    stride,
    vocabulary,
    chunks,
    chunk_size,
    CHUNKS_BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draws the token of one row; grid: rows. A row without a temperature keeps its token."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    if temperature <= 0:
        return
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    min_p, drawn = tl.load(min_ps + row), tl.load(bits + row)
    logits += row * stride
    top = _top(logits, tokens, row)
    limited = (top_k > 0) & (top_k < vocabulary)
    c = tl.arange(0, CHUNKS_BLOCK)
    chunk_mass = tl.load(masses + row * chunks + c, mask=c < chunks, other=0)
    all_mass = tl.sum(chunk_mass, 0)
    if limited | (top_p < 1.0):
        _, count, _ = _edge(histograms + row * chunks * _BINS, chunks, 0, top_k, limited, CANDIDATES)
        few = (count > 0) & (count <= CANDIDATES)
        i = tl.arange(0, CANDIDATES)
        mine = i < tl.where(few, count, 0)
        found = tl.load(candidates + row * CANDIDATES + i, mask=mine, other=_NO_KEY)
        mass = _mass(found)
        if limited == 0:
            few = few & (tl.sum(mass, 0) >= _goal(top_p, all_mass))
        if few:
            key, equals = _filter(
                logits, found, mass, count, top, temperature, top_k, top_p, limited, all_mass, True, BLOCK
            )
            kept, _seen = _kept(found, mass, key, equals, min_p, 0)
            id_ = tl.load(ids + row * CANDIDATES + i, mask=mine, other=0)
            token = _at(kept, id_, _drawn(drawn, tl.sum(kept, 0)))
        else:
            key, equals = _filter(
                logits, found, mass, vocabulary, top, temperature, top_k, top_p, limited, all_mass, False, BLOCK
            )
            goal = _drawn(drawn, _total(logits, vocabulary, top, temperature, key, equals, min_p, BLOCK))
            token = _find(logits, 0, vocabulary, top, temperature, key, equals, min_p, goal, BLOCK)
    else:
        # Find the chunk in which the mass reaches the goal, then the token.
        goal = _drawn(drawn, all_mass)
        behind = tl.cumsum(chunk_mass, 0)
        here = (behind > goal) & (behind - chunk_mass <= goal)
        chunk = tl.sum(tl.where(here, c, 0), 0)
        goal -= tl.sum(tl.where(here, behind - chunk_mass, 0), 0)
        key, equals = tl.cast(_NO_KEY - 1, tl.int32), tl.cast(vocabulary, tl.int64)
        first = chunk * chunk_size
        end = tl.minimum(first + chunk_size, vocabulary)
        token = _find(logits, first, end, top, temperature, key, equals, min_p, goal, BLOCK)
    tl.store(tokens + row, token)


def draw(logits: torch.Tensor, wishes: Wishes, tokens: torch.Tensor) -> None:
    """See `interface.Sampling`."""
    rows, vocabulary = logits.shape
    most = cdiv(vocabulary, _LEAST_CHUNK)
    # Every program of a row reads the histograms of all chunks of the row, so use no more chunks than fill the device.
    chunk_size = cdiv(cdiv(vocabulary, min(most, cdiv(_PROGRAMS, rows))), _BLOCK) * _BLOCK
    chunks = cdiv(vocabulary, chunk_size)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    masses = empty(rows, chunks, dtype=torch.int64)
    histograms, candidates = empty(rows, chunks, _BINS.value), empty(2, rows, CANDIDATES)
    launch(
        masses_kernel,
        (rows, chunks),
        *(logits, tokens, wishes.temperature, wishes.top_k, wishes.top_p, wishes.min_p),
        *(masses, histograms, logits.stride(0), vocabulary, chunk_size),
        BLOCK=_BLOCK,
        num_warps=8,
    )
    launch(
        candidates_kernel,
        (rows, chunks),
        *(logits, tokens, wishes.temperature, wishes.top_k, wishes.top_p),
        *(histograms, candidates[0], candidates[1], logits.stride(0), vocabulary, chunk_size),
        CANDIDATES=CANDIDATES,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    launch(
        draw_kernel,
        (rows,),
        *(logits, wishes.temperature, wishes.top_k, wishes.top_p, wishes.min_p, wishes.bits),
        *(masses, histograms, candidates[0], candidates[1], tokens, logits.stride(0), vocabulary, chunks, chunk_size),
        CHUNKS_BLOCK=power_of_2(most),
        CANDIDATES=CANDIDATES,
        BLOCK=_BLOCK,
        num_warps=16,
        # Without this limit, the compiler uses 64 registers and spills.
        maxnreg=128,
    )
