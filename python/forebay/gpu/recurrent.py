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

    Tensors are on the device, so that a graph can run again with new values. The last line of a table of states is for
    padding, and is never read.
    """

    first: torch.Tensor  # int32 [r + 1]: the row's first token; tokens after the last row belong to no row
    of_token: torch.Tensor  # int32 [n]: the row of each token; r: no row
    places: torch.Tensor  # int32 [r, 3 or more]: lines of the tables, in the order of SOURCE, KEPT, TARGET
    """SOURCE has the state before the row, KEPT receives the state before its last position, and TARGET the state
    after the row. If KEPT and TARGET are the same line, that line receives the state after the row. KEPT equals SOURCE,
    unless SOURCE is `NO_STATE`.
    """
    chunks: bool = True
    """True if rows may have several tokens, or if tokens may belong to no row."""


class StateHeads(Protocol):
    """The heads of a state: `weights.parts.Recurrence`."""

    @property
    def heads(self) -> int:
        """The number of heads."""

    @property
    def key_heads(self) -> int:
        """The number of key and query heads. Each is shared by the same number of value heads."""

    @property
    def tiled(self) -> bool:
        """True if value head h uses key head `h % key_heads`; False: consecutive value heads share a key head."""

    @property
    def key_dim(self) -> int:
        """The number of elements of a key."""

    @property
    def value_dim(self) -> int:
        """The number of elements of a value."""

    @property
    def channel_decay(self) -> bool:
        """True if each channel of a key has a separate decay; False: each head has one decay."""

    @property
    def delta(self) -> bool:
        """True if the state's old value for a key is subtracted first (delta rule). Keys and queries have norm 1."""


@dataclass(frozen=True)
class StateWeights:
    """The vectors of a recurrent layer, float32."""

    decay: torch.Tensor  # [heads]: logarithms of the factors that turn steps into decays
    step_bias: torch.Tensor  # [heads], or [heads * key_dim] with per-channel decays
    skip: torch.Tensor | None  # [heads]: factors of values that are added to outputs; None: none are added
