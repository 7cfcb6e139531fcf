"""The masks of a step, which follow its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from forebay.compute.sampler import Ask, Sampler
from forebay.device import Device
from forebay.protocol.masks import Masks
from forebay.runner.drafts import Drafts
from forebay.runner.launched import Wait
from forebay.runner.planned import PlannedRows
from forebay.state.checks import PlanError
from forebay.state.slots import Int64s

MaskSource: TypeAlias = Callable[[], Masks]
"""Waits for the masks that follow the plan, and returns them."""


class StepMasks:
    """The masks of a step, if it has any, and the wait for them."""

    def __init__(
        self, step: int, source: MaskSource | None, arena: npt.NDArray[np.uint8], vocabulary: int, device: Device
    ) -> None:
        self._step = step
        self._source = source
        self._arena = arena
        self._vocabulary = vocabulary
        self._device = device
        self.wait: Wait | None = None
        """The wait for masks; None: there was no wait."""

    def ask(
        self,
        sampler: Sampler,
        planned: PlannedRows,
        slots: Int64s,
        positions: Int64s,
        drafts: Drafts | None,
        by_slot: bool,
    ) -> Ask:
        """Returns `Sampler.ask` for `positions` [s] of `slots` [s], the plan's rows that sample. Waits for their masks.

        The model's work of the step must already be queued. Rows whose mask is not ready, and rows after them in a
        chain, sit out. Raises `PlanError`.
        """
        with self._waiting():
            return self._ask(sampler, planned, slots, positions, drafts, by_slot)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        begun = self._device.event()
        yield
        self.wait = begun, self._device.event()

    def _ask(
        self,
        sampler: Sampler,
        planned: PlannedRows,
        slots: Int64s,
        positions: Int64s,
        drafts: Drafts | None,
        by_slot: bool,
    ) -> Ask:
        wanted = np.arange(len(planned.masked)) if drafts is None else drafts.masks
        received = self._receive(len(wanted) if drafts is None else drafts.mask_count)
        masks = received.read(self._arena, self._vocabulary)
        of_rows = zip(planned.masked.tolist(), wanted.tolist(), strict=True)
        found = {row: mask for row, at in of_rows if (mask := masks[at]) is not None}
        late = planned.masked[np.isin(wanted, received.no_token)]
        # Masks in the frame were copied; all other masks are in the arena.
        received.release()
        chains = None if drafts is None else drafts.chains
        if not len(late):
            return sampler.ask(slots, positions, found, by_slot, chains)
        rows = np.setdiff1d(np.arange(len(slots)), late) if chains is None else chains.without(late)
        number = {row: at for at, row in enumerate(rows.tolist())}
        found = {number[row]: mask for row, mask in found.items() if row in number}
        return sampler.ask_some(rows, slots, positions, found, chains)

    def _receive(self, count: int) -> Masks:
        """Waits for the masks. Raises `PlanError` unless they are this step's, and there are `count` of them."""
        if self._source is None:
            raise PlanError("a plan with masked rows, and nobody to ask for their masks")
        masks = self._source()
        if masks.step != self._step or len(masks.offsets) != count:
            raise PlanError(
                f"{len(masks.offsets)} masks of step {masks.step}, where step {self._step} has {count} masked positions"
            )
        return masks
