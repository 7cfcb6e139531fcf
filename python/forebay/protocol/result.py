"""A step result: the hands' response to a plan."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from forebay.protocol.columns import RESULT, ResultColumns
from forebay.protocol.constants import COPY_TIMING_WORDS, SPARSE_ROWS_WORDS, STEP_TIMING_WORDS, Kind
from forebay.protocol.frames import Frame, WireError, encode_columns

_BY_ID = {column.id: column for column in RESULT}
_ARRAYS = attrgetter(*(column.name for column in RESULT))
"""The columns of a result, in the order of their ids."""


@dataclass
class StepResult(ResultColumns):
    """The result of one step."""

    @classmethod
    def decode(cls, frame: Frame) -> StepResult:
        """Reads a result's frame in place. Raises `WireError` if the columns' lengths contradict each other."""
        columns: dict[str, Any] = frame.read(Kind.RESULT, _BY_ID)
        result = cls(frame.step, **columns)
        if "timing" not in columns or not result._agrees():
            raise WireError("malformed frame: result columns disagree")
        return result

    def _agrees(self) -> bool:
        """True if the columns are consistent. Raises `WireError` for a negative count."""
        counts, ranks = self.logprob_counts, self.prompt_ranks
        if counts.size and counts.min() < 0:
            raise WireError("malformed frame: negative count")
        tokens, sampling = self.tokens.size, self.tokens.size
        if self.token_counts.size:
            fine = self.token_counts.min() >= 1 and self.token_counts.sum() == tokens
            sampling = self.token_counts.size if fine else -1
        return bool(
            0 <= sampling <= self.row_errors.size
            and counts.size in (0, tokens)
            and self.logprob_ids.size == self.logprob_values.size == counts.sum(dtype=np.int64)
            and self.timing.size == STEP_TIMING_WORDS
            and self.copy_timing.size in (0, COPY_TIMING_WORDS)
            and self.sparse_rows.size in (0, SPARSE_ROWS_WORDS)
            and self.sparse_rows.min(initial=0) >= 0
            and self.copy_wait_us.size <= 1
            and ranks.min(initial=1) >= 1
            and self.prompt_ids.size == self.prompt_values.size >= ranks.size
            and bool(ranks.size) == bool(self.prompt_ids.size)
        )

    def encode(self) -> bytes:
        """Encodes the result's frame."""
        return encode_columns(Kind.RESULT, self.step, zip(_BY_ID, _ARRAYS(self), strict=True))
