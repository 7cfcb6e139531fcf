"""The LoRA matrices of several adapters for one matrix product, and the tokens of a step by adapter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class LowRankStack:
    """The matrices of all places for one matrix product. The product's outputs are those of one or more modules.

    Modules that an adapter does not modify have zeros, as do elements beyond an adapter's rank.
    """

    a: torch.Tensor  # [places, modules * rank, inputs]
    b: torch.Tensor  # [places, outputs, rank], multiplied by the adapter's scale
    starts: torch.Tensor  # int32 [modules + 1]: the first output of each module, and the end
    widest: int
    """The largest number of outputs of a module."""

    @property
    def nbytes(self) -> int:
        """Bytes of all places."""
        return self.a.nbytes + self.b.nbytes


@dataclass(frozen=True)
class PlacedTokens:
    """The tokens of a step, and the place of each token's adapter."""

    places: torch.Tensor  # int32 [n]; the number of places: the token has no adapter
    works: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Values that operators derive from `places` on the device, shared by all products of the step."""
