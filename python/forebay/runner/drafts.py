"""The verification of drafts: each draft is a separate row, after the row that predicts it.

All tokens of a step write their keys and values before any of them attends. So a one-token row at a draft's position
computes the same as if the earlier drafts were known tokens. The tokens up to the first one that differs from its draft
are those that steps without drafts would sample.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from forebay.compute.sampler import Chains
from forebay.protocol.constants import FLAG_MASKED, FLAG_SAMPLE
from forebay.protocol.frames import Int32s
from forebay.protocol.plan import Plan
from forebay.protocol.result import StepResult
from forebay.runner.launched import Columns, TokenColumns
from forebay.state.counts import ragged
from forebay.state.slots import Int64s, PlanError, SlotTables

_NONE = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Drafts:
    """The `d` drafts that a step verifies, for a plan with `r` rows."""

    plan: Plan
    """The plan in received form, with an additional row for each draft."""
    first: Int64s  # [r]: the indices of the plan's own rows among the rows of the expanded plan
    counts: Int64s  # [r]: number of drafts after each row
    tokens: Int32s  # [d]
    entries: Int64s  # [d]: their indices in the token pool
    chains: Chains
    masks: Int64s  # the masks of the expanded plan's rows: indices among all masks for the original plan
    mask_count: int  # the number of masks for the original plan

    @classmethod
    def of(cls, plan: Plan, tables: SlotTables, most_rows: int) -> Drafts:
        """Returns the drafts of a plan whose slots were already read. Raises `PlanError`.

        Drafts that do not fit into a step's `most_rows` are left out. A row without drafts samples one token.
        """
        tokens = plan.draft_tokens
        if tokens.min() < 0 or tokens.max() >= tables.vocabulary:
            raise PlanError(f"drafts {tokens.tolist()} of a vocabulary of {tables.vocabulary}")
        slot, start, length, flags = plan.rows.T.astype(np.int64)
        if slot.min() < 0 or slot.max() >= tables.slots:
            raise PlanError(f"rows of the slots {slot.tolist()}, of {tables.slots}")
        sampling = flags & FLAG_SAMPLE > 0
        given = np.zeros(len(slot), np.int64)
        given[sampling] = plan.row_tokens - 1
        at = np.cumsum(given) - given
        room = max(most_rows - len(slot), 0)
        counts = np.clip(room - at, 0, given)
        first = np.arange(len(slot)) + np.cumsum(counts) - counts
        of_row = np.repeat(np.arange(len(slot)), counts)
        nth = np.arange(len(of_row)) - np.repeat(np.cumsum(counts) - counts, counts)
        positions = (start + length)[of_row] + nth
        if len(positions) and positions.max() >= tables.context_length:
            raise PlanError(f"a draft at position {positions.max()} of {tables.context_length}")
        rows = np.repeat(plan.rows, counts + 1, axis=0)
        behind = np.delete(np.arange(len(rows)), first)
        rows[behind, 1] = positions
        rows[behind, 2] = 1
        expanded = replace(plan, rows=rows, row_tokens=_NONE, draft_tokens=_NONE, places={}, body=_NONE)
        verified = tokens[at[of_row] + nth]
        entries = slot[of_row] * tables.stride + positions
        masked = flags & FLAG_MASKED > 0
        of_rows = (given + 1)[masked]
        masks = ragged(np.cumsum(of_rows) - of_rows, counts[masked] + 1)
        chains = _chains(rows, behind, verified)
        return cls(expanded.staged(), first, counts, verified, entries, chains, masks, int(of_rows.sum()))


class VerifiedColumns:
    """The memory of a step with drafts. For each row it reports the accepted drafts and one more token."""

    def __init__(self, columns: TokenColumns, drafts: Drafts) -> None:
        self._columns, self._drafts = columns, drafts

    def report(self, result: StepResult) -> None:
        drafts = self._drafts
        result.row_errors = np.zeros(len(drafts.plan.rows), np.int32)
        self._columns.report(result)
        kept = self._kept(result.tokens, self._columns.finite)
        own = np.isin(self._columns.sampling, drafts.first)
        result.token_counts = np.add.reduceat(kept, np.flatnonzero(own), dtype=np.int32) if own.any() else _NONE
        result.tokens = result.tokens[kept]
        if result.logprob_counts.size:
            entries = np.repeat(kept, result.logprob_counts)
            result.logprob_ids, result.logprob_values = result.logprob_ids[entries], result.logprob_values[entries]
            result.logprob_counts = result.logprob_counts[kept]
        result.row_errors = result.row_errors[drafts.first]

    def _kept(self, tokens: Int32s, finite: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Accepts or rejects drafts: returns whether the plan's rows keep each token of the computed rows, bool [s]."""
        drafts = self._drafts
        at = {row: index for index, row in enumerate(self._columns.sampling.tolist())}
        kept = np.zeros(len(tokens), np.bool_)
        ends = np.cumsum(drafts.counts)
        for first, count, end in zip(drafts.first.tolist(), drafts.counts.tolist(), ends.tolist(), strict=True):
            index = at.get(first)
            if index is None:
                continue
            kept[index] = True
            # Rows whose masks are not ready were not sampled.
            ready = next((nth for nth in range(count) if first + nth + 1 not in at), count)
            end, count = end - count + ready, ready
            fits = finite[index : index + count] & finite[index + 1 : index + count + 1]
            fits &= tokens[index : index + count] == drafts.tokens[end - count : end]
            kept[index + 1 : index + 1 + count] = np.logical_and.accumulate(fits)
        return kept


def _chains(rows: Int32s, behind: Int64s, drafts: Int32s) -> Chains:
    """Returns the chains of computed `rows`; the rows with indices `behind` are drafts, with the tokens `drafts`."""
    sampling = np.flatnonzero(rows[:, 3] & FLAG_SAMPLE)
    number = np.full(len(rows), -1, np.int64)
    number[sampling] = np.arange(len(sampling))
    before, expected = np.full(len(sampling), -1, np.int64), np.zeros(len(sampling), np.int32)
    before[number[behind]] = number[behind] - 1
    expected[number[behind]] = drafts
    return Chains(before, expected)


def verified(columns: Columns, drafts: Drafts | None) -> Columns:
    """Returns the columns of a step, with or without drafts."""
    if drafts is None:
        return columns
    assert isinstance(columns, TokenColumns)
    return VerifiedColumns(columns, drafts)
