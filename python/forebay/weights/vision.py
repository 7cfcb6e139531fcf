"""Models with images: the shape of their vision tower, their rotary positions, and the input of the tower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = ["TOWER", "Preprocessing", "Sections", "Vision"]

TOWER = "visual"
"""The prefix of the names of a tower's weights."""
_CHANNELS = 3


@dataclass(frozen=True)
class Vision:
    """A vision tower (Qwen2.5-VL, Qwen3-VL, Gemma 3, 2025). Sizes are numbers of elements, patches or pixels."""

    kind: str
    """`windows`: of Qwen2.5-VL; `table`: of Qwen3-VL and Qwen3.5; `siglip`: of Gemma 3."""
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    patch: int
    """Pixels of a side of a patch."""
    temporal: int
    """The number of times that a patch of a still image is repeated."""
    merge: int
    """The side of a square of patches that becomes one position of the decoder."""
    out_size: int
    """Elements of a position's row for the decoder, the size of its states."""
    theta: float | None
    """The base of its rotary frequencies; None: no rotation."""
    norm_eps: float
    """The epsilon of its norms."""
    both_ways: bool
    """True if an image's positions in the decoder attend to each other, later ones included."""
    deepstack: tuple[int, ...] = ()
    """Layers whose states are also added after the decoder's first layers (DeepStack, 2024)."""
    table_side: int | None = None
    """Rows and columns of the learned table of positions; None: there is none."""
    window: int | None = None
    """The side of a window in decoder positions; None: every layer attends to the whole image."""
    whole: tuple[int, ...] = ()
    """The layers that attend to the whole image; the others attend within windows."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Vision:
        """Reads `tower` of a shape."""
        chosen = {field.name: values[field.name] for field in fields(cls)}
        return cls(**{**chosen, "deepstack": tuple(chosen["deepstack"]), "whole": tuple(chosen["whole"])})

    @property
    def fixed_side(self) -> int | None:
        """Rows and columns of decoder positions of every image; None: they depend on the image's size."""
        return self.table_side // self.merge if self.kind == "siglip" and self.table_side is not None else None

    @property
    def patch_bytes(self) -> int:
        """Bytes of a patch: three colours of each pixel, once."""
        return _CHANNELS * self.patch**2

    @property
    def channels(self) -> int:
        """Colours of a pixel."""
        return _CHANNELS

    @property
    def position_elements(self) -> int:
        """Elements of one position on an image page."""
        return self.out_size * (1 + len(self.deepstack))


@dataclass(frozen=True)
class Sections:
    """How a position's three numbers are divided among the rotary frequencies (M-RoPE, Qwen2-VL, 2024)."""

    counts: tuple[int, int, int]
    """Frequencies of time, row and column."""
    interleaved: bool
    """True if rows and columns take every third of the first frequencies, and time the rest.

    Otherwise each takes one contiguous range.
    """

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Sections:
        """Reads `sections` of a shape's rotary embedding."""
        time, row, column = values["counts"]
        return cls((time, row, column), values["interleaved"])

    def axes(self, frequencies: int) -> list[int]:
        """The number that each frequency uses: 0 time, 1 row, 2 column."""
        if not self.interleaved:
            return [axis for axis, count in enumerate(self.counts) for _ in range(count)]
        axes = [0] * frequencies
        for axis in (1, 2):
            for at in range(axis, min(3 * self.counts[axis], frequencies), 3):
                axes[at] = axis
        return axes


@dataclass(frozen=True)
class Preprocessing:
    """The conversion of an image to a tower's input. A decoder of images needs all fields."""

    patch: int
    merge: int
    temporal: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    """The mean of each colour, for colours in 0 .. 1. It is subtracted."""
    std: tuple[float, float, float]
    """The divisor of the differences."""
    rescale: float
    """The factor that maps 0 .. 255 to 0 .. 1."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preprocessing:
        """Reads the output of `to_dict`; further keys are ignored."""
        chosen = {field.name: values[field.name] for field in fields(cls)}
        return cls(**{**chosen, "mean": tuple(chosen["mean"]), "std": tuple(chosen["std"])})

    def to_dict(self) -> dict[str, Any]:
        """The preprocessing, in JSON's types."""
        return asdict(self)

    @property
    def most_positions(self) -> int:
        """Decoder positions of the largest image."""
        return self.max_pixels // (self.patch * self.merge) ** 2
