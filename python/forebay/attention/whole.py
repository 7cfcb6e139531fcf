"""Attention of every position to every other one of its prompt, without a cache and without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Group:
    """Prompts of equal length, one after the other."""

    first: int  # the first prompt's first token
    count: int
    length: int

    @property
    def tokens(self) -> slice:
        """The tokens of all its prompts."""
        return slice(self.first, self.first + self.count * self.length)


def group(lengths: npt.NDArray[np.int64]) -> list[Group]:
    """Groups of prompts whose `lengths` are sorted."""
    groups = []
    first = 0
    values, counts = np.unique(lengths, return_counts=True)
    for length, count in zip(values.tolist(), counts.tolist(), strict=True):
        groups.append(Group(first, count, length))
        first += count * length
    return groups


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: Sequence[Group]) -> torch.Tensor:
    """q, k and v [n, heads, head_dim] of packed prompts give [n, heads * head_dim]."""
    outputs = []
    for part in groups:
        # [count, heads, length, head_dim] without a copy: prompts of a group differ in nothing but their tokens.
        shaped = [x[part.tokens].unflatten(0, (part.count, part.length)).transpose(1, 2) for x in (q, k, v)]
        outputs.append(F.scaled_dot_product_attention(*shaped).transpose(1, 2).flatten(0, 1).flatten(1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
