"""The matrices whose products are not in the model's type, and their storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from forebay.weights.codes import Layout
from forebay.weights.errors import ModelError
from forebay.weights.stored import COMPRESSED, Fp8, Scheme, Stored

__all__ = [
    "AUTO",
    "BLOCK_BYTES",
    "COMPUTED_AS",
    "INT8",
    "INTEGERS",
    "PLAIN",
    "QUANTIZATIONS",
    "SHARED",
    "Formats",
    "Kept",
    "is_of_expert",
    "why_not_stored",
]

INTEGERS = ("w8a8_int8", "gguf")
"""The values of `--quantization` for products of 8-bit integers, which the host's compiled kernels have."""
AUTO = "auto"
"""The format of a GGUF file's own blocks, where the host's compiled kernels have products of bytes."""
QUANTIZATIONS = (*INTEGERS, "fp8", "awq", "gptq", COMPRESSED)
"""The values of `--quantization` that insist on a format."""
SHARED = 32
"""The number of positions of a block. Inner dimensions of quantised matrices are multiples of it."""
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20, "MXFP4": 17, "IQ4_NL": 18}
"""GGUF's types with kernels, and the bytes of their blocks."""
COMPUTED_AS = {
    **{kind: kind for kind in BLOCK_BYTES},
    "Q4_K": "Q4_1",
    "IQ4_XS": "IQ4_NL",
    **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q2_K", "Q3_K"), "Q8_0"),
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0"), "Q8_0"),
}
"""GGUF's types, and the type with kernels in which each is computed."""
INT8 = "INT8"
"""8 bits and one scale for each output, made of a checkpoint's weights at the load."""


def is_of_expert(name: str) -> bool:
    """True if a weight belongs to one of the experts that tokens choose."""
    return ".mlp.experts." in name


@dataclass(frozen=True)
class Kept:
    """Matrices that a device keeps in their stored bits."""

    scheme: Scheme
    is_wanted: Callable[[str], bool]
    """The test for the names of their weights."""


@dataclass(frozen=True)
class Formats:
    """The format of every matrix, by its names in the checkpoint."""

    int8: bool = False
    """True if all matrices that are not stored in blocks become int8."""
    stored: Mapping[str, str] = field(default_factory=dict)
    """The type of a matrix in the file, one of `COMPUTED_AS`, by checkpoint name."""
    kept: Kept | None = None
    """The kept matrices; None: there are none, or they are multiplied out."""

    @property
    def for_integers(self) -> bool:
        """True if there are matrices with products only in the host's compiled kernels."""
        return self.int8 or bool(self.stored)

    def layout(self, parts: Mapping[str, int], inputs: int) -> Layout | None:
        """The layout of a matrix fused of `parts`, name to rows; None: its products are in the model's type."""
        if self.kept is None or not all(map(self.kept.is_wanted, parts)):
            return None
        return Layout.of(self.kept.scheme, inputs, list(parts.values()))

    def of(self, names: Iterable[str], inputs: int) -> str | None:
        """The format of a fused matrix with parts of these names; None: it has the model's dtype.

        Raises ModelError if the matrix can't have the requested format.
        """
        names = list(names)
        if names and all(name in self.stored for name in names):
            formats = {COMPUTED_AS[self.stored[name]] for name in names}
            # Files give keys and values more bits than queries: the widest of the formats holds them all.
            return formats.pop() if len(formats) == 1 else "Q8_0"
        if self.int8:
            if inputs % SHARED:
                raise ModelError(
                    f"{names[0]} has {inputs} inputs, and --quantization w8a8_int8 needs multiples of {SHARED}"
                )
            return INT8
        return None


PLAIN = Formats()
"""The formats of a model without quantisation."""


def why_not_stored(quantization: str, stored: Stored | None) -> str | None:
    """The reason for which a checkpoint does not match `--quantization`; None: it does."""
    if quantization in INTEGERS:
        return None
    if stored is None:
        return None if quantization == "fp8" else "the checkpoint has no quantization_config"
    fits = isinstance(stored.scheme, Fp8) if quantization == "fp8" else stored.method == quantization
    return None if fits else f"the checkpoint is quantised by {stored.method}"
