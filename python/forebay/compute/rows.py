"""The interface between the runner and the implementations of the forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from forebay.compute.low_rank import AdapterStacks
from forebay.compute.prompts import PromptColumns, PromptTokens
from forebay.device import Device, host_array
from forebay.gpu.tables import describe
from forebay.layers.adapted import Adapter
from forebay.protocol.frames import Int32s
from forebay.protocol.plan import Plan
from forebay.state.images import RowImages
from forebay.state.inputs import Given
from forebay.state.recurrent import RowStates
from forebay.state.slots import Int64s, PlanError
from forebay.state.staging import StepInputs


@dataclass(frozen=True)
class RowAdapters:
    """The adapters of a step's rows."""

    place: Int64s  # [r]: the place of each row's adapter; -1: the base model
    held: Mapping[int, Adapter] | AdapterStacks  # by place


@dataclass(frozen=True)
class Rows:
    """A step's rows on the host, checked against the tables; `r` rows, of which `s` sample."""

    slot: Int64s  # [r]
    start: Int64s  # [r] positions already in the pages
    length: Int64s  # [r]
    sampling: Int64s  # [s], ascending: rows that sample a token, or return a vector if the model pools
    given: Given | None = None  # the rows' inputs in the arena; None: there are none
    sparse: npt.NDArray[np.bool_] | None = None  # [r]: True if the row's slot is sparse; None: no slot is sparse
    segment: Int64s | None = None  # [r]: where the second text of a pair begins; None: the model does not take pairs
    images: RowImages | None = None  # the positions of images in the slots; None: there are none
    prompts: PromptTokens | None = None  # prompt tokens with requested log-probabilities; None: none are requested
    states: RowStates | None = None  # the recurrent states that rows continue; None: the model has none
    adapters: RowAdapters | None = None  # None: all rows use the base model

    @property
    def last(self) -> Int64s:
        """The index of each row's last token, [r], numbered over all rows."""
        return np.cumsum(self.length) - 1

    @property
    def before_prompts(self) -> Int64s:
        """The index of the token before each requested prompt token, [k], numbered over all rows."""
        prompts = self.prompts
        if prompts is None:
            return np.zeros(0, np.int64)
        first = self.last - self.length + 1 - self.start
        before: Int64s = prompts.of_wants(first[prompts.row]) + prompts.positions - 1
        return before


class FoundColumns:
    """Host memory for counts of where positions of sparse slots were found. It is complete at the step's last event."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._told: Int32s = host_array(device, (5,), np.int32)

    def fill(self, told: torch.Tensor) -> None:
        """Copies counts in the result's order and the error word, int32 [5], to the host. Runs as queued work."""
        self._device.copy_out(told, self._told)

    @property
    def counts(self) -> Int32s:
        """The result's column [4]. Raises `PlanError` if a position was not found."""
        if self._told[4]:
            raise PlanError(f"the plan contradicts the tables: {describe(int(self._told[4]))}")
        return self._told[:4]


@dataclass(frozen=True)
class Launch:
    """The input of a step's work: its rows on the host, and the same rows in the plan's columns on the device."""

    rows: Rows
    inputs: StepInputs
    found: FoundColumns | None = None
    """Receives the counts of where chosen positions were found; None: no slot is sparse."""
    prompts: PromptColumns | None = None
    """Receives the log-probabilities of `rows.prompts`; None: none are requested."""

    @classmethod
    def of(cls, rows: Rows, device: Device) -> Launch:
        """A launch of rows without a plan, for measurements and tests of a `Compute` alone."""
        flags = np.zeros_like(rows.slot)
        words = np.stack((rows.slot, rows.start, rows.length, flags), axis=1).astype(np.int32)
        return cls(rows, StepInputs(Plan(rows=words).staged(), device))


class Compute(Protocol):
    """A forward pass. It writes the rows' keys and values, and returns logits or tokens of the rows that sample.

    All methods run as queued work. `logits` or `greedy` computes a step's rows, or `states` if log-probabilities of
    prompts are requested.
    """

    def logits(self, launch: Launch) -> torch.Tensor:
        """Logits float32 [s, vocabulary], in row order."""

    def greedy(self, launch: Launch) -> tuple[torch.Tensor, torch.Tensor]:
        """The most likely tokens [s], the first of equal ones; and bool [s], true where all logits are finite."""

    def states(self, launch: Launch) -> torch.Tensor:
        """The states for `head`, [s + k, hidden]: of rows that sample, then before each requested prompt token."""

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Logits float32 [m, vocabulary] of states [m, hidden]."""


class States(Protocol):
    """A forward pass. It writes the rows' keys and values, and returns the states for pooling."""

    def vectors(self, launch: Launch, tokens: Int64s) -> torch.Tensor:
        """Final states, normalised, of `tokens` [m]: float32 [m, hidden]. Tokens are numbered over all rows, ascending.

        Runs as queued work.
        """


class Pooler(Protocol):
    """A forward pass with pooling. It returns one vector for each prompt that the rows complete."""

    def pool(self, launch: Launch) -> torch.Tensor:
        """Vectors float32 [s, size], in row order, with all dimensions and not normalised. Runs as queued work."""
