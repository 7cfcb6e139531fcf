"""The selection of a plan's rows that the hand drafts for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from forebay.protocol.constants import FLAG_MASKED, FLAG_SAMPLE, SlotRecord
from forebay.protocol.frames import Int32s
from forebay.protocol.plan import Plan
from forebay.state.slots import Int64s

_NONE = np.zeros(0, np.int32)

Proposer: TypeAlias = Callable[[Int64s, Int64s, Int64s], list[Int32s]]
"""Drafts tokens for rows, given their slots, the positions of their last known tokens, and the largest counts of
drafts.
"""


def with_drafts(plan: Plan, most_rows: int, most: int, propose: Proposer) -> Plan:
    """Returns the plan with up to `most` drafts per row, for rows that may sample several tokens.

    Rows of prompts and masked rows get no drafts. Nor do rows whose drafts do not fit into a step of `most_rows` rows.
    """
    slot, start, length, flags = plan.rows.T.astype(np.int64)
    sampling = np.flatnonzero(flags & FLAG_SAMPLE)
    wanted = plan.row_tokens.astype(np.int64) - 1
    new = plan.slots[:, SlotRecord.SLOT]
    may = (wanted > 0) & (length[sampling] == 1) & (flags[sampling] & FLAG_MASKED == 0)
    may &= ~np.isin(slot[sampling], new)
    chosen = np.flatnonzero(may)[: max(most_rows - len(slot), 0) // most]
    counts = np.zeros(len(sampling), np.int64)
    drafts: list[Int32s] = []
    if len(chosen):
        rows, least = sampling[chosen], np.minimum(wanted[chosen], most)
        drafts = [some[:count] for some, count in zip(propose(slot[rows], start[rows], least), least, strict=True)]
        counts[chosen] = [len(some) for some in drafts]
    return replace(
        plan,
        row_tokens=(1 + counts).astype(np.int32),
        draft_tokens=np.concatenate(drafts) if drafts else _NONE,
    )
