"""The interface between a model and an implementation of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

Int64s = npt.NDArray[np.int64]


NO_ROW = -1
"""Fills the unused entries of a query that has fewer positions or rows than other queries."""


class LayerKV(NamedTuple):
    """One layer's pages as a flat list of token positions: page p has `page_size` entries from `p * page_stride` on.

    Latent rows are the keys of one head. The values are a view of the keys' first elements. Pages of uint8 have 8-bit
    floats for the operators of `forebay.gpu`.
    """

    keys: torch.Tensor  # [entries, kv_heads, head_dim]
    values: torch.Tensor  # [entries, kv_heads, head_dim], or [entries, 1, rank]


@dataclass(frozen=True)
class LatentHeads:
    """Heads whose keys and values are computed from one row per position, `[latent part | rotated part]`."""

    nope_dim: int
    """Elements of a query or key head before its rotated part."""
    value_dim: int
    rank: int
    """Elements of a row's latent part."""
    scale: float
    """The factor on attention scores."""


@dataclass(frozen=True)
class How:
    """Options of an attention call beyond causal order; `h` query heads."""

    scale: float | None = None
    """The factor on attention scores; None: 1 / sqrt(head_dim)."""
    window: int | None = None
    """The number of last positions that a query attends to, its own included; None: all of them."""
    chunk: int | None = None
    """The chunk length, if a query attends only to positions of its own chunk (Llama 4); None: there are no chunks."""
    cap: float | None = None
    """Scores become `cap * tanh(score / cap)` (Gemma 2); None: scores are not changed."""
    sinks: torch.Tensor | None = None
    """The sink of each head, [h]: a logit without a value (gpt-oss); None: no sinks."""
    both_ways: bool = False
    """True if a query also attends to later positions. A window then reaches equally far on both sides."""

    def check_plain(self, backend: str) -> None:
        """Raises `NotImplementedError` if the options go beyond causal attention."""
        if self != CAUSAL:
            raise NotImplementedError(f"{backend} attends in causal order only, and {self} is asked for")


CAUSAL = How()
"""Causal order and nothing else."""


@dataclass(frozen=True)
class Batch:
    """The rows of one step, in the order of their tokens; `r` rows.

    Values for the host's decisions are on the host. Values for the computation are on the device.
    """

    start: Int64s  # [r], on the host: positions already in the pages
    length: Int64s  # [r], on the host: tokens of the row
    offset: Int64s  # [r], on the host: index of the row's first token
    host_slots: Int64s  # [r], on the host: as `slots`
    slots: torch.Tensor  # int64 [r], on the device
    lengths: torch.Tensor  # int64 [r], on the device: as `length`
    ends: torch.Tensor  # int64 [r], on the device: start + length
    page_table: torch.Tensor  # int32 [slots, pages per slot], on the device
    page_size: int
    page_stride: int
    """Entries of `LayerKV` from the first entry of a page to that of the next."""
    window: int | None = None
    """The number of last positions of each query that have pages, its own included; None: all positions do."""
    spans: Sequence[Sequence[tuple[int, int]]] = ()
    """For each row [r], on the host: (first, end) of each range of positions with bidirectional attention.

    A row never ends inside a range. (): no row has any.
    """


@dataclass(frozen=True)
class IndexBatch:
    """The rows of one step whose queries attend to chosen positions. Their tokens come after those of the `Batch`."""

    start: Int64s  # [r], on the host
    length: Int64s  # [r], on the host
    slots: torch.Tensor  # int64 [r], on the device
    lengths: torch.Tensor  # int64 [r], on the device: as `length`
    ends: torch.Tensor  # int64 [r], on the device: start + length
    page_table: torch.Tensor  # int32 [slots, pages per slot], on the device: pages of index keys
    page_size: int
    page_stride: int
    """Entries from the first index key of a page to that of the next."""
    top_k: int
    """The largest number of positions that a query keeps."""


class AttentionBackend(Protocol):
    """The attention of a mixed batch: prompt chunks, with or without cached positions before them, and decode rows."""

    def order(self, lengths: Int64s, ends: Int64s) -> Int64s:
        """Returns the backend's preferred order of the rows [r], from their lengths and end positions."""

    def prepare(self, batch: Batch, dtype: torch.dtype) -> Any:
        """Returns the index tensors and masks that every layer of the step uses."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: LayerKV, prepared: Any, how: How = CAUSAL
    ) -> torch.Tensor:
        """Returns [n, heads * value_dim] for q [n, heads, head_dim]. `k` and `v` were already written to their pages.

        `k` is [n, kv_heads, head_dim], and `v` [n, kv_heads, value_dim]. An implementation that does not support `how`
        raises `NotImplementedError`.
        """

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
        """Returns [n, heads * value_dim] for q [n, heads, nope_dim + rotated].

        `rows` [n, rank + rotated] were already written to their pages. `up` [heads, nope_dim + value_dim, rank]
        computes the keys, and then the values, from a latent part. The last tokens attend to the entries `chosen` int64
        [queries, top_k] of `kv`; `NO_ROW` means no entry. All tokens before them attend to their whole context.
        """

    def prepare_index(self, batch: IndexBatch) -> Any:
        """Returns the data that every indexed layer of the step uses."""

    def choose(self, q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, prepared: Any) -> torch.Tensor:
        """Returns the positions int64 [queries, top_k] that queries keep, ascending, padded with `NO_ROW`.

        q is [queries, index heads, head_dim], and weights are float32 [queries, index heads]. `keys` [entries,
        head_dim] are the index keys of one layer, including those of the queries' own positions.
        """
