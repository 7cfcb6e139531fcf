"""Causal convolutions of each channel, continued from the last inputs of a row's slot.

If each row has one token, one kernel is enough. Otherwise one kernel computes the outputs of all tokens, and then a
second kernel stores the last inputs of each row. Storing them overwrites inputs of the first kernel, so it can't be
done there.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from forebay.gpu.kernels.gating import silu
from forebay.gpu.kernels.launch import cdiv, launch, power_of_2
from forebay.gpu.recurrent import StateRows

_TOKENS = 8
_CHANNELS = 128
_ROW_CHANNELS = 256


@triton.jit
def _input(x, before, at, mask, GATED: tl.constexpr):
    """Loads inputs of the convolution as float32, rounded to the stored type; with gates, times the first gate."""
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        value *= tl.load(before + at, mask=mask, other=0.0).to(tl.float32)
        value = value.to(x.dtype.element_ty).to(tl.float32)
    return value


@triton.jit
def _output(total, x, behind, at, mask, SILU: tl.constexpr, GATED: tl.constexpr):
    """Returns the rounded sum, to which the activation or the gate was applied."""
    out = total.to(x.dtype.element_ty).to(tl.float32)
    if SILU:
        out = silu(out)
    if GATED:
        out *= tl.load(behind + at, mask=mask, other=0.0).to(tl.float32)
    return out


@triton.jit(do_not_specialize=["tokens", "rows"])
def tokens_kernel(
    x,
    before,
    behind,
    weight,
    bias,
    table,
    out,
    first,
    of_token,
    places,
    tokens,
    rows,
    x_stride,
    place_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    GATED: tl.constexpr,
):
    """Computes outputs of T tokens and C channels; grid: blocks of tokens, blocks of channels."""
    t = tl.program_id(0) * T + tl.arange(0, T)
    c = tl.program_id(1) * C + tl.arange(0, C)
    channel = (c < CHANNELS)[None, :]
    row = tl.load(of_token + t, mask=t < tokens, other=rows)
    somebody = row < rows
    begin = tl.load(first + row, mask=somebody, other=0)
    source = tl.load(places + row * place_stride, mask=somebody, other=-1).to(tl.int64)
    total = tl.zeros([T, C], tl.float32)
    if BIAS:
        total += tl.load(bias + c, mask=c < CHANNELS, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        at = t - (TAPS - 1) + tap
        here = (somebody & (at >= begin))[:, None] & channel
        value = _input(x, before, at.to(tl.int64)[:, None] * x_stride + c[None, :], here, GATED)
        old = (source * (TAPS - 1) + (TAPS - 1) + at - begin)[:, None] * CHANNELS + c[None, :]
        earlier = (somebody & (at < begin) & (source >= 0))[:, None] & channel
        value += tl.load(table + old, mask=earlier, other=0.0).to(tl.float32)
        total += value * tl.load(weight + c * TAPS + tap, mask=c < CHANNELS, other=0.0).to(tl.float32)[None, :]
    own = somebody[:, None] & channel
    made = _output(total, x, behind, t.to(tl.int64)[:, None] * x_stride + c[None, :], own, SILU, GATED)
    made = tl.where(somebody[:, None], made, 0.0)
    tl.store(out + t.to(tl.int64)[:, None] * CHANNELS + c[None, :], made, mask=(t < tokens)[:, None] & channel)


@triton.jit
def _of_window(
    x,
    before,
    table,
    source,
    begin,
    at,
    x_stride,
    c,
    channel,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    GATED: tl.constexpr,
):
    """Loads element `at` of the concatenation of a row's last inputs and its tokens' inputs."""
    old = source * (TAPS - 1) + at
    earlier = channel & ((c * 0 + at) < TAPS - 1) & ((c * 0 + source) >= 0)
    value = tl.load(table + old * CHANNELS + c, mask=earlier, other=0.0).to(tl.float32)
    own = (begin + at - (TAPS - 1)).to(tl.int64)
    return value + _input(x, before, own * x_stride + c, channel & ((c * 0 + at) >= TAPS - 1), GATED)


@triton.jit
def rows_kernel(
    x,
    before,
    behind,
    weight,
    bias,
    table,
    out,
    first,
    places,
    x_stride,
    place_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    C: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    GATED: tl.constexpr,
    SINGLE: tl.constexpr,
):
    """Stores the last inputs of a row, and with SINGLE computes its token's output; grid: rows, blocks of channels.

    Elements move to lower indices, the lowest first, and one thread handles a channel. So lines may be overwritten in
    place.
    """
    row = tl.program_id(0)
    begin = tl.load(first + row)
    count = tl.load(first + row + 1) - begin
    if count == 0:
        return
    place = places + row * place_stride
    source = tl.load(place).to(tl.int64)
    kept = tl.load(place + 1).to(tl.int64)
    target = tl.load(place + 2).to(tl.int64)
    c = tl.program_id(1) * C + tl.arange(0, C)
    channel = c < CHANNELS
    if SINGLE:
        total = tl.zeros([C], tl.float32)
        if BIAS:
            total += tl.load(bias + c, mask=channel, other=0.0).to(tl.float32)
        for tap in tl.static_range(TAPS):
            value = _of_window(x, before, table, source, begin, tap, x_stride, c, channel, CHANNELS, TAPS, GATED)
            total += value * tl.load(weight + c * TAPS + tap, mask=channel, other=0.0).to(tl.float32)
        made = _output(total, x, behind, begin.to(tl.int64) * x_stride + c, channel, SILU, GATED)
        tl.store(out + begin.to(tl.int64) * CHANNELS + c, made, mask=channel)
    for i in tl.static_range(TAPS - 1):
        value = _of_window(x, before, table, source, begin, i + count, x_stride, c, channel, CHANNELS, TAPS, GATED)
        tl.store(table + (target * (TAPS - 1) + i) * CHANNELS + c, value, mask=channel)
    if kept != target:
        for i in tl.static_range(TAPS - 1):
            value = _of_window(
                x, before, table, source, begin, i + count - 1, x_stride, c, channel, CHANNELS, TAPS, GATED
            )
            tl.store(table + (kept * (TAPS - 1) + i) * CHANNELS + c, value, mask=channel)


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    table: torch.Tensor,
    rows: StateRows,
    *,
    silu: bool = False,
    gates: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """See `interface.Recurrences`."""
    tokens, channels = x.shape
    out = x.new_empty(tokens, channels)
    before, behind = (x, x) if gates is None else gates
    count = len(rows.places)
    options: dict[str, Any] = {
        "CHANNELS": channels,
        "TAPS": weight.shape[1],
        "BIAS": bias is not None,
        "SILU": silu,
        "GATED": gates is not None,
        "num_warps": 4,
    }
    pointers = x, before, behind, weight, weight if bias is None else bias, table, out, rows.first
    strides = x.stride(0), rows.places.stride(0)
    if rows.chunks:
        block = min(_CHANNELS, power_of_2(channels))
        grid = cdiv(tokens, _TOKENS), cdiv(channels, block)
        more = rows.of_token, rows.places, tokens, count, *strides
        launch(tokens_kernel, grid, *pointers, *more, T=_TOKENS, C=block, **options)
    block = min(_ROW_CHANNELS, power_of_2(channels))
    grid = count, cdiv(channels, block)
    launch(rows_kernel, grid, *pointers, rows.places, *strides, C=block, SINGLE=not rows.chunks, **options)
    return out
