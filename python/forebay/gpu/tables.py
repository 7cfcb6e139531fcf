"""A hand's tables on its device, and plans in the device's memory.

A plan that contradicts the tables must not change another slot's memory. The device can't raise, and an access outside
of its memory kills the process. So there are one page and one slot more than the brain uses, the *null page* and the
*null slot*. They replace any page or slot that does not exist, and padding writes to them. Each kind of error is a bit
of an error word, which the hand reads together with the step's result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from forebay.protocol.constants import SLOT_FLOATS_WORDS, SLOT_WORDS, SlotRecord
from forebay.protocol.frames import Int32s
from forebay.protocol.plan import IDS, LAST_ID, Plan

ERROR_RANGE = 1
ERROR_WRITE = 2
ERROR_READ = 4
ERROR_TOKEN = 8
_ERRORS = {
    ERROR_RANGE: "a slot, a page or a position outside of the tables",
    ERROR_WRITE: "a row that writes to a page that it does not have",
    ERROR_READ: "a row that reads a page that it does not have",
    ERROR_TOKEN: "a token outside of the vocabulary",
}
NO_PAGE = -1


def describe(errors: int) -> str:
    """Describes an error word; empty: no error."""
    return ", ".join(text for bit, text in _ERRORS.items() if errors & bit)


def column_id(name: str) -> int:
    """Returns the index of a plan's column in the result of `places`."""
    return IDS[name] - 1


def places(plan: Plan) -> Int32s:
    """Returns the first word and the word count of each column in a plan's body, by id, int32 [ids, 2]."""
    found = np.zeros((LAST_ID, 2), np.int32)
    for id_, place in plan.places.items():
        found[id_ - 1] = place.start, place.stop - place.start
    return found


@dataclass(frozen=True)
class Received:
    """A plan on the device."""

    body: torch.Tensor  # int32 [words]: the frame's body, followed by unused words
    places: torch.Tensor  # int32 [ids, 2]
    arena_tokens: torch.Tensor  # int32 [tokens]: the tokens of new slots in the arena, in the order of the slots


def no_records(lines: int, device: torch.device) -> torch.Tensor:
    """Returns records of unwritten slots, int32 [lines, SLOT_WORDS]. They request no log-probabilities."""
    words = torch.zeros(lines, SLOT_WORDS, dtype=torch.int32, device=device)
    words[:, SlotRecord.LOGPROBS] = -1
    return words


@dataclass(frozen=True)
class Tables:
    """The slot tables, with a line per slot and a last line for the null slot."""

    token_pool: torch.Tensor  # int32 [slots + 1, context_length + 1]
    page_table: torch.Tensor  # int32 [slots + 1, pages per slot]
    words: torch.Tensor  # int32 [slots + 1, SLOT_WORDS]: the records of the plan
    floats: torch.Tensor  # float32 [slots + 1, SLOT_FLOATS_WORDS]
    vocabulary: int
    page_size: int
    page_count: int
    """The number of pages that the brain uses, which is also the null page's index."""
    page_stride: int
    """The number of a layer's entries from the first entry of a page to the first entry of the next page."""

    @classmethod
    def make(
        cls,
        slots: int,
        context_length: int,
        vocabulary: int,
        page_size: int,
        page_count: int,
        page_stride: int,
        device: torch.device,
    ) -> Tables:
        """Allocates tables of `slots` slots without pages. The null slot has the null page, and samples greedily."""

        def table(width: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(slots + 1, width, dtype=dtype, device=device)

        pages = table(-(-context_length // page_size), torch.int32).fill_(NO_PAGE)
        pages[slots] = page_count
        return cls(
            table(context_length + 1, torch.int32),
            pages,
            no_records(slots + 1, device),
            table(SLOT_FLOATS_WORDS, torch.float32),
            vocabulary,
            page_size,
            page_count,
            page_stride,
        )

    @property
    def null_slot(self) -> int:
        """The null slot's index, which equals the number of slots that the brain uses."""
        return len(self.token_pool) - 1


@dataclass(frozen=True)
class StepBuffers:
    """The rows that `prepare` reads from a plan: `r` rows and `n` tokens, the size of a captured graph.

    Rows after those of the plan are padding. Each has one token of the null slot as long as tokens are left, otherwise
    none. Tokens after all rows belong to no row, and are treated like tokens of the null slot.
    """

    tokens: torch.Tensor  # int32 [n]
    positions: torch.Tensor  # int64 [n]
    writes: torch.Tensor  # int64 [n]: the entry of a layer to which the token's keys and values are written
    slots: torch.Tensor  # int32 [r]
    ends: torch.Tensor  # int32 [r]
    first: torch.Tensor  # int32 [r + 1]
    last: torch.Tensor  # int64 [r]: the index of the row's last token
    sampling: torch.Tensor  # int32 [r]: the slot of a row that samples, else the null slot

    @classmethod
    def make(cls, rows: int, tokens: int, device: torch.device) -> StepBuffers:
        """Allocates buffers for steps with this many rows and tokens."""

        def buffer(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            buffer(tokens, torch.int32),
            buffer(tokens, torch.int64),
            buffer(tokens, torch.int64),
            buffer(rows, torch.int32),
            buffer(rows, torch.int32),
            buffer(rows + 1, torch.int32),
            buffer(rows, torch.int64),
            buffer(rows, torch.int32),
        )
