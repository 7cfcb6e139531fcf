"""Log-probabilities of a prompt's tokens, computed in slices, without the logits of all positions at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from forebay.device import Device, host_array
from forebay.layers.ops import Ops
from forebay.protocol.constants import ROW_NOT_FINITE
from forebay.protocol.frames import Float32s, Int32s
from forebay.protocol.result import StepResult
from forebay.state.counts import ragged
from forebay.state.slots import Int64s, PlanError, SlotTables

SLICE_BYTES = 1 << 25
"""Bytes of a slice's logits, in float32. 32 MiB are enough rows for an efficient product."""
SLICES = 4
"""Matrices of a slice's size that exist at the same time: logits, their float32, the log-softmax, and a sorted copy."""


def slice_rows(vocabulary: int) -> int:
    """Returns the number of positions of a slice."""
    return max(1, SLICE_BYTES // (4 * vocabulary))


def slice_bytes(vocabulary: int, positions: int) -> int:
    """Returns the bytes of temporary memory for the largest slice of a step with this many positions."""
    return SLICES * 4 * vocabulary * min(slice_rows(vocabulary), positions)


@dataclass(frozen=True)
class PromptTokens:
    """Tokens of prompts with requested log-probabilities: `q` requests, with `k` tokens in all."""

    row: Int64s  # [q], ascending: the row that computes the positions before the tokens
    first: Int64s  # [q]: position of the first token
    count: Int64s  # [q]
    most: Int64s  # [q]: the number of most likely tokens that are reported for each token

    @classmethod
    def read(cls, wants: Int32s, slot: Int64s) -> PromptTokens | None:
        """Reads the plan's column. `slot` [r]: the slots of all rows. Returns None if nothing is requested."""
        if not len(wants):
            return None
        slots, first, count, most = wants.T.astype(np.int64)
        row = np.flatnonzero(np.isin(slot, slots))
        return cls(row, first, count, most)

    @property
    def positions(self) -> Int64s:
        """The positions of the tokens, [k], request by request."""
        return ragged(self.first, self.count)

    def of_wants(self, values: Int64s) -> Int64s:
        """Repeats each request's value for each of its tokens: [k] from [q]."""
        return np.repeat(values, self.count)


class PromptColumns:
    """Host memory for a step's log-probabilities of prompts. It is complete at the step's last event."""

    def __init__(self, tokens: PromptTokens, slot: Int64s, tables: SlotTables, ops: Ops, device: Device) -> None:
        """`slot` [r]: the slots of the step's rows. Raises `PlanError` if a request exceeds the vocabulary."""
        vocabulary, most = tables.vocabulary, int(tokens.most.max())
        if most > vocabulary:
            raise PlanError(f"the {most} most likely tokens of a vocabulary of {vocabulary}")
        self._tokens, self._tables, self._ops, self._device = tokens, tables, ops, device
        positions = tokens.positions
        self._entries = tokens.of_wants(slot[tokens.row]) * tables.stride + positions
        self._most, self._rows = most, slice_rows(vocabulary)
        shape = (len(positions), 1 + most)
        self._ids: Int64s = host_array(device, shape, np.int64)
        self._values: Float32s = host_array(device, shape, np.float32)
        self._ranks: Int64s = host_array(device, shape[:1], np.int64)
        self._finite: npt.NDArray[np.bool_] = host_array(device, shape[:1], np.bool_)

    def fill(self, states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Computes the log-probabilities from states [k, hidden], each of the position before a token.

        `head` computes logits from states.

        Runs as queued work.
        """
        (entries,) = self._device.copy_in(self._entries)
        tokens = self._tables.token_pool.view(-1).index_select(0, entries).long()[:, None]
        slices = zip(states.split(self._rows), tokens.split(self._rows), strict=True)
        parts = [self._of(head(some), of) for some, of in slices]
        columns: list[npt.NDArray[Any]] = [self._ids, self._values, self._ranks, self._finite]
        for number, column in enumerate(columns):
            self._device.copy_out(torch.cat([part[number] for part in parts]), column)

    def _of(
        self, logits: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns ids and log-probabilities [m, 1 + most] of `tokens` [m, 1] and the likeliest; ranks; finiteness."""
        ids, values = self._ops.likely(logits, tokens, self._most)
        return ids, values, self._ops.places(logits, tokens), self._ops.finite(logits)

    def report(self, result: StepResult) -> None:
        """Writes the log-probabilities into the result. Called once they are complete."""
        tokens = self._tokens
        wanted = np.arange(1 + self._most) <= tokens.of_wants(tokens.most)[:, None]
        result.prompt_ranks = self._ranks.astype(np.int32)
        result.prompt_ids = self._ids[wanted].astype(np.int32)
        result.prompt_values = self._values[wanted]
        result.row_errors[tokens.of_wants(tokens.row)[~self._finite]] = ROW_NOT_FINITE
