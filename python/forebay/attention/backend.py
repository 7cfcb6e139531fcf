"""What the model asks of an attention implementation, and what a step tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

Int64s = npt.NDArray[np.int64]


class LayerKV(NamedTuple):
    """One layer's pages as flat token positions: page p holds the entries p * page_size .. (p + 1) * page_size."""

    keys: torch.Tensor  # [page_count * page_size, kv_heads, head_dim]
    values: torch.Tensor  # the same


@dataclass(frozen=True)
class Batch:
    """The rows of one step, in the order in which their tokens follow one another; `n` tokens, `r` rows."""

    start: Int64s  # [r] positions already in the pages
    length: Int64s  # [r] tokens of the row
    offset: Int64s  # [r] the row's first token among the n
    slot: Int64s  # [r]
    page_table: torch.Tensor  # int32 [slots, pages a slot], on the device
    page_size: int
    writes: torch.Tensor  # int64 [n], on the device: entry of `LayerKV` that each token is written to


class StepAttention(Protocol):
    """What a backend prepared once for all layers of a step."""


class AttentionBackend(Protocol):
    """Attention of a mixed batch: prompt chunks, with or without cached positions before them, and decode rows."""

    def order(self, lengths: Int64s, ends: Int64s) -> Int64s:
        """The order of rows [r] that suits the backend, from their lengths and the positions at which they end."""

    def prepare(self, batch: Batch, dtype: torch.dtype) -> Any:
        """Index tensors and masks that every layer of the step uses."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: LayerKV, step: Any) -> torch.Tensor:
        """Writes k and v [n, kv_heads, head_dim] to their pages; q [n, heads, head_dim] gives [n, heads * head_dim]."""
