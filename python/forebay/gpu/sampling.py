"""The sampling of rows on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FIXED_POINT = 40
"""The fractional bits of a token's weight relative to the largest weight. So sums are exact, whatever their order."""
MOST_LIKELY = 32
"""The largest number of tokens that `Sampling.likely` returns besides a row's own token."""


@dataclass(frozen=True)
class Wishes:
    """The sampling parameters of `r` rows. `docs/protocol.md` explains them."""

    temperature: torch.Tensor  # float32 [r]; 0: no draw
    top_k: torch.Tensor  # int32 [r]; 0, or at least the vocabulary: off
    top_p: torch.Tensor  # float32 [r]; 1: off
    min_p: torch.Tensor  # float32 [r]; 0: off
    bits: torch.Tensor  # int64 [r]: u is the upper 53 bits, as an unsigned number, divided by 2^53

    @classmethod
    def make(cls, rows: int, device: torch.device) -> Wishes:
        """Allocates memory for `rows` rows, uninitialised."""

        def empty(dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(rows, dtype=dtype, device=device)

        floats = torch.float32
        return cls(empty(floats), empty(torch.int32), empty(floats), empty(floats), empty(torch.int64))
