"""Pooling for causal models: from a step's rows to one vector per prompt."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from forebay.compute.rows import Launch, Rows, States
from forebay.device import Device
from forebay.state.slots import Int64s, PlanError


class LastState:
    """Implements `Pooler` with the final state of a prompt's last position, which attends to all earlier positions."""

    def __init__(self, compute: States) -> None:
        self._compute = compute

    def pool(self, launch: Launch) -> torch.Tensor:
        rows = launch.rows
        return self._compute.vectors(launch, rows.last[rows.sampling])


class MeanState:
    """Implements `Pooler` with the mean of the final states of all positions, which may be computed in several steps.

    Sums are kept in float64, so the chunks of a prompt do not change the bits of the result.
    """

    def __init__(self, compute: States, slots: int, hidden: int, device: Device) -> None:
        self._compute = compute
        self._device = device
        self._sums = torch.zeros(slots, hidden, dtype=torch.float64, device=device.torch_device)

    def pool(self, launch: Launch) -> torch.Tensor:
        rows, sums = launch.rows, self._sums
        states = self._compute.vectors(launch, np.arange(int(rows.length.sum())))
        ends = rows.last + 1
        for slot, start, first, end in zip(
            *(column.tolist() for column in (rows.slot, rows.start, ends - rows.length, ends)), strict=True
        ):
            sum_ = states[first:end].sum(dim=0, dtype=torch.float64)
            sums[slot] = sum_ if start == 0 else sums[slot] + sum_
        slots, lengths = self._device.copy_in(rows.slot[rows.sampling], (rows.start + rows.length)[rows.sampling])
        return (sums.index_select(0, slots) / lengths[:, None]).float()


class Summed:
    """For each slot, the number of positions already added to its mean. Used on the host."""

    def __init__(self, slots: int) -> None:
        self._until: Int64s = np.zeros(slots, np.int64)

    def check(self, rows: Rows) -> None:
        """Raises `PlanError` unless each row begins a prompt, or continues its slot's last row."""
        gaps = (rows.start > 0) & (rows.start != self._until[rows.slot])
        if gaps.any():
            raise PlanError(f"a mean of states that were not computed: slots {rows.slot[gaps].tolist()}")
        self._until[rows.slot] = rows.start + rows.length


KINDS: dict[str, Callable[[States, int, int, Device], LastState | MeanState]] = {
    "last": lambda compute, slots, hidden, device: LastState(compute),
    "causal_mean": MeanState,
}
"""The constructor of each kind of pooling, by `Pooling.kind`. Arguments: forward pass, slots, hidden size, device."""
