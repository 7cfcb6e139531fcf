"""A plan on the device."""

from __future__ import annotations

from functools import cached_property

import torch

from forebay.device import Device
from forebay.gpu.tables import Received
from forebay.protocol.plan import Plan


class StepInputs:
    """A plan's columns on the device, int32, by name. They are views of one copy of its frame's body. Used as work."""

    def __init__(self, plan: Plan, device: Device) -> None:
        self.plan = plan
        self.received: Received | None = None
        """The plan for kernels, once it is on the device."""
        self._device = device
        self._body: torch.Tensor | None = None

    @cached_property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return self.plan.token_count

    def column(self, name: str) -> torch.Tensor:
        """The words of a column, one after the other."""
        if self._body is None:
            # Many steps only decode: if rows are read from host memory, there is no copy at all.
            (self._body,) = self._device.copy_in(self.plan.body)
        return self._body[self.plan.place(name)]

    def records(self, name: str, words: int) -> torch.Tensor:
        """A column of records as int64 [records, words]."""
        return self.column(name).view(-1, words).long()
