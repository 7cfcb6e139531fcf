"""From a step's rows to logits: what the runner asks, and PyTorch's answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from forebay.attention.backend import Batch
from forebay.device import Device
from forebay.layers.decoder import Decoder, Forward
from forebay.runner.inputs import PromptRows
from forebay.runner.kv_pool import KvPool
from forebay.runner.slots import Int64s, SlotTables, ragged


@dataclass(frozen=True)
class Rows:
    """A step's rows, checked against the tables; `r` rows, of which `s` sample."""

    slot: Int64s  # [r]
    start: Int64s  # [r] positions already in the pages
    length: Int64s  # [r]
    sampling: Int64s  # [s], ascending: those that give a token, or a vector where the model pools


class Compute(Protocol):
    """Computes rows: writes their keys and values, and gives what follows the last token of those that sample."""

    def logits(self, rows: Rows) -> torch.Tensor:
        """float32 [s, vocabulary], in row order."""

    def greedy(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """The most likely tokens, int32 [s], the first of equal ones, and whether all logits were finite, bool [s]."""


class Pooler(Protocol):
    """Computes rows: gives one vector of each prompt that ends with them."""

    def pool(self, rows: Rows) -> torch.Tensor:
        """float32 [s, size], in row order; neither cut nor normalised."""


def greedy_of(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`Compute.greedy` from `Compute.logits`."""
    return logits.argmax(dim=-1).int(), finite_rows(logits)


def finite_rows(logits: torch.Tensor) -> torch.Tensor:
    """Which rows [s] of logits [s, vocabulary] are finite."""
    # A sum is finite exactly when all terms are, short of logits near the largest float, and one quick pass.
    return logits.sum(dim=-1).isfinite()


class TorchCompute:
    """A model's forward pass, operator by operator, on any device. The reference for every other way."""

    def __init__(self, model: Decoder, tables: SlotTables, kv: KvPool, prompts: PromptRows, device: Device) -> None:
        self._model = model
        self._tables = tables
        self._kv = kv
        self._prompts = prompts
        self._device = device

    def logits(self, rows: Rows) -> torch.Tensor:
        attention = self._model.backend
        order = attention.order(rows.length, rows.start + rows.length)
        row_slot, row_start, row_length = rows.slot[order], rows.start[order], rows.length[order]
        offset = np.cumsum(row_length) - row_length
        positions = ragged(row_start, row_length)
        token_slot = np.repeat(row_slot, row_length)

        tables, page_size, upload = self._tables, self._kv.page_size, self._device.upload
        page_entries = upload(token_slot * tables.pages_per_slot + positions // page_size)
        pages = tables.page_table.view(-1).index_select(0, page_entries)
        writes = pages.long() * page_size + upload(positions % page_size)
        batch = Batch(row_start, row_length, offset, row_slot, tables.page_table, page_size, writes)

        spans = self._prompts.spans(row_slot, row_start, row_length)
        last = np.empty_like(offset)
        last[order] = offset + row_length - 1
        step = Forward(
            tokens=tables.token_pool.view(-1).index_select(0, upload(token_slot * tables.stride + positions)),
            given=[(span.at, self._prompts.rows(span).to(self._device.torch_device)) for span in spans],
            positions=upload(positions),
            sampled=upload(last[rows.sampling]),
            attention=attention.prepare(batch, self._kv.dtype),
            kv=self._kv.layers,
        )
        return self._model(step)

    def pool(self, rows: Rows) -> torch.Tensor:
        # A decoder without a head gives the states themselves, and causal models pool the last one only.
        return self.logits(rows)

    def greedy(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        return greedy_of(self.logits(rows))
