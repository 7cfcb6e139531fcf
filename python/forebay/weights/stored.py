"""The storage format of a checkpoint's quantised matrices, in the form that the brain sends.

FP8 has a scale per block in DeepSeek-V3 (2024), and per row or matrix in compressed-tensors, FBGEMM and AutoFP8. 4-bit
formats are GPTQ (Frantar et al. 2022), AWQ (Lin et al. 2023), and compressed-tensors, which packs codes differently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["COMPRESSED", "Fp8", "Int4", "Mxfp4", "Scheme", "Stored"]

COMPRESSED = "compressed-tensors"
_PATTERN = re.compile(r"(?:re:|-:)")


@dataclass(frozen=True)
class Fp8:
    """8-bit floats."""

    block: tuple[int, int] | None = None
    """Rows and columns that share a scale; None: there is a scale per row, or one for the whole matrix."""


@dataclass(frozen=True)
class Int4:
    """4-bit integers. Several inputs of a row share a scale and a zero point."""

    packing: str
    """The format of words of eight codes: `gptq`, `awq` or `compressed-tensors`."""
    group: int | None
    """The number of inputs that share a scale; None: all inputs of a row."""
    ordered: bool = False
    """True if groups are not consecutive inputs (GPTQ's `desc_act`)."""
    less_one: bool = False
    """True if the stored zero points are smaller by 1 than the actual ones."""


@dataclass(frozen=True)
class Mxfp4:
    """4-bit floats, 32 of which share an exponent. They are converted to GGUF blocks when they are read."""


Scheme: TypeAlias = Fp8 | Int4 | Mxfp4


@dataclass(frozen=True)
class Stored:
    """The quantisation that the model's configuration declares. The files decide which matrices are quantised."""

    method: str
    """The value of `quant_method` in the model's configuration."""
    scheme: Scheme
    left_out: tuple[str, ...] = ()
    """Modules that are not quantised: names, components of names, or regular expressions after `re:` or `-:`."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Stored:
        """Reads the field `quantised` of a shape."""
        scheme = dict(values["scheme"])
        kind = scheme.pop("kind")
        if kind == "fp8":
            block = scheme["block"]
            return cls(values["method"], Fp8(None if block is None else tuple(block)), tuple(values["left_out"]))
        if kind == "mxfp4":
            return cls(values["method"], Mxfp4(), tuple(values["left_out"]))
        return cls(values["method"], Int4(**scheme), tuple(values["left_out"]))

    def leaves_out(self, module: str) -> bool:
        """True if a module, such as `model.layers.0.self_attn.q_proj`, is not quantised."""
        return any(_fits(pattern, module) for pattern in self.left_out)


def _fits(pattern: str, module: str) -> bool:
    expression = _PATTERN.match(pattern)
    if expression is not None:
        return re.match(pattern[expression.end() :], module) is not None
    return f".{pattern}." in f".{module}."
