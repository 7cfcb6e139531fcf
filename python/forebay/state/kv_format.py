"""The forms of keys and values in pages."""

from __future__ import annotations

from enum import Enum

import torch

from forebay.weights.parts import GroupedQuery
from forebay.weights.quantization import SHARED

SCALE_BYTES = 2


class KvFormat(Enum):
    """The form of keys and values in pages. The value is its name in the handshake."""

    PLAIN = None
    """Elements of the model's type."""
    INT8 = "int8"
    """Integers of 8 bits, and a bfloat16 scale for `SHARED` of them. Only the CPU's compiled kernels know the order
    (`crates/kernels/src/pages/codes.rs`)."""
    FP8 = "fp8_e4m3"
    """8-bit floats without scales, for the operators of `forebay.gpu`."""

    def entry(self, heads: GroupedQuery, dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and the type of the keys, or of the values, of one position in one layer. `dtype`: the model's."""
        if self is KvFormat.INT8:
            return (heads.kv_heads * (heads.head_dim + heads.head_dim // SHARED * SCALE_BYTES),), torch.uint8
        return (heads.kv_heads, heads.head_dim), torch.uint8 if self is KvFormat.FP8 else dtype
