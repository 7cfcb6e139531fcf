"""The formats of keys and values in pages."""

from __future__ import annotations

from enum import Enum

import torch

from forebay.weights.parts import GroupedQuery


class KvFormat(Enum):
    """The format of keys and values in pages. The value is its name in the handshake."""

    PLAIN = None
    """Elements of the model's type."""
    FP8 = "fp8_e4m3"
    """8-bit floats without scales, for the operators of `forebay.gpu`."""

    def entry(self, heads: GroupedQuery, dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
        """Returns the shape and type of the keys, or values, of a position in a layer. `dtype`: the model's."""
        return (heads.kv_heads, heads.head_dim), torch.uint8 if self is KvFormat.FP8 else dtype
