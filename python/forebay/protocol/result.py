"""A step result: the hands' answer for one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forebay.protocol.frames import Float32s, Frame, Int32s, Kind, WireError, encode, floats, ints

ROW_OK = 0
ROW_NOT_FINITE = 1
COPIED_WORDS = 2
COPY_OK = 0
COPY_FAILED = 1

COLUMNS = (
    "tokens",
    "row_errors",
    "logprob_counts",
    "logprob_ids",
    "logprob_values",
    "timing",
    "pooled",
    "token_counts",
    "copied",
    "copy_timing",
    "sparse_rows",
    "copy_wait_us",
    "prompt_ranks",
    "prompt_ids",
    "prompt_values",
)
"""The columns of a result's frame: the ids 1, 2, and so on."""


@dataclass
class StepResult:
    """The result of one step.

    Shapes: `s` sampled rows, `t` tokens of all of them, `r` rows, `e` log-probability entries of all tokens, `p` pooled
    rows.
    """

    step: int = 0
    tokens: Int32s = ints(0)  # [t]
    row_errors: Int32s = ints(0)  # [r]: ROW_OK or ROW_NOT_FINITE
    logprob_counts: Int32s = ints(0)  # [t], or empty when no row asked
    logprob_ids: Int32s = ints(0)  # [e]: the sampled token, then the most likely ones
    logprob_values: Float32s = floats(0)  # [e]: natural logarithms
    timing: Int32s = ints(2)  # microseconds: the step's compute, the gap before it
    pooled: Float32s = floats(0)  # [p * size]: the vectors one after the other
    token_counts: Int32s = ints(0)  # [s], or empty: one each
    copied: Int32s = ints(0, COPIED_WORDS)  # [c, 2]: ticket, COPY_OK or COPY_FAILED
    copy_timing: Int32s = ints(0)  # [2], microseconds that saves and restores took; or empty: none
    sparse_rows: Int32s = ints(0)  # [4]: selected, found on pages, found in hot rows, missed; or empty: none
    copy_wait_us: Int32s = ints(0)  # [1]: microseconds that rows waited for copies; or empty: none
    prompt_ranks: Int32s = ints(0)  # [k], one a token of a prompt that the plan asks for: 1 + how many are likelier
    prompt_ids: Int32s = ints(0)  # [l], entries of these tokens: the token, then the most likely ones
    prompt_values: Float32s = floats(0)  # [l]: natural logarithms

    @classmethod
    def decode(cls, frame: Frame) -> StepResult:
        """Reads a result's frame in place. Raises `WireError` if the columns' lengths contradict each other."""
        columns = frame.expect(Kind.RESULT, len(COLUMNS))
        tokens, row_errors, counts, ids, values, timing, pooled, token_counts, copied, *rest = columns
        copy_timing, sparse_rows, copy_wait_us, ranks, prompt_ids, prompt_values = rest
        if counts.size and counts.min() < 0:
            raise WireError("malformed frame: negative count")
        sampling = tokens.size
        if token_counts.size:
            sampling = token_counts.size if token_counts.min() >= 1 and token_counts.sum() == tokens.size else -1
        if not (
            0 <= sampling <= row_errors.size
            and counts.size in (0, tokens.size)
            and ids.size == values.size == counts.sum(dtype=np.int64)
            and timing.size == 2
            and copied.size % COPIED_WORDS == 0
            and copy_timing.size in (0, 2)
            and sparse_rows.size in (0, 4)
            and sparse_rows.min(initial=0) >= 0
            and copy_wait_us.size <= 1
            and ranks.min(initial=1) >= 1
            and prompt_ids.size == prompt_values.size >= ranks.size
            and bool(ranks.size) == bool(prompt_ids.size)
        ):
            raise WireError("malformed frame: result columns disagree")
        values_, pooled_ = values.view(np.float32), pooled.view(np.float32)
        copied = copied.reshape(-1, COPIED_WORDS)
        return cls(
            frame.step,
            tokens,
            row_errors,
            counts,
            ids,
            values_,
            timing,
            pooled_,
            token_counts,
            copied,
            copy_timing,
            sparse_rows,
            copy_wait_us,
            ranks,
            prompt_ids,
            prompt_values.view(np.float32),
        )

    def encode(self) -> bytes:
        """The result's frame."""
        return encode(Kind.RESULT, self.step, [getattr(self, name) for name in COLUMNS])
