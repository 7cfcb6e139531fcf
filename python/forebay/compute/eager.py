"""A decoder computed operator by operator."""

from __future__ import annotations

import numpy as np
import torch

from forebay.attention.backend import Batch
from forebay.compute.rows import Launch
from forebay.device import Device
from forebay.layers.decoder import Decoder, Forward
from forebay.protocol.plan import ROW_WORDS
from forebay.state.inputs import PromptRows
from forebay.state.pages import KvPool
from forebay.state.slots import SlotTables


class TorchCompute:
    """A model's forward pass in PyTorch's operators, on any device. The reference for every other way."""

    def __init__(self, model: Decoder, tables: SlotTables, kv: KvPool, prompts: PromptRows, device: Device) -> None:
        self._model = model
        self._tables = tables
        self._kv = kv
        self._prompts = prompts
        self._device = device

    def logits(self, launch: Launch) -> torch.Tensor:
        return self._model(self._forward(launch))

    def pool(self, launch: Launch) -> torch.Tensor:
        # A decoder without a head gives the states themselves, and causal models pool the last one only.
        return self.logits(launch)

    def greedy(self, launch: Launch) -> tuple[torch.Tensor, torch.Tensor]:
        return self._model.ops.greedy(self.logits(launch))

    def _forward(self, launch: Launch) -> Forward:
        """Tokens and positions are made on the device from the plan's rows; what is decided is decided on the host."""
        rows, tables, page_size, backend = launch.rows, self._tables, self._kv.page_size, self._model.backend
        order = backend.order(rows.length, rows.start + rows.length)
        length = rows.length[order]
        offset = np.cumsum(length) - length
        total = int(length.sum())
        # Where the last token of each row that samples is.
        last = np.empty_like(offset)
        last[order] = offset + length - 1
        spans = [] if rows.given is None else rows.given.spans(order, rows.start, rows.length)
        in_order, sampled, *given = self._device.copy_in(order, last[rows.sampling], *map(self._prompts.rows, spans))

        slots, starts, lengths, _ = launch.inputs.records("rows", ROW_WORDS).index_select(0, in_order).unbind(1)
        row = torch.arange(len(order), device=slots.device).repeat_interleave(lengths, output_size=total)
        first = starts - (lengths.cumsum(0) - lengths)
        positions = torch.arange(total, device=slots.device) + first.index_select(0, row)
        token_slots = slots.index_select(0, row)
        page_entries = token_slots * tables.pages_per_slot + positions // page_size
        pages = tables.page_table.view(-1).index_select(0, page_entries)
        stride = self._kv.page_stride
        batch = Batch(rows.start[order], length, offset, slots, starts + lengths, tables.page_table, page_size, stride)
        return Forward(
            tokens=tables.token_pool.view(-1).index_select(0, token_slots * tables.stride + positions),
            given=[(span.at, self._prompts.tensor(part)) for span, part in zip(spans, given, strict=True)],
            positions=positions,
            sampled=sampled,
            writes=pages.long() * stride + positions % page_size,
            prepared=backend.prepare(batch, self._kv.dtype),
            kv=self._kv.layers,
        )
