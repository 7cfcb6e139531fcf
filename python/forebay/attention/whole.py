"""Attention between all positions of a prompt, without a cache and without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from forebay.attention.backend import CAUSAL, Batch, How, IndexBatch, Int64s, LatentHeads, LayerKV
from forebay.attention.masked import masked_attention, positions_mask

QUERY_BLOCK = 512
"""The number of queries that share a call if each attends to only a part of its prompt. With fewer, more masked keys
are skipped.
"""


@dataclass(frozen=True)
class Group:
    """Prompts of equal length, which are adjacent in the packed tokens."""

    first: int  # index of the first prompt's first token
    count: int
    length: int

    @property
    def tokens(self) -> slice:
        """The tokens of all prompts of the group."""
        return slice(self.first, self.first + self.count * self.length)


def group(lengths: npt.NDArray[np.int64]) -> list[Group]:
    """Groups prompts, whose `lengths` are sorted, by length."""
    groups = []
    first = 0
    values, counts = np.unique(lengths, return_counts=True)
    for length, count in zip(values.tolist(), counts.tolist(), strict=True):
        groups.append(Group(first, count, length))
        first += count * length
    return groups


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: Sequence[Group]) -> torch.Tensor:
    """Returns [n, heads * head_dim] for q, k and v [n, heads, head_dim] of packed prompts."""
    outputs = []
    for part in groups:
        # [count, heads, length, head_dim] without a copy: the prompts of a group have the same length.
        shaped = [x[part.tokens].unflatten(0, (part.count, part.length)).transpose(1, 2) for x in (q, k, v)]
        outputs.append(F.scaled_dot_product_attention(*shaped).transpose(1, 2).flatten(0, 1).flatten(1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class WholeAttention:
    """Implements `AttentionBackend` for whole prompts with PyTorch's operators. It reads no pages."""

    def order(self, lengths: Int64s, ends: Int64s) -> Int64s:
        """Returns prompts in order of their length, so that prompts of equal length are adjacent."""
        return np.argsort(lengths, kind="stable")

    def prepare(self, batch: Batch, dtype: torch.dtype) -> list[Group]:
        return group(batch.length)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: LayerKV,
        prepared: Sequence[Group],
        how: How = CAUSAL,
    ) -> torch.Tensor:
        outputs = []
        for part in prepared:
            of_q, of_k, of_v = (
                x[part.tokens].unflatten(0, (part.count, part.length)).transpose(1, 2) for x in (q, k, v)
            )
            outputs.append(_attend_group(of_q, of_k, of_v, how).transpose(1, 2).flatten(0, 1).flatten(1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def attend_latent(
        self,
        q: torch.Tensor,
        rows: torch.Tensor,
        up: torch.Tensor,
        kv: LayerKV,
        heads: LatentHeads,
        prepared: Any,
        chosen: torch.Tensor | None,
    ) -> torch.Tensor:
        raise NotImplementedError("latent rows of whole prompts")

    def prepare_index(self, batch: IndexBatch) -> Any:
        raise NotImplementedError("an index of whole prompts")

    def choose(self, q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, prepared: Any) -> torch.Tensor:
        raise NotImplementedError("an index of whole prompts")


def _attend_group(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How) -> torch.Tensor:
    """q is [prompts, heads, length, head_dim], as is the result; k and v are [prompts, kv_heads, length, head_dim]."""
    length = q.shape[2]
    if how.both_ways and (how.window is None or how.window >= length) and how.cap is None and how.sinks is None:
        return F.scaled_dot_product_attention(q, k, v, scale=how.scale, enable_gqa=True)
    reach = length if how.window is None else how.window
    outputs = []
    for begin in range(0, length, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, length)
        first, last = max(0, begin - reach + 1), min(length, end + reach - 1)
        places = torch.arange(length, device=q.device)
        mask = positions_mask(places[begin:end], places[first:last], how)
        outputs.append(masked_attention(q[:, :, begin:end], k[:, :, first:last], v[:, :, first:last], mask, how))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
