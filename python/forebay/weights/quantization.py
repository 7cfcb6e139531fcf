"""The matrices whose products are not computed in the model's type, and their storage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from forebay.weights.codes import Layout
from forebay.weights.stored import COMPRESSED, Fp8, Scheme, Stored

__all__ = ["AUTO", "INTEGERS", "QUANTIZATIONS", "Kept", "why_not_stored"]

INTEGERS = ("w8a8_int8", "gguf")
"""The values of `--quantization` for products of 8-bit integers, which only the hand in Rust has."""
AUTO = "auto"
"""Keeps the blocks of a GGUF file if products with them are faster. The hand in Rust decides that. This hand keeps
none.
"""
QUANTIZATIONS = (*INTEGERS, "fp8", "awq", "gptq", COMPRESSED)
"""The values of `--quantization` that require a format."""


@dataclass(frozen=True)
class Kept:
    """Matrices that a device keeps in their stored bits."""

    scheme: Scheme
    is_wanted: Callable[[str], bool]
    """True for the name of a weight whose matrix is kept."""

    def layout(self, parts: Mapping[str, int], inputs: int) -> Layout | None:
        """The layout of a matrix that joins `parts`, name to rows; None: its products are in the model's type."""
        if not all(map(self.is_wanted, parts)):
            return None
        return Layout.of(self.scheme, inputs, list(parts.values()))


def why_not_stored(quantization: str, stored: Stored | None) -> str | None:
    """The reason why a checkpoint does not match `--quantization`; None: it does."""
    if stored is None:
        return None if quantization == "fp8" else "the checkpoint has no quantization_config"
    fits = isinstance(stored.scheme, Fp8) if quantization == "fp8" else stored.method == quantization
    return None if fits else f"the checkpoint is quantised by {stored.method}"
