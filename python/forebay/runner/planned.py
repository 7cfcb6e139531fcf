"""A plan's rows, checked against the tables before anything is queued."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forebay.protocol.constants import FLAG_MASKED, FLAG_SAMPLE
from forebay.protocol.plan import Plan
from forebay.state.slots import Int64s, PlanError


class PlannedRows(NamedTuple):
    """A plan's rows, `r` of them, of which `s` sample or are pooled."""

    slot: Int64s  # [r]
    start: Int64s  # [r]
    length: Int64s  # [r]
    ends: Int64s  # [r]
    sampling: Int64s  # [s], ascending
    masked: Int64s  # indices of rows with masks, among the rows that sample

    @classmethod
    def read(cls, plan: Plan, slots: int, context_length: int, flag: int) -> PlannedRows:
        """Reads the rows of a plan, which must have at least one. `flag` is the flag that the model's rows may have.

        Raises `PlanError` for other flags, and for rows outside the tables: they would use another slot's memory.
        """
        slot, start, length, flags = columns = plan.rows.T.astype(np.int64, order="C")
        ends: Int64s = start + length
        # One NumPy call for all columns: the overhead of a call exceeds the work on the rows.
        least, most = np.minimum.reduce(columns, axis=1).tolist(), np.maximum.reduce(columns, axis=1).tolist()
        within = least[0] >= 0 and most[0] < slots and least[1] >= 0 and least[2] >= 1
        if not within or (most[1] + most[2] > context_length and np.maximum.reduce(ends) > context_length):
            raise PlanError(
                f"a row outside of {slots} slots of {context_length} positions: "
                f"slots {slot.tolist()}, starts {start.tolist()}, lengths {length.tolist()}"
            )
        known = flag | FLAG_MASKED if flag == FLAG_SAMPLE else flag
        alike = least[3] == most[3]
        if (most[3] & ~known) if alike else (flags & ~known).any():
            raise PlanError(f"rows with the flags {flags.tolist()}, of which the model knows {known}")
        sampling: Int64s = flags.nonzero()[0]
        masked = sampling[:0]
        if most[3] >= FLAG_MASKED:
            masked = (flags[sampling] & FLAG_MASKED).nonzero()[0]
        return cls(slot, start, length, ends, sampling, masked)
