"""A plan on the device."""

from __future__ import annotations

from functools import cached_property

import torch

from forebay.device import Device
from forebay.gpu.tables import Received
from forebay.protocol.plan import Plan


class StepInputs:
    """A plan's columns on the device, int32, by name: views of one copy of the body. Used by queued work."""

    def __init__(self, plan: Plan, device: Device) -> None:
        self.plan = plan
        self.received: Received | None = None
        """The plan in the form for kernels; None: it is not on the device yet."""
        self._device = device
        self._body: torch.Tensor | None = None

    @cached_property
    def tokens(self) -> int:
        """The number of tokens of all rows."""
        return self.plan.token_count

    def column(self, name: str) -> torch.Tensor:
        """Returns the words of a column."""
        if self._body is None:
            # Copied on first use. Many steps only decode and need no column, so they need no copy.
            (self._body,) = self._device.copy_in(self.plan.body)
        return self._body[self.plan.place(name)]

    def records(self, name: str, words: int) -> torch.Tensor:
        """Returns a column of records as int64 [records, words]."""
        return self.column(name).view(-1, words).long()
