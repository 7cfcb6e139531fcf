"""Progress displays: a bar if tqdm is installed, and the stages of a server's start on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

__all__ = ["Bar", "Stages", "bar"]


class Bar(Protocol):
    """The part of tqdm's interface that is used."""

    def update(self, n: float | None = 1) -> object:
        """Adds `n` ended requests."""


def bar(use_tqdm: bool | Callable[..., Any], total: int, what: str) -> AbstractContextManager[Bar | None]:
    """Creates a bar for `total` requests, or None. `use_tqdm` may be a class to use in place of tqdm."""
    if not use_tqdm or total == 0:
        return nullcontext()
    make = use_tqdm
    if use_tqdm is True:
        try:
            from tqdm.auto import tqdm
        except ImportError:
            return nullcontext()
        make = tqdm
    shown: AbstractContextManager[Bar] = make(total=total, desc=what, dynamic_ncols=True)  # type: ignore[operator]
    return shown


class Stages:
    """A line on the terminal that shows the stage of a server's start. Without a terminal nothing is written."""

    def __init__(self, model: str) -> None:
        self._model, self._shown = model, ""

    def show(self, stage: str) -> None:
        """Replaces the line."""
        line = f"forebay: {self._model}: {stage}"[:100]
        if line != self._shown and _is_terminal():
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
            self._shown = line

    def clear(self) -> None:
        """Removes the line."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = ""


def _is_terminal() -> bool:
    # There may be no standard error at all.
    return sys.stderr is not None and sys.stderr.isatty()
