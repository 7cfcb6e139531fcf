"""The storage of a checkpoint's quantised matrices, as the brain has read it.

FP8 has a scale per block in DeepSeek-V3 (2024), and per row or matrix in compressed-tensors, FBGEMM and AutoFP8. 4-bit
formats are GPTQ (Frantar et al. 2022), AWQ (Lin et al. 2023), and compressed-tensors, which has its own packing.
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
    """Rows and columns that share a scale; None: each row has one, or the whole matrix."""


@dataclass(frozen=True)
class Int4:
    """4-bit integers. Several inputs of a row share a scale and a zero point."""

    packing: str
    """The format of words of eight codes: `gptq`, `awq` or `compressed-tensors`."""
    group: int | None
    """The number of inputs that share a scale; None: all of a row."""
    ordered: bool = False
    """True if groups do not follow the order of inputs (GPTQ's `desc_act`)."""
    less_one: bool = False
    """True if zero points are stored less 1."""


@dataclass(frozen=True)
class Mxfp4:
    """4-bit floats, 32 of which share an exponent. They are read as blocks of GGUF's type."""


Scheme: TypeAlias = Fp8 | Int4 | Mxfp4


@dataclass(frozen=True)
class Stored:
    """The configuration's statement about matrices. The files decide which matrices are quantised."""

    method: str
    """`quant_method`."""
    scheme: Scheme
    left_out: tuple[str, ...] = ()
    """Modules that are not quantised: names, parts of names, or regular expressions after `re:` or `-:`."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Stored:
        """Reads `quantised` of a shape."""
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
