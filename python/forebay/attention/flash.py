"""Attention by FlashAttention 3 (Shah et al. 2024) on the same pages, if its package is installed."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from forebay.attention.backend import CAUSAL, Batch, How, IndexBatch, Int64s, LatentHeads, LayerKV
from forebay.gpu.interface import PagedRows

MODULE = "flash_attn_interface"
_HOPPER = (9, 0)


def why_not_fa3(device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns the reason why FlashAttention 3 can't run on this device; None: it can."""
    if dtype != torch.bfloat16:
        return "it needs --dtype bfloat16"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) != _HOPPER:
        return "it is for Hopper (sm_90)"
    try:
        importlib.import_module(MODULE)
    except ImportError as error:
        return f"{MODULE} can't be imported ({error})"
    return None


class FlashAttention:
    """Implements `AttentionBackend` for steps that are prepared on the device, except latent attention and indices."""

    def __init__(self) -> None:
        self._attend = importlib.import_module(MODULE).flash_attn_with_kvcache
        self._step: tuple[PagedRows, dict[str, Any]] | None = None

    def order(self, lengths: Int64s, ends: Int64s) -> Int64s:
        raise NotImplementedError("rows are in the plan's order")

    def prepare(self, batch: Batch, dtype: torch.dtype) -> PagedRows:
        raise NotImplementedError("rows are prepared on the device")

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: LayerKV, prepared: PagedRows, how: How = CAUSAL
    ) -> torch.Tensor:
        if how != How(how.scale):
            raise NotImplementedError(f"FlashAttention has no windows, chunks, caps and sinks, and {how} is asked for")
        scale = q.shape[2] ** -0.5 if how.scale is None else how.scale
        keys, values = (pool.unflatten(0, (-1, prepared.page_size)) for pool in kv)
        given = self._attend(q, keys, values, softmax_scale=scale, causal=True, **self._arguments(prepared, len(q)))
        return _tensor(given).flatten(1)

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
        raise NotImplementedError("latent rows are for another backend")

    def prepare_index(self, batch: IndexBatch) -> Any:
        raise NotImplementedError("an index is for another backend")

    def choose(self, q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, prepared: Any) -> torch.Tensor:
        raise NotImplementedError("an index is for another backend")

    def _arguments(self, rows: PagedRows, tokens: int) -> dict[str, Any]:
        """Returns the arguments that all layers of a step share: the page table, lengths, and first tokens of rows."""
        if self._step is None or self._step[0] is not rows:
            pages = rows.page_table.index_select(0, rows.slots)
            arguments = {
                "page_table": pages.masked_fill(pages < 0, rows.null_page),
                "cache_seqlens": rows.ends,
                "cu_seqlens_q": rows.first,
                "max_seqlen_q": tokens if rows.chunks else 1,
            }
            self._step = rows, arguments
        return self._step[1]


def _tensor(given: Any) -> torch.Tensor:
    """Returns the attention output alone: older releases return a tuple whose first element is the output."""
    found: torch.Tensor = given[0] if isinstance(given, tuple) else given
    return found
