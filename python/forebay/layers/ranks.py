"""The communication between ranks that compute the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from forebay.distributed.group import Group
from forebay.weights.shards import Shard

Context = TypeVar("Context")


@dataclass(frozen=True)
class Ranks:
    """The ranks that compute a model together."""

    group: Group
    expert_parallel: bool
    """True if each rank has some of the experts. Otherwise each rank has a part of every expert."""

    @property
    def shard(self) -> Shard:
        """The shard of this rank."""
        return Shard(self.group.rank, self.group.world)


class Summed(Generic[Context]):
    """A part of a layer for which each rank computes a term of the result [tokens, hidden]; the terms are summed."""

    def __init__(self, part: Callable[[torch.Tensor, Context], torch.Tensor], group: Group) -> None:
        self._part = part
        self._group = group

    def __call__(self, x: torch.Tensor, context: Context, /) -> torch.Tensor:
        return self._group.all_reduce(self._part(x, context))
