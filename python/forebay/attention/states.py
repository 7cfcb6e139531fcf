"""The recurrent states of a step's rows, for layers that keep them in place of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = ["LayerStates", "StatePiece", "StepStates"]


class LayerStates(NamedTuple):
    """The states of one layer, by row of the table."""

    inputs: torch.Tensor  # the model's dtype [rows, taps - 1, channels]: the last inputs of the convolution
    heads: torch.Tensor | None  # float32 [rows, heads, key_dim, value_dim]; None: there is a convolution only


class StatePiece(NamedTuple):
    """Tokens of a step that advance one state."""

    first: int
    """The first of the step's tokens."""
    length: int
    source: int
    """The row of the table with the state before them."""
    target: int
    """The row that gets the state behind them."""


@dataclass(frozen=True)
class StepStates:
    """The rows of a step whose states advance. Their tokens do not overlap."""

    layers: Sequence[LayerStates]
    """The states of each recurrent layer."""
    singles: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """The pieces of one token, int64 [r] each: the token, the row before it, and the row behind it."""
    chunks: Sequence[StatePiece]
    """The pieces of several tokens."""
    late: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """As `singles`: those that continue the other pieces."""
