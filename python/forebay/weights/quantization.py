"""The storage formats of quantised matrices, and the choice of the matrices that products read in this format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from forebay.weights.codes import Layout
from forebay.weights.stored import COMPRESSED, Fp8, Scheme, Stored

__all__ = ["AUTO", "INTEGERS", "QUANTIZATIONS", "Kept", "why_not_stored"]

INTEGERS = ("w8a8_int8", "gguf")
"""The values of `--quantization` for products of 8-bit integers, which only the hand in Rust supports."""
AUTO = "auto"
"""Keeps the blocks of a GGUF file if products with them are faster. Only the hand in Rust does that: this hand
dequantises all blocks.
"""
QUANTIZATIONS = (*INTEGERS, "fp8", "awq", "gptq", COMPRESSED)
"""The values of `--quantization` that require a particular format."""


@dataclass(frozen=True)
class Kept:
    """The matrices that a device keeps in their stored format."""

    scheme: Scheme
    is_wanted: Callable[[str], bool]
    """Whether a weight with this name belongs to a matrix that is kept."""

    def layout(self, parts: Mapping[str, int], inputs: int) -> Layout | None:
        """Returns the layout of a matrix that joins `parts` (rows by name); None: the matrix is dequantised."""
        if not all(map(self.is_wanted, parts)):
            return None
        return Layout.of(self.scheme, inputs, list(parts.values()))


def why_not_stored(quantization: str, stored: Stored | None) -> str | None:
    """Returns the reason why a checkpoint does not match `--quantization`; None: it matches."""
    if stored is None:
        return None if quantization == "fp8" else "the checkpoint has no quantization_config"
    fits = isinstance(stored.scheme, Fp8) if quantization == "fp8" else stored.method == quantization
    return None if fits else f"the checkpoint is quantised by {stored.method}"
