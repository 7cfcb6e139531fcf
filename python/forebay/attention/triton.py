"""Attention on a GPU: the kernels of `forebay.gpu`, which read lengths, slots and page tables on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from forebay.attention.backend import CAUSAL, Batch, How, IndexBatch, Int64s, LatentHeads, LayerKV
from forebay.attention.cpu import ChunkRow, CpuAttention, chunk_as
from forebay.gpu.interface import Kernels, PagedRows


@dataclass(frozen=True)
class SpannedRows:
    """A step's rows, some of which have spans with bidirectional attention."""

    rows: PagedRows
    chunks: list[ChunkRow]
    """The rows with such spans, which PyTorch's operators compute."""


class TritonAttention:
    """Implements `AttentionBackend`. Rows of any kind are computed in the given order.

    It prepares `PagedRows`, or `SpannedRows` for a batch with spans. A caller that has the rows of a step on the device
    may construct either of them itself.
    """

    def __init__(self, kernels: Kernels, null_page: int) -> None:
        """`null_page`: the page that kernels read if the page table has -1."""
        self._kernels = kernels
        self._null_page = null_page

    def order(self, lengths: Int64s, ends: Int64s) -> Int64s:
        return np.arange(len(lengths))

    def prepare(self, batch: Batch, dtype: torch.dtype) -> PagedRows | SpannedRows:
        rows = self._rows(batch)
        if not batch.spans:
            return rows
        spanned = [row for row, spans in enumerate(batch.spans) if spans and batch.length[row] > 1]
        return SpannedRows(rows, [CpuAttention().chunk(batch, row, dtype) for row in spanned])

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: LayerKV,
        prepared: PagedRows | SpannedRows,
        how: How = CAUSAL,
    ) -> torch.Tensor:
        if isinstance(prepared, SpannedRows):
            # Rows with images are rare: the kernels compute them too, and then their output is overwritten.
            out = self._attend(q, kv, prepared.rows, how)
            for chunk in prepared.chunks:
                out[chunk.first : chunk.first + chunk.count] = chunk_as(q, k, v, kv, chunk, how)
            return out
        return self._attend(q, kv, prepared, how)

    def _attend(self, q: torch.Tensor, kv: LayerKV, prepared: PagedRows, how: How) -> torch.Tensor:
        if how.chunk is not None or how.both_ways:
            raise NotImplementedError(
                f"the attention in Triton has causal order without chunks, and {how} is asked for"
            )
        scale = q.shape[2] ** -0.5 if how.scale is None else how.scale
        window, cap = how.window or 0, how.cap or 0.0
        return self._kernels.attend(q, kv.keys, kv.values, prepared, scale, window, cap, how.sinks).flatten(1)

    def attend_latent(
        self,
        q: torch.Tensor,
        rows: torch.Tensor,
        up: torch.Tensor,
        kv: LayerKV,
        heads: LatentHeads,
        prepared: PagedRows,
        chosen: torch.Tensor | None,
    ) -> torch.Tensor:
        """Chunks use the absorbed form too: each row is read once, but more is computed than in the naive form."""
        of_keys, of_values = up.split((heads.nope_dim, heads.value_dim), dim=1)
        nope, rotated = q[..., : heads.nope_dim], q[..., heads.nope_dim :]
        query = torch.cat((torch.einsum("nhd,hdc->nhc", nope, of_keys), rotated), dim=-1)
        whole = len(q) if chosen is None else len(q) - len(chosen)
        parts = []
        if whole:
            parts.append(self._kernels.attend(query[:whole], kv.keys, kv.values, prepared, heads.scale))
        if chosen is not None:
            some = query[whole:]
            parts.append(self._kernels.attend_chosen(some, kv.keys, kv.values, chosen.int(), heads.scale))
        seen = parts[0] if len(parts) == 1 else torch.cat(parts)
        return torch.einsum("nhc,hvc->nhv", seen, of_values).flatten(1)

    def prepare_index(self, batch: IndexBatch) -> tuple[PagedRows, int]:
        return self._rows(batch), batch.top_k

    def choose(
        self, q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, prepared: tuple[PagedRows, int]
    ) -> torch.Tensor:
        return self._kernels.choose(q, weights, keys, *prepared).long()

    def _rows(self, batch: Batch | IndexBatch) -> PagedRows:
        first = torch.zeros(len(batch.length) + 1, dtype=torch.int32, device=batch.ends.device)
        first[1:] = batch.lengths.cumsum(0)
        return PagedRows(
            slots=batch.slots.int(),
            ends=batch.ends.int(),
            first=first,
            page_table=batch.page_table,
            page_size=batch.page_size,
            page_stride=batch.page_stride,
            null_page=self._null_page,
            decodes=bool((batch.length == 1).any()),
            chunks=bool((batch.length > 1).any()),
        )
