"""Input rows that requests bring along, in place of those of the embedding table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from forebay.runner.slots import Int64s, PlanError, SlotTables


@dataclass(frozen=True)
class Span:
    """Positions `first .. first + count` of a slot, which are the step's tokens `at .. at + count`."""

    slot: int
    at: int
    first: int
    count: int


class PromptRows:
    """The embeddings of prompts in the arena: `prompt_len` rows of `hidden` elements a slot that has any."""

    def __init__(self, arena: npt.NDArray[np.uint8], tables: SlotTables, hidden: int, dtype: torch.dtype) -> None:
        self._arena = arena
        self._tables = tables
        self._hidden = hidden
        self._dtype = dtype
        self._row_bytes = hidden * dtype.itemsize

    def used(self, slot: Int64s, start: Int64s) -> npt.NDArray[np.bool_]:
        """Which rows [r] begin at a position whose input is in the arena; raises `PlanError` if it is not all there."""
        used: npt.NDArray[np.bool_] = (self._tables.embeds[slot] >= 0) & (start < self._tables.prompt_len[slot])
        for number in slot[used].tolist():
            self._check(number)
        return used

    def addresses(self, slot: Int64s, used: npt.NDArray[np.bool_]) -> Int64s:
        """Where the embedding of position 0 of each row's slot is in this process's memory; 0 where not `used`, [r]."""
        return np.where(used, self._arena.ctypes.data + self._tables.embeds[slot], 0)

    def spans(self, slot: Int64s, start: Int64s, length: Int64s) -> list[Span]:
        """Which of a step's tokens, row after row, are in the arena."""
        used = self.used(slot, start)
        at = np.cumsum(length) - length
        counts = np.minimum(length, self._tables.prompt_len[slot] - start)
        columns = (column[used].tolist() for column in (slot, at, start, counts))
        return [Span(*values) for values in zip(*columns, strict=True)]

    def rows(self, span: Span) -> torch.Tensor:
        """The embeddings [count, hidden] of a span, copied: nothing of a step refers to the arena when it is over."""
        first = int(self._tables.embeds[span.slot]) + span.first * self._row_bytes
        data = self._arena[first : first + span.count * self._row_bytes].copy()
        return torch.from_numpy(data).view(self._dtype).view(span.count, self._hidden)

    def _check(self, slot: int) -> None:
        first = int(self._tables.embeds[slot])
        end = first + int(self._tables.prompt_len[slot]) * self._row_bytes
        if end > len(self._arena) or first % self._dtype.itemsize:
            raise PlanError(f"embeddings at bytes {first}..{end} of an arena of {len(self._arena)}")
