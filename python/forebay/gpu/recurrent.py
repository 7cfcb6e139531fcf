"""The rows of a step whose recurrent states advance, and the heads of a state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

SOURCE, KEPT, TARGET = range(3)
"""The first columns of `StateRows.places`."""
NO_STATE = -1
"""The source of a row that begins at position 0. Its state is zero."""


@dataclass(frozen=True)
class StateRows:
    """The rows of one step; `r` rows, which may be padding, of `n` tokens.

    Tensors are on the device, so that a graph may run again with other values in them. The last line of a table of
    states is for padding and is never read.
    """

    first: torch.Tensor  # int32 [r + 1]: where the row's tokens begin; after the last row are tokens of no row
    of_token: torch.Tensor  # int32 [n]: the row of each token; r: no row
    places: torch.Tensor  # int32 [r, 3 or more]: lines of the tables, in the order of SOURCE, KEPT, TARGET
    """SOURCE has the state before the row, KEPT gets the state before its last position, and TARGET gets the state
    after it. If the last two are one line, it gets the state after the row. KEPT is SOURCE, unless that is `NO_STATE`.
    """
    chunks: bool = True
    """True if a row may have several tokens, or if some tokens may belong to no row."""


class StateHeads(Protocol):
    """The heads of a state: `weights.parts.Recurrence`."""

    @property
    def heads(self) -> int:
        """The number of heads."""

    @property
    def key_heads(self) -> int:
        """The number of heads of keys and queries. Each serves the same number of value heads."""

    @property
    def tiled(self) -> bool:
        """True if heads that share a key head are as far apart as there are key heads; False: they are neighbours."""

    @property
    def key_dim(self) -> int:
        """Elements of a key."""

    @property
    def value_dim(self) -> int:
        """Elements of a value."""

    @property
    def channel_decay(self) -> bool:
        """True if each channel of a key has its own decay; False: each head has one."""

    @property
    def delta(self) -> bool:
        """True if a state's old value for a key is subtracted first. Keys and queries then have length 1."""


@dataclass(frozen=True)
class StateWeights:
    """The vectors of a recurrent layer, float32."""

    decay: torch.Tensor  # [heads]: logarithms of the factors of steps in decays
    step_bias: torch.Tensor  # [heads], or [heads * key_dim] with decays of channels
    skip: torch.Tensor | None  # [heads]: factors of values that are added to outputs; None: nothing is
