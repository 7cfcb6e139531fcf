"""Checks of a plan's values."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class PlanError(ValueError):
    """A plan names a slot or page that does not exist: the brain and the hand disagree about the tables."""


def columns_within(records: npt.NDArray[np.int32], limits: dict[str, int]) -> None:
    """Checks the first columns of int32 records [n, columns], n > 0, with `within`. `limits`: limits by column name."""
    # As unsigned numbers, negative numbers are large, so one call suffices: its overhead exceeds the work.
    most = np.maximum.reduce(records.view(np.uint32)).tolist()
    for column, (what, limit) in enumerate(limits.items()):
        if most[column] >= limit:
            within(records[:, column], limit, what)


def within(values: npt.NDArray[np.integer[Any]], limit: int, what: str) -> None:
    """Raises `PlanError` unless all values are in `0 .. limit`."""
    if values.min() < 0 or values.max() >= limit:
        raise PlanError(f"{what} {int(values.min())}..{int(values.max())} is not within 0..{limit}")
