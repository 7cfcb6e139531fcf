"""A hand in Python that sends one wrong result for each signal.

`program` writes an interpreter that starts this hand instead of the real one. SIGRTMIN + N chooses lie N.
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from forebay.protocol.constants import ROW_NOT_FINITE
from forebay.protocol.result import StepResult

MODULE = "forebay.worker"


def other_token(result: StepResult) -> None:
    """Changes the first row's token to a neighboring id."""
    result.tokens = result.tokens.copy()
    result.tokens[0] ^= 1


def failed_row(result: StepResult) -> None:
    """Reports that the last row had no finite logits."""
    result.row_errors = result.row_errors.copy()
    result.row_errors[-1] = ROW_NOT_FINITE


def token_too_few(result: StepResult) -> None:
    """Drops the last token."""
    result.tokens = result.tokens[:-1]


def other_step(result: StepResult) -> None:
    """Names the previous step in the result."""
    result.step -= 1


LIES: tuple[Callable[[StepResult], None], ...] = (other_token, failed_row, token_too_few, other_step)
SIGNALS = tuple(signal.SIGRTMIN + number for number in range(len(LIES)))
CONTRADICTING = SIGNALS[LIES.index(token_too_few) :]
"""The lies that contradict the plan. Ranks with separate requests can detect only these."""


def program(folder: Path) -> Path:
    """Writes an interpreter into `folder` that runs this hand instead of PyTorch's."""
    python, hand = shlex.quote(sys.executable), shlex.quote(str(Path(__file__).resolve()))
    found = folder / "python"
    # The arguments of the interpreter are -I -c TEXT MODULE.
    found.write_text(f'#!/bin/sh\n[ "$4" = {MODULE} ] && exec {python} {hand} {MODULE}\nexec {python} "$@"\n')
    found.chmod(0o755)
    return found


def main() -> int:
    """Runs the hand with an encoder that changes a result after a signal."""
    wanted: list[int] = []
    honest = StepResult.encode

    def encode(result: StepResult) -> bytes:
        # A result without tokens cannot be changed.
        if wanted and len(result.tokens):
            LIES[wanted.pop()](result)
        return honest(result)

    StepResult.encode = encode  # type: ignore[assignment, method-assign]
    for number in SIGNALS:
        signal.signal(number, lambda received, _: wanted.append(received - signal.SIGRTMIN))
    from forebay.worker.loop import main as hand

    return hand()


if __name__ == "__main__":
    sys.exit(main())
