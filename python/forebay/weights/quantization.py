"""Which matrices are computed with as integers, and how those are stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from forebay.weights.errors import ModelError

__all__ = ["BLOCK_BYTES", "INT8", "PLAIN", "QUANTIZATIONS", "SHARED", "Formats"]

QUANTIZATIONS = ("w8a8_int8", "gguf")
"""What `--quantization` may say."""
SHARED = 32
"""Inner positions of a block; inner dimensions of quantised matrices are multiples of it."""
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}
"""GGUF's types that there are kernels for, and what a block of them takes."""
INT8 = "INT8"
"""8 bits and one scale an output, made of a checkpoint's weights when they are loaded."""


@dataclass(frozen=True)
class Formats:
    """The format of every matrix, by its names in the checkpoint."""

    int8: bool = False
    """All of them are made int8."""
    stored: Mapping[str, str] = field(default_factory=dict)
    """Checkpoint name to the type in which a file has it, where there are kernels for that."""

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
        formats = {self.stored.get(name) for name in names}
        # Panels of several formats in one matrix would be possible, and are left to a file that needs them.
        return formats.pop() if len(formats) == 1 else None


PLAIN = Formats()
"""Nothing is quantised."""
