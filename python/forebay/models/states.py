"""The recurrent states of slots, for models that transformers computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from forebay.attention.backend import Batch
from forebay.weights.errors import ModelError


class StatePositionError(ModelError):
    """A plan computes a row whose state nobody has: the state has seen other positions than those before the row."""


class SlotStates:
    """A cache object for each slot, with the number of positions that it has seen.

    A row whose answer came too late for its mask is computed again. So the states before the last row of a slot are
    kept until the next one shows which of both it continues.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._slots: dict[int, tuple[int, Any]] = {}
        self._before: dict[int, tuple[int, Any]] = {}

    def of_rows(self, batch: Batch) -> list[Any]:
        """The cache objects of a step's rows, which are about to advance by the rows' tokens.

        Raises `StatePositionError`.
        """
        rows = zip(batch.host_slots.tolist(), batch.start.tolist(), batch.length.tolist(), strict=True)
        return [self._of_row(slot, start, length) for slot, start, length in rows]

    def _of_row(self, slot: int, start: int, length: int) -> Any:
        seen, state = (0, self._make()) if start == 0 else self._slots.get(slot, (0, None))
        if seen != start:
            seen, state = self._before.get(slot, (0, None))
        if seen != start or state is None:
            raise StatePositionError(
                f"a row of slot {slot} begins at position {start}, and the slot's recurrent states have seen others"
            )
        if start > 0:
            self._before[slot] = seen, copy.deepcopy(state)
        self._slots[slot] = start + length, state
        return state
