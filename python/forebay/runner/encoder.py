"""From a step's rows to the vectors of an encoder."""

from __future__ import annotations

import numpy as np
import torch

from forebay.attention.whole import group
from forebay.device import Device
from forebay.models.bert import Bert, Packed
from forebay.runner.compute import Rows
from forebay.runner.slots import PlanError, SlotTables, ragged


class EncoderCompute:
    """Implements `Pooler` for a model that keeps nothing between steps: each row is a whole prompt."""

    def __init__(self, model: Bert, tables: SlotTables, device: Device) -> None:
        self._model = model
        self._tables = tables
        self._device = device

    def pool(self, rows: Rows) -> torch.Tensor:
        if rows.start.any() or len(rows.sampling) != len(rows.slot):
            raise PlanError("an encoder was given a part of a prompt")
        # Prompts of one length lie side by side and share a call of the attention.
        order = np.argsort(rows.length, kind="stable")
        slot, length = rows.slot[order], rows.length[order]
        positions = ragged(np.zeros_like(length), length)
        entries = np.repeat(slot * self._tables.stride, length) + positions
        second = np.repeat(self._tables.segment[slot], length)
        upload = self._device.upload
        packed = Packed(
            tokens=self._tables.token_pool.view(-1).index_select(0, upload(entries)),
            positions=upload(positions),
            segments=upload(((second > 0) & (positions >= second)).astype(np.int64)),
            groups=group(length),
        )
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return self._model(packed).index_select(0, upload(back))
