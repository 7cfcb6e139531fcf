"""Blocks of GGUF's types without kernels, converted to blocks of a type with kernels."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import Q4_K, dequantize, quantize

from forebay.weights.quantization import SHARED

__all__ = ["Bytes", "as_blocks", "mxfp4_blocks"]

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

_SUPER = 256
"""Positions of a super-block of the K types (https://github.com/ggml-org/llama.cpp/pull/1684)."""
_SAME_SCALE = ("Q4_0", "Q5_0", "IQ4_NL")
"""Types of signed codes with one scale for `SHARED` positions, like Q8_0, but with fewer bits."""


def as_blocks(data: Bytes, stored: str, kind: str) -> Bytes:
    """Rows [rows, bytes] of the type `stored` in blocks of type `kind`.

    If the type is the same, they are `data`. Q4_K as Q4_1 and IQ4_XS as IQ4_NL keep their codes, and their scales are
    rounded to half precision. Q4_0, Q5_0 and IQ4_NL as Q8_0 are exact. Any other type as Q8_0 is rounded to the nearest
    of 255 steps.
    """
    if stored == kind:
        return data
    rows = len(data)
    if stored == "Q4_K" and kind == "Q4_1":
        return _q4_k_as_q4_1(data).reshape(rows, -1)
    if stored == "IQ4_XS" and kind == "IQ4_NL":
        return _iq4_xs_as_iq4_nl(data).reshape(rows, -1)
    if kind != "Q8_0":
        raise ValueError(f"{stored} as {kind}")
    values = dequantize(data, GGMLQuantizationType[stored])
    if stored in _SAME_SCALE:
        return _with_scales(values, data).reshape(rows, -1)
    return np.asarray(quantize(values, GGMLQuantizationType.Q8_0), np.uint8).reshape(rows, -1)


def _q4_k_as_q4_1(data: Bytes) -> Bytes:
    blocks = data.reshape(-1, 4 + Q4_K.K_SCALE_SIZE + _SUPER // 2)
    both = blocks[:, :4].copy().view(np.float16).astype(np.float32)
    scales, least = Q4_K.get_scale_min(blocks[:, 4 : 4 + Q4_K.K_SCALE_SIZE])
    factors = np.stack([both[:, :1] * scales, -both[:, 1:] * least], axis=-1).astype(np.float16)
    # Bytes hold codes of two sub-blocks there, and of the two halves of one block here.
    pairs = blocks[:, 4 + Q4_K.K_SCALE_SIZE :].reshape(-1, _SUPER // SHARED // 2, 1, SHARED)
    codes = (pairs >> np.array([0, 4], np.uint8)[:, None]) & np.uint8(15)
    half = SHARED // 2
    packed = codes[..., :half] | codes[..., half:] << np.uint8(4)
    return np.concatenate([factors.reshape(-1, 2).view(np.uint8), packed.reshape(-1, half)], axis=1)


def _iq4_xs_as_iq4_nl(data: Bytes) -> Bytes:
    blocks = data.reshape(-1, 8 + _SUPER // 2)
    parts = _SUPER // SHARED
    of_block = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    high = blocks[:, 2:4].copy().view(np.uint16) >> (2 * np.arange(parts, dtype=np.uint16))
    low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8)).reshape(-1, parts) & np.uint8(15)
    scales = (low | (high.astype(np.uint8) & np.uint8(3)) << np.uint8(4)).astype(np.int8) - np.int8(32)
    factors = (of_block * scales).astype(np.float16).reshape(-1, 1)
    return np.concatenate([factors.view(np.uint8), blocks[:, 8:].reshape(-1, SHARED // 2)], axis=1)


def mxfp4_blocks(codes: Bytes, exponents: Bytes) -> Bytes:
    """Rows in blocks of MXFP4 from those of safetensors: codes [rows, blocks * 16] and exponents [rows, blocks].

    Neighbours share a byte there, and numbers of the two halves of a block share one in GGUF's blocks.
    """
    half = SHARED // 2
    numbers = (codes.reshape(*exponents.shape, half, 1) >> np.array([0, 4], np.uint8)) & np.uint8(15)
    halves = numbers.reshape(*exponents.shape, 2, half)
    joined = halves[..., 0, :] | halves[..., 1, :] << np.uint8(4)
    return np.concatenate([exponents[..., None], joined], axis=-1).reshape(len(codes), -1)


def _with_scales(values: np.ndarray[Any, np.dtype[np.float32]], data: Bytes) -> Bytes:
    """Blocks of Q8_0 with the scales that `data`'s blocks begin with."""
    values = values.reshape(-1, SHARED)
    scales = data.reshape(len(values), -1)[:, :2].copy()
    steps = scales.view(np.float16).astype(np.float32)
    codes = np.divide(values, steps, out=np.zeros_like(values), where=steps != 0)
    return np.concatenate([scales, np.rint(codes).astype(np.int8).view(np.uint8)], axis=1)
