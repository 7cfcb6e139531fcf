"""Which matrices are computed with as integers, and how those are stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from forebay.weights.errors import ModelError

__all__ = ["BLOCK_BYTES", "COMPUTED_AS", "INT8", "PLAIN", "QUANTIZATIONS", "SHARED", "Formats"]

QUANTIZATIONS = ("w8a8_int8", "gguf")
"""What `--quantization` may say."""
SHARED = 32
"""Inner positions of a block; inner dimensions of quantised matrices are multiples of it."""
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}
"""GGUF's types that there are kernels for, and what a block of them takes."""
COMPUTED_AS = {
    **{kind: kind for kind in BLOCK_BYTES},
    "Q4_K": "Q4_1",
    **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K", "Q6_K"), "Q8_0"),
}
"""GGUF's types, and which of those with kernels a matrix is computed in."""
INT8 = "INT8"
"""8 bits and one scale an output, made of a checkpoint's weights when they are loaded."""


@dataclass(frozen=True)
class Formats:
    """The format of every matrix, by its names in the checkpoint."""

    int8: bool = False
    """All of them are made int8."""
    stored: Mapping[str, str] = field(default_factory=dict)
    """Checkpoint name to the type in which a file has it, one of `COMPUTED_AS`."""

    def of(self, names: Iterable[str], inputs: int) -> str | None:
        """The format of a matrix with parts of these names, fused; None: it is one of the model's dtype.

        Raises ModelError if the matrix can't have the format that was asked for.
        """
        names = list(names)
        if self.int8:
            if inputs % SHARED:
                raise ModelError(
                    f"{names[0]} has {inputs} inputs, and --quantization w8a8_int8 needs multiples of {SHARED}"
                )
            return INT8
        if any(name not in self.stored for name in names):
            return None
        formats = {COMPUTED_AS[self.stored[name]] for name in names}
        # Files give keys and values more bits than queries: the widest of the formats holds them all.
        return formats.pop() if len(formats) == 1 else "Q8_0"


PLAIN = Formats()
"""Nothing is quantised."""
