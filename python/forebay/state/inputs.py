"""Input embeddings that requests provide, in place of token embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from forebay.state.slots import Int64s, PlanError, SlotTables


@dataclass(frozen=True)
class Given:
    """Tells which of a step's `r` rows have their first input in the arena."""

    used: npt.NDArray[np.bool_]  # [r]: True if the row's first input is in the arena
    embeds: Int64s  # [r]: the byte offset in the arena of the embeddings of the row's slot
    until: Int64s  # [r]: positions below this have embeddings in the arena

    def spans(self, row: Int64s, start: Int64s, length: Int64s) -> list[Span]:
        """Returns the spans of a step's tokens. The arguments are pieces of rows [p], in token order."""
        counts = np.minimum(length, self.until[row] - start)
        used = self.used[row] & (counts > 0)
        at = np.cumsum(length) - length
        columns = (column[used].tolist() for column in (self.embeds[row], at, start, counts))
        return [Span(*values) for values in zip(*columns, strict=True)]


@dataclass(frozen=True)
class Span:
    """Positions `first .. first + count` of a slot, which are the step's tokens `at .. at + count`."""

    embeds: int
    at: int
    first: int
    count: int


class PromptRows:
    """The prompt embeddings in the arena: `prompt_len` rows of `hidden` elements for each slot that has any."""

    def __init__(self, arena: npt.NDArray[np.uint8], tables: SlotTables, hidden: int, dtype: torch.dtype) -> None:
        self._arena = arena
        self._tables = tables
        self._hidden = hidden
        self._dtype = dtype
        self._row_bytes = hidden * dtype.itemsize

    def given(self, slot: Int64s, start: Int64s) -> Given | None:
        """Returns the inputs in the arena for rows [r] that begin at `start`; None: there are none. Raises `PlanError`.

        Called on the host.
        """
        tables = self._tables
        embeds = tables.embeds[slot]
        if np.maximum.reduce(embeds) < 0:
            return None
        prompt_len = tables.prompt_len[slot].astype(np.int64)
        used: npt.NDArray[np.bool_] = (embeds >= 0) & (start < prompt_len)
        if not used.any():
            return None
        for number in slot[used].tolist():
            self._check(number)
        return Given(used, embeds, prompt_len)

    def rows(self, span: Span) -> npt.NDArray[np.uint8]:
        """Returns a span's embeddings as bytes, uint8 [count * row bytes], copied: no tensor refers to the arena."""
        first = span.embeds + span.first * self._row_bytes
        found: npt.NDArray[np.uint8] = self._arena[first : first + span.count * self._row_bytes].copy()
        return found

    def tensor(self, bytes_: torch.Tensor) -> torch.Tensor:
        """Converts a span's bytes to embeddings [count, hidden]. Runs as queued work."""
        return bytes_.view(self._dtype).view(-1, self._hidden)

    def _check(self, slot: int) -> None:
        first = int(self._tables.embeds[slot])
        end = first + int(self._tables.prompt_len[slot]) * self._row_bytes
        if end > len(self._arena) or first % self._dtype.itemsize:
            raise PlanError(f"embeddings at bytes {first}..{end} of an arena of {len(self._arena)}")
