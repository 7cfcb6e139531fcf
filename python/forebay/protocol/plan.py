"""A step plan: what the brain has the hands do in one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from forebay.protocol.frames import Float32s, Frame, Int32s, Kind, WireError, encode, floats, ints, nothing

SLOT_WORDS = 13
SLOT_FLOATS = 6
PAGE_WRITE_WORDS = 3
ROW_WORDS = 4
FLAG_SAMPLE = 1
FLAG_POOL = 2

COLUMNS = ("slots", "slot_floats", "tokens", "stop_ids", "bias_ids", "bias_values", "page_writes", "rows")
"""The columns of a plan's frame, in their order."""


class SlotWord(IntEnum):
    """Index of a field in a new slot's record of the `slots` column."""

    SLOT = 0
    TOKEN_COUNT = 1
    PROMPT_LEN = 2
    TOP_K = 3
    SEED_LO = 4
    SEED_HI = 5
    MIN_TOTAL = 6
    LOGPROBS = 7
    STOP_COUNT = 8
    BIAS_COUNT = 9
    ARENA_OFFSET = 10
    SEGMENT = 11
    EMBEDS_OFFSET = 12


class SlotFloat(IntEnum):
    """Index of a field in a new slot's record of the `slot_floats` column."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    REPETITION_PENALTY = 3
    PRESENCE_PENALTY = 4
    FREQUENCY_PENALTY = 5


@dataclass
class Plan:
    """One step of work. Shapes: `n` new slots, `p` page-table writes, `r` rows."""

    step: int = 0
    slots: Int32s = ints(0, SLOT_WORDS)  # [n, 13], fields by SlotWord
    slot_floats: Float32s = floats(0, SLOT_FLOATS)  # [n, 6], fields by SlotFloat
    tokens: Int32s = ints(0)  # ragged, of the new slots whose ARENA_OFFSET is -1
    stop_ids: Int32s = ints(0)  # ragged, STOP_COUNT a new slot
    bias_ids: Int32s = ints(0)  # ragged, BIAS_COUNT a new slot
    bias_values: Float32s = floats(0)  # one a bias id
    page_writes: Int32s = ints(0, PAGE_WRITE_WORDS)  # [p, 3]: slot, index, page
    rows: Int32s = ints(0, ROW_WORDS)  # [r, 4]: slot, start, length, flags
    body: Int32s = field(default_factory=lambda: np.zeros(0, np.int32), compare=False)
    """The frame's body, of which the columns are views; empty until the plan was encoded."""
    release: Callable[[], None] = field(default=nothing, compare=False)
    """Gives the body's buffer back; whoever executes the plan calls it, once."""

    @classmethod
    def decode(cls, frame: Frame) -> Plan:
        """Reads a plan's frame in place; raises `WireError` when the columns' lengths contradict each other."""
        slots, slot_floats, tokens, stop_ids, bias_ids, bias_values, page_writes, rows = frame.expect(
            Kind.PLAN, len(COLUMNS)
        )
        if slots.size % SLOT_WORDS or page_writes.size % PAGE_WRITE_WORDS or rows.size % ROW_WORDS:
            raise WireError("malformed frame: plan record length")
        slots = slots.reshape(-1, SLOT_WORDS)
        inline = stops = biases = 0
        if len(slots):
            counts = slots[:, [SlotWord.TOKEN_COUNT, SlotWord.STOP_COUNT, SlotWord.BIAS_COUNT]].astype(np.int64)
            if counts.min() < 0:
                raise WireError("malformed frame: negative count")
            inline = counts[slots[:, SlotWord.ARENA_OFFSET] < 0, 0].sum()
            _, stops, biases = counts.sum(axis=0)
        if not (
            slot_floats.size == len(slots) * SLOT_FLOATS
            and tokens.size == inline
            and stop_ids.size == stops
            and bias_ids.size == bias_values.size == biases
        ):
            raise WireError("malformed frame: plan columns disagree")
        return cls(
            frame.step,
            slots,
            slot_floats.view(np.float32).reshape(-1, SLOT_FLOATS),
            tokens,
            stop_ids,
            bias_ids,
            bias_values.view(np.float32),
            page_writes.reshape(-1, PAGE_WRITE_WORDS),
            rows.reshape(-1, ROW_WORDS),
            frame.body,
            frame.release,
        )

    def place(self, column: str) -> slice:
        """Where a column lies in `body`, in words."""
        lengths = self.body[: len(COLUMNS)]
        index = COLUMNS.index(column)
        first = len(COLUMNS) + int(lengths[:index].sum())
        return slice(first, first + int(lengths[index]))

    def encode(self) -> bytes:
        """The plan's frame."""
        return encode(Kind.PLAN, self.step, [getattr(self, name) for name in COLUMNS])

    def staged(self) -> Plan:
        """The same plan as a hand receives it: its columns are views of one body."""
        return Plan.decode(Frame.of(self.encode()))
