"""Models with images: the shape of the vision tower, RoPE with three axes, and image preprocessing."""

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
    """A vision tower (Qwen2.5-VL, Qwen3-VL, Gemma 3, 2025). Sizes count elements, patches or pixels."""

    kind: str
    """`windows`: of Qwen2.5-VL; `table`: of Qwen3-VL and Qwen3.5; `siglip`: of Gemma 3."""
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    patch: int
    """The side of a patch, in pixels."""
    temporal: int
    """The number of times that a patch of a still image is repeated."""
    merge: int
    """The side of the square of patches that are merged into one decoder position."""
    out_size: int
    """Elements of the tower's output per position: the hidden size of the decoder."""
    theta: float | None
    """The base of the tower's rotary frequencies; None: no rotation."""
    norm_eps: float
    """The epsilon of the tower's norms."""
    both_ways: bool
    """True if an image's positions attend to each other in the decoder, also to later positions."""
    deepstack: tuple[int, ...] = ()
    """Tower layers whose states are also added after the first decoder layers (DeepStack, 2024)."""
    table_side: int | None = None
    """The number of rows and columns of the learned table of positions; None: there is no table."""
    window: int | None = None
    """The side of a window in decoder positions; None: every layer attends to the whole image."""
    whole: tuple[int, ...] = ()
    """The layers that attend to the whole image; the others attend within windows."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Vision:
        """Reads the field `tower` of a shape."""
        chosen = {field.name: values[field.name] for field in fields(cls)}
        return cls(**{**chosen, "deepstack": tuple(chosen["deepstack"]), "whole": tuple(chosen["whole"])})

    @property
    def fixed_side(self) -> int | None:
        """The number of rows (and of columns) of decoder positions of every image; None: it depends on the image."""
        return self.table_side // self.merge if self.kind == "siglip" and self.table_side is not None else None

    @property
    def patch_bytes(self) -> int:
        """The number of bytes of a patch: three colours per pixel, without repetition."""
        return _CHANNELS * self.patch**2

    @property
    def channels(self) -> int:
        """The number of colours of a pixel."""
        return _CHANNELS

    @property
    def position_elements(self) -> int:
        """The number of elements per position on an image page."""
        return self.out_size * (1 + len(self.deepstack))


@dataclass(frozen=True)
class Sections:
    """How RoPE frequencies are divided among the three numbers of a position (M-RoPE, Qwen2-VL, 2024)."""

    counts: tuple[int, int, int]
    """How many frequencies time, row and column use."""
    interleaved: bool
    """True if row and column each use every third of the first frequencies, and time the rest.

    Otherwise time, row and column each use one contiguous range.
    """

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Sections:
        """Reads the field `sections` of a shape's rotary embedding."""
        time, row, column = values["counts"]
        return cls((time, row, column), values["interleaved"])

    def axes(self, frequencies: int) -> list[int]:
        """Returns the axis that each frequency uses: 0 time, 1 row, 2 column."""
        if not self.interleaved:
            return [axis for axis, count in enumerate(self.counts) for _ in range(count)]
        axes = [0] * frequencies
        for axis in (1, 2):
            for at in range(axis, min(3 * self.counts[axis], frequencies), 3):
                axes[at] = axis
        return axes


@dataclass(frozen=True)
class Preprocessing:
    """The conversion of an image to a tower's input. A decoder with images needs all fields."""

    patch: int
    merge: int
    temporal: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    """The mean of each colour in the range 0 .. 1, which is subtracted."""
    std: tuple[float, float, float]
    """The standard deviation of each colour, by which the difference is divided."""
    rescale: float
    """The factor that maps 0 .. 255 to 0 .. 1."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preprocessing:
        """Reads the output of `to_dict`; further keys are ignored."""
        chosen = {field.name: values[field.name] for field in fields(cls)}
        return cls(**{**chosen, "mean": tuple(chosen["mean"]), "std": tuple(chosen["std"])})

    def to_dict(self) -> dict[str, Any]:
        """Returns the preprocessing as JSON types."""
        return asdict(self)

    @property
    def most_positions(self) -> int:
        """The number of decoder positions of the largest image."""
        return self.max_pixels // (self.patch * self.merge) ** 2
