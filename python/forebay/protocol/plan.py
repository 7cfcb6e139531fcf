"""A step plan: the brain's orders to the hands for one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from forebay.protocol.columns import PLAN, SLOT_VALUES, PlanColumns
from forebay.protocol.constants import (
    COPY_RESTORE,
    COPY_RESTORE_INDEX,
    COPY_RESTORE_STATE,
    COPY_SAVE_STATE,
    FLAG_MASKED,
    FLAG_POOL,
    FLAG_SAMPLE,
    MAX_GROUP,
    MAX_WAIT_US,
    NO_PAGE,
    CopyRecord,
    ImageRecord,
    ImageSpanRecord,
    Kind,
    SlotRecord,
    SlotValue,
    StateCopy,
)
from forebay.protocol.frames import Frame, Int32s, WireError, encode_columns, nothing

IDS = {column.name: column.id for column in PLAN}
"""The ids of columns by name."""
LAST_ID = PLAN[-1].id
_BY_ID = {column.id: column for column in PLAN}
_ARRAYS = attrgetter(*(column.name for column in PLAN))
"""The columns of a plan, in the order of their ids."""
_EMPTY: dict[str, Any] = dict(zip(IDS, _ARRAYS(PlanColumns()), strict=True))
"""The columns of an empty plan."""
_USUAL = set(range(1, IDS["rows"] + 1))
"""The columns that plans of plain requests have."""
_NOWHERE = slice(0, 0)
_KNOWN_FLAGS = np.isin(np.arange(8), (0, FLAG_SAMPLE, FLAG_POOL, FLAG_SAMPLE | FLAG_MASKED))
"""The combinations of flags that a row may have."""


@dataclass
class Plan(PlanColumns):
    """One step of work. Each row of a two-dimensional column is a record, whose fields `constants` lists."""

    body: Int32s = field(default_factory=lambda: np.zeros(0, np.int32), compare=False)
    """The frame's body; columns are views of it. Empty until the plan is encoded."""
    places: dict[int, slice] = field(default_factory=dict, compare=False)
    """The slices of the body, in words, that contain the columns, by id."""
    release: Callable[[], None] = field(default=nothing, compare=False)
    """Releases the body's buffer. The plan's executor calls it once."""

    @classmethod
    def decode(cls, frame: Frame) -> Plan:
        """Reads a plan's frame in place. Raises `WireError` if the columns' lengths contradict each other."""
        columns = _EMPTY | frame.read(Kind.PLAN, _BY_ID)
        plan = cls(frame.step, **columns, body=frame.body, places=frame.places, release=frame.release)
        plan._check()
        return plan

    def _check(self) -> None:
        """Raises `WireError` for columns that contradict each other."""
        slots = self.slots
        inline = stops = biases = 0
        if len(slots):
            counts = slots[:, [SlotRecord.TOKEN_COUNT, SlotRecord.STOP_COUNT, SlotRecord.BIAS_COUNT]].astype(np.int64)
            if counts.min() < 0:
                raise WireError("malformed frame: negative count")
            inline = counts[slots[:, SlotRecord.ARENA_OFFSET] < 0, 0].sum()
            _, stops, biases = counts.sum(axis=0)
        agree = (
            len(self.slot_floats) == len(slots)
            and self.tokens.size == inline
            and self.stop_ids.size == stops
            and self.bias_ids.size == self.bias_values.size == biases
        )
        if not agree or not self._rare_columns_agree():
            raise WireError("malformed frame: plan columns disagree")
        if not self._flags_are_known():
            raise WireError("malformed frame: unknown row flags")

    def _flags_are_known(self) -> bool:
        """True if each row's combination of flags is known."""
        flags = self.rows[:, 3]
        bits = int(np.bitwise_or.reduce(flags))
        # If the OR of all rows' flags is at most one valid flag, the flags of each row are valid.
        if bits in (0, FLAG_SAMPLE, FLAG_POOL):
            return True
        return 0 <= bits < len(_KNOWN_FLAGS) and bool(_KNOWN_FLAGS[flags].all())

    def _rare_columns_agree(self) -> bool:
        """True if the columns that most plans lack are consistent with the other columns."""
        if self.places.keys() <= _USUAL:
            return True
        if self.row_tokens.size:
            sampling = np.count_nonzero(self.rows[:, 3] & FLAG_SAMPLE)
            if self.row_tokens.size != sampling or self.row_tokens.min() < 1:
                return False
        if self.draft_tokens.size and not self._drafts_agree():
            return False
        if len(self.allowed_counts) or len(self.allowed_ids):
            counts = self.allowed_counts[:, SlotValue.VALUE].astype(np.int64)
            if counts.min(initial=1) < 1 or counts.sum() != len(self.allowed_ids):
                return False
        if len(self.copies) and not self._copies_agree():
            return False
        if any(len(writes) and writes.min() < 0 for writes in (self.host_writes, self.hot_rows)):
            return False
        if (len(self.images) or len(self.image_spans) or len(self.image_pages) or len(self.span_pages)) and (
            not self._images_agree()
        ):
            return False
        if len(self.prompt_logprobs) and not self._prompt_logprobs_agree():
            return False
        if self.group.size and not self._group_agrees():
            return False
        if (len(self.state_loads) or len(self.state_saves)) and not self._states_agree():
            return False
        if self.wait_us.size and (self.wait_us.size > 1 or len(self.rows) or not 0 <= self.wait_us[0] <= MAX_WAIT_US):
            return False
        if len(self.place_writes) and self.place_writes.min() < 0:
            return False
        for name in SLOT_VALUES:
            values: Int32s = getattr(self, name)
            if len(values):
                slots = iter(self.slots[:, SlotRecord.SLOT].tolist())
                # The values are in the order of the new slots, so there is at most one per slot.
                if values[:, SlotValue.VALUE].min() < 0 or not all(
                    slot in slots for slot in values[:, SlotValue.SLOT].tolist()
                ):
                    return False
        return True

    def _copies_agree(self) -> bool:
        """True if each copy has a valid direction, and the pages that the direction needs."""
        direction, hot = self.copies[:, CopyRecord.DIRECTION], self.copies[:, CopyRecord.HOT]
        index = direction == COPY_RESTORE_INDEX
        return bool(
            self.copies[:, [CopyRecord.TICKET, CopyRecord.DIRECTION, CopyRecord.HOST]].min() >= 0
            and direction.max() <= COPY_RESTORE_STATE
            and np.where(index, hot == NO_PAGE, hot >= 0).all()
            and self._spans_agree(direction)
            and self._sources_agree(direction)
        )

    def _spans_agree(self, direction: Int32s) -> bool:
        """True if no copy has a span, or all have one and those of states have a count of 0: they are copied whole."""
        spans = self.copy_spans
        if not len(spans):
            return True
        return len(spans) == len(direction) and bool(
            spans.min() >= 0 and (spans[direction >= COPY_SAVE_STATE, 1] == 0).all()
        )

    def _sources_agree(self, direction: Int32s) -> bool:
        """True if only restores of whole pages and of states read another replica's host tier."""
        sources = self.copy_sources
        if not len(sources):
            return True
        return len(sources) == len(direction) and bool(
            sources.min() >= 0 and np.isin(direction[sources > 0], (COPY_RESTORE, COPY_RESTORE_STATE)).all()
        )

    def _drafts_agree(self) -> bool:
        """True if each row that may sample several tokens has all of its drafts."""
        more = self.row_tokens - 1
        return bool(more.sum(dtype=np.int64) == self.draft_tokens.size and self.draft_tokens.min() >= 0)

    @property
    def token_count(self) -> int:
        """The number of positions that the plan's rows compute."""
        return int(self.rows[:, 2].sum(dtype=np.int64))

    def _group_agrees(self) -> bool:
        """True if the column `group` is valid, and contains this plan's number of tokens."""
        tokens = self.group
        return 2 <= tokens.size <= MAX_GROUP and int(tokens.min()) >= 0 and self.token_count in tokens

    def _states_agree(self) -> bool:
        """True if no slot is loaded twice, and no page is saved to twice."""
        loads, saves = self.state_loads, self.state_saves
        return bool(
            min(loads.min(initial=0), saves.min(initial=0)) >= 0
            and len(np.unique(loads[:, StateCopy.SLOT])) == len(loads)
            and len(np.unique(saves[:, StateCopy.PAGE])) == len(saves)
        )

    def _prompt_logprobs_agree(self) -> bool:
        """True if rows compute the positions of each request for prompt log-probabilities, in row order."""
        rows = iter(self.rows.tolist())
        for slot, first, count, most in self.prompt_logprobs.tolist():
            row = next((row for row in rows if row[0] == slot), None)
            if row is None or min(count - 1, most) < 0 or not row[1] < first <= row[1] + row[2] + 1 - count:
                return False
        return True

    def _images_agree(self) -> bool:
        """True if images and spans have all of their pages, and no value is negative except an offset of -1."""
        for records, count, pages in (
            (self.images, ImageRecord.PAGE_COUNT, self.image_pages),
            (self.image_spans, ImageSpanRecord.PAGE_COUNT, self.span_pages),
        ):
            if records[:, count].sum(dtype=np.int64) != len(pages) or pages.min(initial=0) < 0:
                return False
        offsets = self.images[:, ImageRecord.ARENA_OFFSET]
        others = np.delete(self.images, ImageRecord.ARENA_OFFSET, axis=1)
        return bool(min(others.min(initial=0), self.image_spans.min(initial=0)) >= 0 and offsets.min(initial=0) >= -1)

    def place(self, column: str) -> slice:
        """Returns the slice of `body`, in words, that contains a column."""
        return self.places.get(IDS[column], _NOWHERE)

    def encode(self) -> bytes:
        """Encodes the plan's frame."""
        return encode_columns(Kind.PLAN, self.step, zip(_BY_ID, _ARRAYS(self), strict=True))

    def staged(self) -> Plan:
        """Returns the same plan in received form: its columns are views of one body."""
        return Plan.decode(Frame.of(self.encode()))
