"""The recurrent states of a step's rows, for layers that have states instead of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from forebay.gpu.interface import Kernels
from forebay.gpu.recurrent import StateHeads, StateRows, StateWeights

__all__ = ["LayerStates", "PlannedStates", "StatePiece", "StepStates"]


class LayerStates(NamedTuple):
    """The states of one layer; each row of the table is one state."""

    inputs: torch.Tensor  # the model's dtype [rows, taps - 1, channels]: the last inputs of the convolution
    heads: torch.Tensor | None  # float32 [rows, heads, key_dim, value_dim]; None: the layer has only a convolution


class StatePiece(NamedTuple):
    """Tokens of a step that advance one state."""

    first: int
    """The index of the first token in the step."""
    length: int
    source: int
    """The row of the table with the state before the tokens."""
    target: int
    """The row of the table that gets the state after the tokens."""


@dataclass(frozen=True)
class StepStates:
    """The rows of a step whose states advance. Their tokens do not overlap."""

    layers: Sequence[LayerStates]
    """The states of each recurrent layer."""
    singles: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """The pieces with one token, int64 [r] each: the token, the source row, and the target row of its state."""
    chunks: Sequence[StatePiece]
    """The pieces of several tokens."""
    late: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """Like `singles`, for the pieces with one token that continue other pieces of the step."""


@dataclass(frozen=True)
class PlannedStates:
    """The rows of a step whose states the operators of `forebay.gpu` advance, described by tensors.

    `number` is a layer's index among the recurrent layers.
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
        """Returns the convolution [n, channels] of x [n, channels], between two gates or followed by SiLU."""
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
        """Returns float32 [n, heads * value_dim] for convolved inputs; `weights` as in `gpu.recurrent.StateWeights`."""
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
