"""A hand in Python that sends one wrong result for each signal.

`program` writes an interpreter that starts it in place of the real one. SIGRTMIN and those behind it choose the lie.
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
    """The first row sampled the neighbour of its token."""
    result.tokens = result.tokens.copy()
    result.tokens[0] ^= 1


def failed_row(result: StepResult) -> None:
    """The last row had no finite logits."""
    result.row_errors = result.row_errors.copy()
    result.row_errors[-1] = ROW_NOT_FINITE


def token_too_few(result: StepResult) -> None:
    """The last token is missing."""
    result.tokens = result.tokens[:-1]


def other_step(result: StepResult) -> None:
    """The result says that it is of the step before."""
    result.step -= 1


LIES: tuple[Callable[[StepResult], None], ...] = (other_token, failed_row, token_too_few, other_step)
SIGNALS = tuple(signal.SIGRTMIN + number for number in range(len(LIES)))
CONTRADICTING = SIGNALS[LIES.index(token_too_few) :]
"""The lies that contradict the plan. Ranks with separate requests can detect only these."""


def program(folder: Path) -> Path:
    """An interpreter in `folder` that runs this in place of PyTorch's hand."""
    python, hand = shlex.quote(sys.executable), shlex.quote(str(Path(__file__).resolve()))
    found = folder / "python"
    # The arguments: -I -c TEXT MODULE.
    found.write_text(f'#!/bin/sh\n[ "$4" = {MODULE} ] && exec {python} {hand} {MODULE}\nexec {python} "$@"\n')
    found.chmod(0o755)
    return found


def main() -> int:
    """The hand, with an encoder of results that lies when it was told to."""
    wanted: list[int] = []
    honest = StepResult.encode

    def encode(result: StepResult) -> bytes:
        # A result without tokens has nothing to lie about.
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
