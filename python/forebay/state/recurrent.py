"""The recurrent states of slots: the host's records, and the tables of states.

A slot has two rows of a table. If a masked row's mask is late, the row's last position is computed again. So the state
after that position goes to the slot's other row of the table. The start of the slot's next row in a plan determines
which of the two states it continues. In the table, the rows of state pages follow those of slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol

import numpy as np
import torch

from forebay.attention.states import LayerStates, StatePiece, StepStates
from forebay.device import Device
from forebay.gpu.recurrent import NO_STATE
from forebay.protocol.constants import (
    COPY_RESTORE_STATE,
    COPY_SAVE_STATE,
    FLAG_MASKED,
    CopyRecord,
    SlotRecord,
    StateCopy,
)
from forebay.protocol.frames import Int32s
from forebay.protocol.plan import Plan
from forebay.state.checks import PlanError, within
from forebay.state.config import RunnerConfig
from forebay.state.counts import Int64s
from forebay.weights.config import ModelConfig
from forebay.weights.parts import Recurrence

__all__ = ["RowStates", "SlotStates", "StatePages", "StateStore", "StateTables", "slot_bytes", "state_page_count"]

_NOTHING = -1
"""The number of positions of a slot or page without a state."""
_SHARE = 4
"""State pages get the memory for pages divided by this number, if their count is not given."""
_LEAST_EACH = 1
_MOST_EACH = 8
"""The smallest and the largest number of state pages per slot, if their number is not given."""


def slot_bytes(config: RunnerConfig) -> int:
    """Returns the bytes of the states of all slots, each with two rows, and of the row for padding."""
    model = config.kept_model
    return 0 if model is None else (2 * config.slots + 1) * model.state_bytes(config.dtype)


def state_page_count(config: RunnerConfig, free_bytes: int) -> int:
    """Returns the number of state pages, which the configuration may specify.

    Otherwise they take a quarter of `free_bytes`, the memory that is left for pages of all kinds, but at least one page
    and at most 8 pages per slot.
    """
    model = config.kept_model
    of_slot = 0 if model is None else model.state_bytes(config.dtype)
    if of_slot == 0:
        return 0
    if config.state_pages is not None:
        return config.state_pages
    affordable = max(free_bytes, 0) // _SHARE // of_slot
    return min(max(affordable, _LEAST_EACH * config.slots), _MOST_EACH * config.slots)


@dataclass(frozen=True)
class RowStates:
    """The states that a step's rows continue; `r` rows."""

    source: Int64s  # [r]: the table row with the state before the row
    target: Int64s  # [r]: the table row that receives the state after the last position
    fresh: Int64s  # the table rows of rows that start at position 0, whose state is zero
    loads: Int64s  # [l, 2]: table rows that are copied before the step: source and target
    saves: Int64s  # [m, 2]: like `loads`, after the step

    @property
    def places(self) -> Int64s:
        """The rows in the form of `gpu.recurrent.StateRows.places`, [r, 3]."""
        begins = np.isin(self.source, self.fresh)
        return np.stack((np.where(begins, NO_STATE, self.source), self.source, self.target), axis=1)

    def pieces(self, order: Int64s, lengths: Int64s) -> Iterator[StatePiece]:
        """Yields the pieces of rows in this order, with consecutive tokens."""
        first = 0
        for row, length in zip(order.tolist(), lengths.tolist(), strict=True):
            source, target = int(self.source[row]), int(self.target[row])
            if source != target and length > 1:
                yield StatePiece(first, length - 1, source, source)
                yield StatePiece(first + length - 1, 1, source, target)
            else:
                yield StatePiece(first, length, source, target)
            first += length


class SlotStates:
    """The host's record of states: the number of positions that the state of each slot and each page includes."""

    def __init__(self, slots: int, pages: int, checked: bool = True) -> None:
        """`checked` False: rows may start anywhere, because steps that measure memory have no earlier state."""
        self.slots = slots
        self.page_count = pages
        self._checked = checked
        self._seen: Int64s = np.full(slots, _NOTHING, np.int64)
        self._other: Int64s = np.full(slots, _NOTHING, np.int64)
        """The number of positions that the state in a slot's other row includes, if it may still be continued."""
        self._half: Int64s = np.zeros(slots, np.int64)
        self._of_page: Int64s = np.full(pages, _NOTHING, np.int64)

    @property
    def rows(self) -> int:
        """The number of rows of the tables. The last row is for padding."""
        return 2 * self.slots + self.page_count + 1

    def read(self, plan: Plan) -> RowStates:
        """Returns the states of a plan's rows. The plan's new slots have already been checked.

        Raises `PlanError` if a row does not start at the position of its slot's state, or if a page has no state.
        """
        new = plan.slots[:, SlotRecord.SLOT]
        self._seen[new] = self._other[new] = _NOTHING
        loads = self._load(plan.state_loads)
        slots, starts, lengths, flags = plan.rows.T.astype(np.int64)
        if len(slots):
            within(slots, self.slots, "row: slot")
        if len(np.unique(slots)) < len(slots):
            raise PlanError(f"rows of slots {slots.tolist()}, of which one has two rows beside its recurrent states")
        source, target, fresh = np.zeros_like(slots), np.zeros_like(slots), []
        columns = zip(
            slots.tolist(), starts.tolist(), lengths.tolist(), (flags & FLAG_MASKED != 0).tolist(), strict=True
        )
        for number, (slot, start, length, waits) in enumerate(columns):
            source[number] = self._source(slot, start)
            if start == 0:
                fresh.append(source[number])
            self._other[slot], self._seen[slot] = _NOTHING, start + length
            if waits:
                self._other[slot] = start + length - 1
                self._half[slot] = 1 - self._half[slot]
            target[number] = self._row(slot)
        saves = self._save(plan.state_saves)
        self._copy(plan.copies)
        return RowStates(source, target, np.array(fresh, np.int64), loads, saves)

    def seen(self, page: int) -> int:
        """Returns the number of positions that the state on a page includes."""
        return int(self._of_page[page])

    def has_come(self, page: int, seen: int) -> None:
        """Notes that a state from the host has arrived on a page. May be called by any thread."""
        self._of_page[page] = seen

    def _copy(self, copies: Int32s) -> None:
        """Checks copies of states to the host and back. The target of a restore has no state until it has arrived."""
        of_states = copies[copies[:, CopyRecord.DIRECTION] >= COPY_SAVE_STATE]
        if not len(of_states):
            return
        within(of_states[:, CopyRecord.HOT], self.page_count, "copy of a state: page")
        for direction, page in of_states[:, [CopyRecord.DIRECTION, CopyRecord.HOT]].tolist():
            if direction == COPY_RESTORE_STATE:
                self._of_page[page] = _NOTHING
            elif self._of_page[page] == _NOTHING:
                raise PlanError(f"state page {page} has no state for the host")

    def _row(self, slot: int) -> int:
        return int(slot + self.slots * self._half[slot])

    def _source(self, slot: int, start: int) -> int:
        """Returns the table row with the state before position `start`, and makes it the slot's current row."""
        if start > 0 and self._checked and self._seen[slot] != start:
            if self._other[slot] != start:
                raise PlanError(
                    f"a row of slot {slot} begins at position {start}, and the slot's recurrent states have seen others"
                )
            self._half[slot] = 1 - self._half[slot]
        return self._row(slot)

    def _load(self, copies: Int32s) -> Int64s:
        found: Int64s = np.zeros((len(copies), 2), np.int64)
        for number, (slot, page) in enumerate(self._checked_copies(copies)):
            if self._of_page[page] == _NOTHING:
                raise PlanError(f"state page {page} has no state for slot {slot}")
            self._seen[slot], self._other[slot] = self._of_page[page], _NOTHING
            found[number] = 2 * self.slots + page, self._row(slot)
        return found

    def _save(self, copies: Int32s) -> Int64s:
        found: Int64s = np.zeros((len(copies), 2), np.int64)
        for number, (slot, page) in enumerate(self._checked_copies(copies)):
            if self._seen[slot] == _NOTHING:
                raise PlanError(f"slot {slot} has no state for state page {page}")
            self._of_page[page] = self._seen[slot]
            found[number] = self._row(slot), 2 * self.slots + page
        return found

    def _checked_copies(self, copies: Int32s) -> Iterator[list[int]]:
        if len(copies):
            within(copies[:, StateCopy.SLOT], self.slots, "copy of a state: slot")
            within(copies[:, StateCopy.PAGE], self.page_count, "copy of a state: page")
        yield from copies.tolist()


class StateStore(Protocol):
    """The memory of states. All methods run as queued work."""

    def step(self, pieces: Iterable[StatePiece]) -> Any:
        """Returns the model's input for the states that the pieces of a step advance."""

    def copy(self, rows: Int64s) -> None:
        """Copies rows: `rows` [n, 2] are pairs of source and target."""

    def clear(self, rows: Int64s) -> None:
        """Resets rows [n] to the state before the first position."""


class StateTables:
    """Implements `StateStore` with a table per layer.

    The tables of layers with the same shape are contiguous, so that one operator copies rows of all of them.
    """

    def __init__(self, model: ModelConfig, rows: int, dtype: torch.dtype, device: Device) -> None:
        self._device = device
        self.rows = rows
        self._all: list[torch.Tensor] = []
        """The tables of each shape, [layers, rows, ...]."""
        counts = Counter(model.recurrent)
        tables: dict[Recurrence, Iterator[LayerStates]] = {}
        for shape, count in counts.items():
            inputs = device.zeros((count, rows, shape.taps - 1, shape.channels), dtype)
            self._all.append(inputs)
            heads: Iterable[torch.Tensor | None] = repeat(None)
            if shape.heads:
                states = device.zeros((count, rows, shape.heads, shape.key_dim, shape.value_dim), torch.float32)
                self._all.append(states)
                heads = states
            tables[shape] = map(LayerStates, inputs, heads)
        self.layers = [next(tables[shape]) for shape in model.recurrent]

    def copy(self, rows: Int64s) -> None:
        if not len(rows):
            return
        source, target = self._device.copy_in(rows[:, 0].copy(), rows[:, 1].copy())
        for tables in self._all:
            tables.index_copy_(1, target, tables.index_select(1, source))

    def clear(self, rows: Int64s) -> None:
        if not len(rows):
            return
        (numbers,) = self._device.copy_in(rows)
        for tables in self._all:
            tables.index_fill_(1, numbers, 0)

    def pieces(self) -> list[torch.Tensor]:
        """Returns the bytes of each row, uint8 `[rows, bytes]` per table."""
        return [table.flatten(1).view(torch.uint8) for tables in self._all for table in tables]

    def step(self, pieces: Iterable[StatePiece]) -> StepStates:
        singles: list[StatePiece] = []
        late: list[StatePiece] = []
        chunks: list[StatePiece] = []
        begun: set[int] = set()
        for piece in pieces:
            if piece.length > 1:
                chunks.append(piece)
            else:
                (late if piece.source in begun else singles).append(piece)
            begun.add(piece.source)
        return StepStates(self.layers, self._columns(singles), chunks, self._columns(late))

    def _columns(self, pieces: list[StatePiece]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        numbers: Int64s = np.array(pieces, np.int64).reshape(-1, 4)
        first, source, target = self._device.copy_in(*(numbers[:, at].copy() for at in (0, 2, 3)))
        return first, source, target


class StatePages:
    """The device's state pages, for copies to the host and back."""

    def __init__(self, slots: SlotStates, tables: StateTables) -> None:
        self._slots = slots
        self._pieces = tables.pieces()
        self._first = 2 * slots.slots
        self.nbytes = sum(piece.shape[1] for piece in self._pieces)
        """The bytes of a state page over all layers."""

    def page(self, number: int) -> list[torch.Tensor]:
        """Returns the bytes of a page, uint8 `[bytes]` per table."""
        return [piece[self._first + number] for piece in self._pieces]

    def seen(self, page: int) -> int:
        """Returns the number of positions that the state on a page includes."""
        return self._slots.seen(page)

    def has_come(self, page: int, seen: int) -> None:
        """Notes that a state from the host has arrived on a page. May be called by any thread."""
        self._slots.has_come(page, seen)
