"""Pooling for encoders: from a step's rows to one vector per prompt."""

from __future__ import annotations

import numpy as np
import torch

from forebay.attention.whole import group
from forebay.compute.rows import Launch, Rows
from forebay.device import Device
from forebay.models.bert import Bert, Packed
from forebay.models.whole import WholeDecoder
from forebay.state.slots import PlanError, SlotTables, ragged


def check_whole(rows: Rows) -> None:
    """Raises `PlanError` unless each row is a whole prompt, since an encoder keeps no state. Called on the host."""
    if rows.start.any() or len(rows.sampling) != len(rows.slot):
        raise PlanError("an encoder was given a part of a prompt")


class EncoderCompute:
    """Implements `Pooler` for a model without state between steps: each row is a whole prompt."""

    def __init__(self, model: Bert | WholeDecoder, tables: SlotTables, device: Device) -> None:
        self._model = model
        self._tables = tables
        self._device = device

    def pool(self, launch: Launch) -> torch.Tensor:
        rows = launch.rows
        # Prompts of equal length become adjacent and share one call of the attention.
        order = np.argsort(rows.length, kind="stable")
        slot, length = rows.slot[order], rows.length[order]
        positions = ragged(np.zeros_like(length), length)
        entries = np.repeat(slot * self._tables.stride, length) + positions
        assert rows.segment is not None
        second = np.repeat(rows.segment[order], length)
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        segments = ((second > 0) & (positions >= second)).astype(np.int64)
        places, positions_, segments_, back_ = self._device.copy_in(entries, positions, segments, back)
        packed = Packed(
            tokens=self._tables.token_pool.view(-1).index_select(0, places),
            positions=positions_,
            segments=segments_,
            groups=group(length),
        )
        return self._model(packed).index_select(0, back_)
