"""The exchange of rows between the ranks of a step group: each rank has separate tokens, and all share the experts.

The plan's column `group` has the number of tokens of each rank. So all ranks call the same collectives with the same
shapes, even a rank without tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from forebay.distributed.group import Group


class Exchange:
    """All-gather before the experts and reduce-scatter after them, for the rows of the step."""

    def __init__(self, group: Group) -> None:
        self.rank = group.rank
        self.world = group.world
        self._group = group
        self._tokens: tuple[int, ...] = (0,) * group.world

    def begin(self, tokens: Sequence[int]) -> None:
        """Sets the number of tokens of each rank. Each call is queued before the work of its step, not made at once."""
        self._tokens = tuple(tokens)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the rows of all ranks [tokens of all, ...], in rank order; x is [own tokens, ...]."""
        gathered = self._group.all_gather(self._padded(x))
        if min(self._tokens) == max(self._tokens):
            return gathered.flatten(0, 1)
        return torch.cat([rows[:count] for rows, count in zip(gathered, self._tokens, strict=True)])

    def scatter(self, y: torch.Tensor) -> torch.Tensor:
        """Sums y [tokens of all, ...] over all ranks. Returns this rank's rows [own tokens, ...] of the sum."""
        if min(self._tokens) < max(self._tokens):
            y = torch.cat([self._padded(rows) for rows in y.split(self._tokens)])
        return self._group.reduce_scatter(y)[: self._tokens[self.rank]]

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the rows, padded with zeros to the largest number of tokens of any rank."""
        missing = max(self._tokens) - len(x)
        return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x
