"""The inputs of one head of a recurrent state for some tokens, used by several kernels. All values are float32."""

from __future__ import annotations

import triton
import triton.language as tl

from forebay.gpu.recurrent import StateHeads, StateWeights

_EPSILON: tl.constexpr = tl.constexpr(1e-6)
"""The term added under the square root of a key's norm."""


@triton.jit
def softplus(x):
    """log(1 + exp(x)). The quotient corrects the rounding error of the sum with 1 (Kahan). Above 20 the result is x."""
    power = tl.exp(tl.minimum(x, 20.0))
    sum_ = 1.0 + power
    lost = tl.where(sum_ == 1.0, 1.0, sum_ - 1.0)
    small = tl.where(sum_ == 1.0, power, tl.log(sum_) * (power / lost))
    return tl.where(x > 20.0, x, small)


@triton.jit
def key_head_of(head, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, TILED: tl.constexpr):
    """Returns the key head that a value head uses."""
    if TILED:
        found = head % KEY_HEADS
    else:
        found = head // (HEADS // KEY_HEADS)
    return found


@triton.jit
def unit_rows(x, DELTA: tl.constexpr):
    """Scales rows to norm 1 if there is a delta rule; otherwise returns them unchanged."""
    if DELTA:
        x = x * tl.rsqrt(tl.sum(x * x, 1) + _EPSILON)[:, None]
    return x


@triton.jit
def strengths_of(a, b, step_bias, token, inside, a_stride, b_stride, head, DELTA: tl.constexpr):
    """Returns the factors of the term that is added to the state: strengths of the delta rule, or steps."""
    if DELTA:
        found = tl.sigmoid(tl.load(b + token * b_stride + head, mask=inside, other=0.0).to(tl.float32))
    else:
        found = tl.load(a + token * a_stride + head, mask=inside, other=0.0).to(tl.float32)
        found = softplus(found + tl.load(step_bias + head))
    return tl.where(inside, found, 0.0)


@triton.jit
def head_decays(a, decay, step_bias, token, inside, a_stride, head):
    """Returns the logarithms of a head's decays at tokens."""
    steps = tl.load(a + token * a_stride + head, mask=inside, other=0.0).to(tl.float32) + tl.load(step_bias + head)
    return tl.where(inside, -tl.exp(tl.load(decay + head)) * softplus(steps), 0.0)


@triton.jit
def channel_decays(a, decay, step_bias, token, mask, a_stride, head, k, KEY_DIM: tl.constexpr):
    """Returns the logarithms of per-channel decays, a row per token."""
    at = head * KEY_DIM + k
    bias = tl.load(step_bias + at, mask=k < KEY_DIM, other=0.0)
    steps = tl.load(a + token[:, None] * a_stride + at[None, :], mask=mask, other=0.0).to(tl.float32) + bias[None, :]
    return tl.where(mask, -tl.exp(tl.load(decay + head)) * softplus(steps), 0.0)


@triton.jit
def advance_one(
    state,
    mixed,
    a,
    b,
    decay,
    step_bias,
    skip,
    out,
    token,
    mixed_stride,
    a_stride,
    b_stride,
    head,
    v,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    TILED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    K: tl.constexpr,
    CHANNELS: tl.constexpr,
    DELTA: tl.constexpr,
    SKIP: tl.constexpr,
):
    """Advances the state [K, values] by a token and returns it. Stores the token's output."""
    k = tl.arange(0, K)
    in_key, in_value = k < KEY_DIM, v < VALUE_DIM
    row = mixed + token * mixed_stride
    own = key_head_of(head, HEADS, KEY_HEADS, TILED) * KEY_DIM + k
    query = tl.load(row + own, mask=in_key, other=0.0).to(tl.float32)
    key = tl.load(row + KEY_HEADS * KEY_DIM + own, mask=in_key, other=0.0).to(tl.float32)
    value = tl.load(row + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v, mask=in_value, other=0.0).to(tl.float32)
    step_at = head * KEY_DIM + k if CHANNELS else head + k * 0
    steps = tl.load(a + token * a_stride + step_at, mask=in_key, other=0.0).to(tl.float32)
    steps = softplus(steps + tl.load(step_bias + step_at, mask=in_key, other=0.0))
    state = state * tl.exp(-tl.exp(tl.load(decay + head)) * steps)[:, None]
    if DELTA:
        query = query * (tl.rsqrt(tl.sum(query * query, 0) + _EPSILON) * KEY_DIM**-0.5)
        key = key * tl.rsqrt(tl.sum(key * key, 0) + _EPSILON)
        strength = tl.sigmoid(tl.load(b + token * b_stride + head).to(tl.float32))
        added = strength * (value - tl.sum(key[:, None] * state, 0))
    else:
        first = tl.load(a + token * a_stride + head).to(tl.float32) + tl.load(step_bias + head)
        added = softplus(first) * value
    state += key[:, None] * added[None, :]
    made = tl.sum(query[:, None] * state, 0)
    if SKIP:
        made += tl.load(skip + head) * value
    tl.store(out + (token * HEADS + head) * VALUE_DIM + v, made, mask=in_value)
    return state


def constants(shape: StateHeads, weights: StateWeights) -> dict[str, int | bool]:
    """Returns the constants of kernels for such heads."""
    return {
        "HEADS": shape.heads,
        "KEY_HEADS": shape.key_heads,
        "TILED": shape.tiled,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
        "CHANNELS": shape.channel_decay,
        "DELTA": shape.delta,
        "SKIP": weights.skip is not None,
    }
