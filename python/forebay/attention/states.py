"""The recurrent states of a step's rows, for layers with states in place of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from forebay.gpu.interface import Kernels
from forebay.gpu.recurrent import StateHeads, StateRows, StateWeights

__all__ = ["LayerStates", "PlannedStates", "StatePiece", "StepStates"]


class LayerStates(NamedTuple):
    """The states of one layer, one row of the table per state."""

    inputs: torch.Tensor  # the model's dtype [rows, taps - 1, channels]: the last inputs of the convolution
    heads: torch.Tensor | None  # float32 [rows, heads, key_dim, value_dim]; None: there is a convolution only


class StatePiece(NamedTuple):
    """Tokens of a step that advance one state."""

    first: int
    """The first of the step's tokens."""
    length: int
    source: int
    """The row of the table with the state before the tokens."""
    target: int
    """The row that gets the state after these tokens."""


@dataclass(frozen=True)
class StepStates:
    """The rows of a step whose states advance. Their tokens do not overlap."""

    layers: Sequence[LayerStates]
    """The states of each recurrent layer."""
    singles: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """The pieces of one token, int64 [r] each: the token, the state row before it, and the state row after it."""
    chunks: Sequence[StatePiece]
    """The pieces of several tokens."""
    late: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """As `singles`, for the pieces of one token that continue other pieces of the step."""


@dataclass(frozen=True)
class PlannedStates:
    """The rows of a step whose states advance by the operators of `forebay.gpu`, described by tensors.

    A layer is named by its number among the recurrent ones.
    """

    layers: Sequence[LayerStates]
    """The states of each recurrent layer."""
    rows: StateRows
    kernels: Kernels

    def convolve(
        self,
        number: int,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gates: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The convolution [n, channels] of x [n, channels], between two gates or followed by a SiLU."""
        table = self.layers[number].inputs
        return self.kernels.convolve(x, weight, bias, table, self.rows, silu=gates is None, gates=gates)

    def recur(
        self,
        number: int,
        mixed: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor | None,
        weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
        shape: StateHeads,
    ) -> torch.Tensor:
        """Outputs float32 [n, heads * value_dim] of convolved inputs; `weights` as in `gpu.recurrent.StateWeights`."""
        table = self.layers[number].heads
        assert table is not None
        return self.kernels.recur(mixed, a, b, StateWeights(*weights), shape, table, self.rows)

    def gated_norm(
        self,
        y: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        norm: str,
        size: int,
        sigmoid: bool,
    ) -> torch.Tensor:
        """See `gpu.interface.Recurrences`."""
        return self.kernels.gated_norm(y, gate, weight, eps, norm, size, sigmoid, self.rows.first)
