"""A step plan: the brain's orders to the hands for one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from forebay.protocol.frames import Float32s, Frame, Int32s, Kind, WireError, encode, floats, ints, nothing

SLOT_WORDS = 11
SLOT_FLOATS = 6
PAGE_WRITE_WORDS = 3
ROW_WORDS = 4
FLAG_SAMPLE = 1
FLAG_POOL = 2
FLAG_MASKED = 4
PAIR_WORDS = 2
COPY_WORDS = 4
COPY_SAVE = 0
COPY_RESTORE = 1
COPY_RESTORE_INDEX = 2
SPAN_WORDS = 2
IMAGE_WORDS = 7
IMAGE_SPAN_WORDS = 6
PROMPT_LOGPROBS_WORDS = 4
NO_PAGE = -1
MAX_WAIT_US = 1000
MAX_GROUP = 256

COLUMNS = (
    "slots",
    "slot_floats",
    "tokens",
    "stop_ids",
    "bias_ids",
    "bias_values",
    "page_writes",
    "rows",
    "row_tokens",
    "segments",
    "embeds",
    "allowed_counts",
    "allowed_ids",
    "copies",
    "wait_us",
    "host_writes",
    "hot_rows",
    "copy_spans",
    "images",
    "image_pages",
    "image_spans",
    "span_pages",
    "unused",
    "prompt_logprobs",
    "group",
)
"""The columns of a plan's frame, with the ids 1, 2, and so on. `unused` stands for an id without a column."""
_IDS = {name: id_ for id_, name in enumerate(COLUMNS, 1)}


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


class SlotFloat(IntEnum):
    """Index of a field in a new slot's record of the `slot_floats` column."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    REPETITION_PENALTY = 3
    PRESENCE_PENALTY = 4
    FREQUENCY_PENALTY = 5


class ImageWord(IntEnum):
    """Index of a field in a record of the `images` column."""

    IMAGE = 0
    FIRST_LAYER = 1
    END_LAYER = 2
    GRID_H = 3
    GRID_W = 4
    ARENA_OFFSET = 5
    PAGE_COUNT = 6


class ImageSpanWord(IntEnum):
    """Index of a field in a record of the `image_spans` column."""

    SLOT = 0
    POSITION = 1
    GRID_H = 2
    GRID_W = 3
    ROPE = 4
    PAGE_COUNT = 5


_RECORDS = {
    "slots": SLOT_WORDS,
    "slot_floats": SLOT_FLOATS,
    "page_writes": PAGE_WRITE_WORDS,
    "rows": ROW_WORDS,
    "segments": PAIR_WORDS,
    "embeds": PAIR_WORDS,
    "allowed_counts": PAIR_WORDS,
    "copies": COPY_WORDS,
    "host_writes": PAGE_WRITE_WORDS,
    "hot_rows": PAGE_WRITE_WORDS,
    "copy_spans": SPAN_WORDS,
    "images": IMAGE_WORDS,
    "image_spans": IMAGE_SPAN_WORDS,
    "prompt_logprobs": PROMPT_LOGPROBS_WORDS,
}
_FLOATS = ("slot_floats", "bias_values")
_EMPTY: dict[str, Any] = {
    name: np.zeros((0, _RECORDS[name]) if name in _RECORDS else 0, np.float32 if name in _FLOATS else np.int32)
    for name in COLUMNS
}
"""The columns of a plan that has none."""
_USUAL = {_IDS[name] for name in COLUMNS[: COLUMNS.index("rows") + 1]}
"""The columns that plans of plain requests have."""
_NOWHERE = slice(0, 0)
_KNOWN_FLAGS = np.isin(np.arange(8), (0, FLAG_SAMPLE, FLAG_POOL, FLAG_SAMPLE | FLAG_MASKED))
"""The combinations of flags that a row may have."""


@dataclass
class Plan:
    """One step of work. Shapes: `n` new slots, `p` page-table writes, `r` rows, `s` of them sampling."""

    step: int = 0
    slots: Int32s = ints(0, SLOT_WORDS)  # [n, 11], fields by SlotWord
    slot_floats: Float32s = floats(0, SLOT_FLOATS)  # [n, 6], fields by SlotFloat
    tokens: Int32s = ints(0)  # ragged, of the new slots whose ARENA_OFFSET is -1
    stop_ids: Int32s = ints(0)  # ragged, STOP_COUNT a new slot
    bias_ids: Int32s = ints(0)  # ragged, BIAS_COUNT a new slot
    bias_values: Float32s = floats(0)  # one a bias id
    page_writes: Int32s = ints(0, PAGE_WRITE_WORDS)  # [p, 3]: slot, index, page or NO_PAGE
    rows: Int32s = ints(0, ROW_WORDS)  # [r, 4]: slot, start, length, flags
    row_tokens: Int32s = ints(0)  # [s]: most tokens that the row may give; or empty: one each
    segments: Int32s = ints(0, PAIR_WORDS)  # [<= n, 2]: slot, where the second text of its pair begins
    embeds: Int32s = ints(0, PAIR_WORDS)  # [<= n, 2]: slot, where its prompt's embeddings begin in the arena, in bytes
    allowed_counts: Int32s = ints(0, PAIR_WORDS)  # [<= n, 2]: slot, how many ids alone may be sampled
    allowed_ids: Int32s = ints(0)  # ragged, by allowed_counts; ascending a slot
    copies: Int32s = ints(0, COPY_WORDS)  # [c, 4]: ticket, a COPY_ direction, page of the device, of the host
    wait_us: Int32s = ints(0)  # [1] in a plan without rows whose answer may wait for copies, else empty
    host_writes: Int32s = ints(0, PAGE_WRITE_WORDS)  # [h, 3]: slot, index, page of the host's tier
    hot_rows: Int32s = ints(0, PAGE_WRITE_WORDS)  # [w, 3]: slot, index, page that is for its rows
    copy_spans: Int32s = ints(0, SPAN_WORDS)  # [c, 2]: first position of a page, count, 0: all; or empty: all of each
    images: Int32s = ints(0, IMAGE_WORDS)  # [i, 7], fields by ImageWord: layers of the tower to compute
    image_pages: Int32s = ints(0)  # ragged, PAGE_COUNT an image: where the tower's output goes
    image_spans: Int32s = ints(0, IMAGE_SPAN_WORDS)  # [m, 6], fields by ImageSpanWord: where images stand in slots
    span_pages: Int32s = ints(0)  # ragged, PAGE_COUNT a span: where their rows are
    unused: Int32s = ints(0)
    prompt_logprobs: Int32s = ints(0, PROMPT_LOGPROBS_WORDS)
    # [q, 4]: slot, first token, tokens, how many of the most likely beside each; in the order of rows
    group: Int32s = ints(0)  # [ranks]: tokens of each rank of a step group in this step, or empty
    body: Int32s = field(default_factory=lambda: np.zeros(0, np.int32), compare=False)
    """The frame's body; columns are views of it. Empty until the plan is encoded."""
    places: dict[int, slice] = field(default_factory=dict, compare=False)
    """The places of the columns in the body, by id."""
    release: Callable[[], None] = field(default=nothing, compare=False)
    """The release of the body's buffer. The executor of the plan calls it, once."""

    @classmethod
    def decode(cls, frame: Frame) -> Plan:
        """Reads a plan's frame in place. Raises `WireError` if the columns' lengths contradict each other."""
        frame.check_kind(Kind.PLAN)
        columns = _EMPTY.copy()
        for id_, column in frame.present(len(COLUMNS)).items():
            name = COLUMNS[id_ - 1]
            words = _RECORDS.get(name)
            if words is not None:
                if column.size % words:
                    raise WireError("malformed frame: plan record length")
                column = column.reshape(-1, words)
            columns[name] = column.view(np.float32) if name in _FLOATS else column
        plan = cls(frame.step, **columns, body=frame.body, places=frame.places, release=frame.release)
        plan._check()
        return plan

    def _check(self) -> None:
        """Raises `WireError` for columns that do not fit each other."""
        slots = self.slots
        inline = stops = biases = 0
        if len(slots):
            counts = slots[:, [SlotWord.TOKEN_COUNT, SlotWord.STOP_COUNT, SlotWord.BIAS_COUNT]].astype(np.int64)
            if counts.min() < 0:
                raise WireError("malformed frame: negative count")
            inline = counts[slots[:, SlotWord.ARENA_OFFSET] < 0, 0].sum()
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
        """True if each row's flags are a known combination."""
        flags = self.rows[:, 3]
        bits = int(np.bitwise_or.reduce(flags))
        # One flag alone, in the rows that have it.
        if bits in (0, FLAG_SAMPLE, FLAG_POOL):
            return True
        return 0 <= bits < len(_KNOWN_FLAGS) and bool(_KNOWN_FLAGS[flags].all())

    def _rare_columns_agree(self) -> bool:
        """True if columns that most plans lack fit the others."""
        if self.places.keys() <= _USUAL:
            return True
        if self.row_tokens.size:
            sampling = np.count_nonzero(self.rows[:, 3] & FLAG_SAMPLE)
            if self.row_tokens.size != sampling or self.row_tokens.min() < 1:
                return False
        if len(self.allowed_counts) or len(self.allowed_ids):
            counts = self.allowed_counts[:, 1].astype(np.int64)
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
        if self.unused.size or (len(self.prompt_logprobs) and not self._prompt_logprobs_agree()):
            return False
        if self.group.size and not self._group_agrees():
            return False
        if self.wait_us.size and (self.wait_us.size > 1 or len(self.rows) or not 0 <= self.wait_us[0] <= MAX_WAIT_US):
            return False
        for pairs in (self.segments, self.embeds, self.allowed_counts):
            if len(pairs):
                slots = iter(self.slots[:, SlotWord.SLOT].tolist())
                # In the order of the new slots, and so at most one each.
                if pairs[:, 1].min() < 0 or not all(slot in slots for slot in pairs[:, 0].tolist()):
                    return False
        return True

    def _copies_agree(self) -> bool:
        """True if each copy goes one of the ways, between pages that this way has."""
        direction, hot = self.copies[:, 1], self.copies[:, 2]
        index = direction == COPY_RESTORE_INDEX
        return bool(
            self.copies[:, [0, 1, 3]].min() >= 0
            and direction.max() <= COPY_RESTORE_INDEX
            and np.where(index, hot == NO_PAGE, hot >= 0).all()
            and len(self.copy_spans) in (0, len(self.copies))
            and self.copy_spans.min(initial=0) >= 0
        )

    @property
    def token_count(self) -> int:
        """Positions that its rows compute."""
        return int(self.rows[:, 2].sum(dtype=np.int64))

    def _group_agrees(self) -> bool:
        """True if the column can be that of a group with this plan."""
        tokens = self.group
        return 2 <= tokens.size <= MAX_GROUP and int(tokens.min()) >= 0 and self.token_count in tokens

    def _prompt_logprobs_agree(self) -> bool:
        """True if each want is answered by positions of a row, in the order of rows."""
        rows = iter(self.rows.tolist())
        for slot, first, count, most in self.prompt_logprobs.tolist():
            row = next((row for row in rows if row[0] == slot), None)
            if row is None or min(count - 1, most) < 0 or not row[1] < first <= row[1] + row[2] + 1 - count:
                return False
        return True

    def _images_agree(self) -> bool:
        """True if images and spans have their pages, and nothing of them is negative but an offset that is none."""
        for records, count, pages in (
            (self.images, ImageWord.PAGE_COUNT, self.image_pages),
            (self.image_spans, ImageSpanWord.PAGE_COUNT, self.span_pages),
        ):
            if records[:, count].sum(dtype=np.int64) != len(pages) or pages.min(initial=0) < 0:
                return False
        offsets = self.images[:, ImageWord.ARENA_OFFSET]
        others = np.delete(self.images, ImageWord.ARENA_OFFSET, axis=1)
        return bool(min(others.min(initial=0), self.image_spans.min(initial=0)) >= 0 and offsets.min(initial=0) >= -1)

    def place(self, column: str) -> slice:
        """The place of a column in `body`, in words."""
        return self.places.get(_IDS[column], _NOWHERE)

    def encode(self) -> bytes:
        """The plan's frame."""
        return encode(Kind.PLAN, self.step, [getattr(self, name) for name in COLUMNS])

    def staged(self) -> Plan:
        """The same plan in received form: its columns are views of one body."""
        return Plan.decode(Frame.of(self.encode()))
