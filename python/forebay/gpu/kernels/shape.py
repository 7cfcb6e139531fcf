"""The sizes of attention tiles per program, derived from the shape of heads and the type of their elements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from forebay.gpu.kernels.launch import cdiv, dot_type, is_roomy, power_of_2

LOG2_E = math.log2(math.e)
LEAST_DOT = 16
"""The smallest size of each of the three dimensions of a tensor core product."""
_MOST_SPLITS = 32


@dataclass(frozen=True)
class Tiles:
    """The size of a program's tile: `m` queries of one key head by `tile` positions."""

    m: int
    tile: int
    warps: int
    stages: int
    programs: int = 264
    """The number of programs that fill an H100."""

    def options(self) -> dict[str, Any]:
        """Returns the options of a launch."""
        return {"TILE": self.tile, "num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True)
class Shape:
    """The shape of heads: the number of query heads, how many share a key head (`group`), and their elements."""

    heads: int
    group: int
    dim: int
    extra: int
    """The number of elements of a key after those that are also its value."""
    dtype: torch.dtype
    """The type of queries, and of products."""
    eight_bits: bool
    """True if keys and values are 8-bit floats, whose conversion needs registers."""
    roomy: bool
    """The result of `launch.is_roomy` for the device."""

    @classmethod
    def of(cls, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Shape:
        """Returns the shape of queries [n, heads, head_dim], and of keys and values [entries, kv_heads, head_dim]."""
        dim = values.shape[2]
        group = q.shape[1] // keys.shape[1]
        return cls(
            q.shape[1], group, dim, keys.shape[2] - dim, q.dtype, keys.dtype == torch.uint8, is_roomy(keys.device)
        )

    @property
    def kv_heads(self) -> int:
        """The number of key heads, which is also the number of value heads."""
        return self.heads // self.group

    def constants(self) -> dict[str, Any]:
        """Returns the constants of kernels that use `walk`."""
        return {
            "HEADS": self.heads,
            "GROUP": self.group,
            "DIM": self.dim,
            "DIM_BLOCK": max(power_of_2(self.dim), LEAST_DOT),
            "EXTRA": self.extra,
            "EXTRA_BLOCK": max(power_of_2(self.extra), LEAST_DOT),
            "SHARED": self.extra > 0,
            "DOT": dot_type(self.dtype),
        }

    def decode_tiles(self) -> Tiles:
        """Returns the tiles for rows of one token."""
        if self.dtype == torch.float32:
            if self.eight_bits:
                return Tiles(LEAST_DOT, 16, 8, 1)
            return Tiles(LEAST_DOT, 16 if self.dim > 256 else 32, 8, 2)
        m = max(LEAST_DOT, min(power_of_2(self.group), 32))
        # The page lookup takes three pipeline stages: only with five or more stages, the next keys and values are
        # loaded while a tile is computed.
        stages = 5 if self.roomy else 2
        if self.dim > 256:
            return Tiles(m, 64 if self.roomy else 32, 8, stages)
        if self.roomy and self.dim <= 128 and not self.eight_bits:
            return Tiles(m, 32, 4, stages, 528)
        return Tiles(m, 64, 8 if self.eight_bits else 4, stages)

    def chunk_tiles(self) -> Tiles:
        """Returns the tiles for rows of several tokens, as large as registers allow."""
        if self.dtype == torch.float32:
            if self.eight_bits:
                return Tiles(16, 16, 4, 1) if self.dim > 128 else Tiles(32, 16, 8, 1)
            if self.dim > 128:
                return Tiles(16, 16 if self.dim > 256 else 32, 8, 1)
            return Tiles(32, 32, 8, 2)
        if self.dim > 256:
            return Tiles(32, 64 if self.roomy else 32, 8, 2)
        if self.dim > 128 or (self.eight_bits and not self.roomy):
            return Tiles(64, 64 if self.roomy else 32, 8, 2)
        if self.roomy and not self.eight_bits:
            return Tiles(128, 128, 8, 3)
        return Tiles(128, 128 if self.roomy else 32, 8, 2)

    def blocks(self, tiles: Tiles) -> int:
        """Returns the number of programs for all heads of a row of one token."""
        return self.kv_heads * cdiv(self.group, tiles.m)


@dataclass(frozen=True)
class Scoring:
    """The conversion of a query-key product to a score, which is an exponent of 2."""

    scale: float
    """The factor of query-key products. With a cap, it converts them to units of the cap."""
    window: int
    cap: float
    """The soft cap of scores; 0: no cap."""
    sinks: torch.Tensor | None
    """An additional logit per head, a sink without a value; None: no sinks."""

    @classmethod
    def new(cls, scale: float, window: int, cap: float, sinks: torch.Tensor | None) -> Scoring:
        """Converts the arguments of `interface.Attention.attend`."""
        if cap > 0:
            return cls(scale / cap, window, cap * LOG2_E, sinks)
        return cls(scale * LOG2_E, window, 0.0, sinks)

    def constants(self) -> dict[str, Any]:
        """Returns the constants of kernels that use `walk`."""
        return {"WINDOW": self.window, "CAP": self.cap, "SINKS": self.sinks is not None}


def splits(programs: int, fill: int) -> int:
    """Returns the number of parts into which each query's rows are split.

    A part needs `programs` programs, and `fill` programs fill a GPU. The result is a power of 2, to limit the number of
    kernel variants.
    """
    most = max(1, min(_MOST_SPLITS, fill // programs))
    return 1 << (most.bit_length() - 1)
