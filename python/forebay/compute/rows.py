"""The interface between the runner and a way to compute a model."""

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

    place: Int64s  # [r]: the place of each row's adapter; -1: the base computes it
    held: Mapping[int, Adapter] | AdapterStacks  # by place


@dataclass(frozen=True)
class Rows:
    """A step's rows on the host, checked against the tables; `r` rows, of which `s` sample."""

    slot: Int64s  # [r]
    start: Int64s  # [r] positions already in the pages
    length: Int64s  # [r]
    sampling: Int64s  # [s], ascending: those that give a token, or a vector where the model pools
    given: Given | None = None  # those with inputs in the arena; None: there are none
    sparse: npt.NDArray[np.bool_] | None = None  # [r]: those of sparse slots; None: there are none
    segment: Int64s | None = None  # [r]: where the second text of a pair begins; None: the model does not take pairs
    images: RowImages | None = None  # where images stand in the slots; None: there are none
    prompts: PromptTokens | None = None  # whose log-probabilities are asked for; None: of none
    states: RowStates | None = None  # the recurrent states that rows continue; None: the model has none
    adapters: RowAdapters | None = None  # None: the base computes all rows

    @property
    def last(self) -> Int64s:
        """The last token of each row [r], numbered over all rows."""
        return np.cumsum(self.length) - 1

    @property
    def before_prompts(self) -> Int64s:
        """The token before each requested prompt token [k], numbered over all rows."""
        prompts = self.prompts
        if prompts is None:
            return np.zeros(0, np.int64)
        first = self.last - self.length + 1 - self.start
        before: Int64s = prompts.of_wants(first[prompts.row]) + prompts.positions - 1
        return before


class FoundColumns:
    """Host memory for where a step's sparse slots found their positions. It is complete at the step's last event."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._told: Int32s = host_array(device, (5,), np.int32)

    def fill(self, told: torch.Tensor) -> None:
        """Copies counts in the result's order and the error word, int32 [5], to the host. Runs as queued work."""
        self._device.copy_out(told, self._told)

    @property
    def counts(self) -> Int32s:
        """The result's column [4]. Raises `PlanError` if a position had no place."""
        if self._told[4]:
            raise PlanError(f"a plan that the tables contradict: {describe(int(self._told[4]))}")
        return self._told[:4]


@dataclass(frozen=True)
class Launch:
    """The input of a step's work: its rows, and the plan's columns on the device with the same rows."""

    rows: Rows
    inputs: StepInputs
    found: FoundColumns | None = None
    """The memory for the counts of places of chosen rows; None: no slot is sparse."""
    prompts: PromptColumns | None = None
    """The memory for the log-probabilities of `rows.prompts`; None: none are requested."""

    @classmethod
    def of(cls, rows: Rows, device: Device) -> Launch:
        """A launch of rows without a plan, for measurements and tests of a compute alone."""
        flags = np.zeros_like(rows.slot)
        words = np.stack((rows.slot, rows.start, rows.length, flags), axis=1).astype(np.int32)
        return cls(rows, StepInputs(Plan(rows=words).staged(), device))


class Compute(Protocol):
    """A way to compute rows. It writes their keys and values, and returns the next tokens of the rows that sample.

    All methods are called as work. `logits` or `greedy` computes a step's rows. If tokens of prompts are requested,
    `states` does.
    """

    def logits(self, launch: Launch) -> torch.Tensor:
        """Logits float32 [s, vocabulary], in row order."""

    def greedy(self, launch: Launch) -> tuple[torch.Tensor, torch.Tensor]:
        """The most likely tokens [s], the first of equal ones; and bool [s], true where all logits are finite."""

    def states(self, launch: Launch) -> torch.Tensor:
        """The states for `head`, [s + k, hidden]: first of rows that sample, then before the tokens of prompts."""

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Logits float32 [m, vocabulary] of states [m, hidden]."""


class States(Protocol):
    """A way to compute rows. It writes their keys and values, and gives the states for vectors."""

    def vectors(self, launch: Launch, tokens: Int64s) -> torch.Tensor:
        """Final states, normalised, of `tokens` [m]: float32 [m, hidden]. Tokens are ascending numbers over all rows.

        Runs as queued work.
        """


class Pooler(Protocol):
    """A way to compute rows. It gives one vector for each prompt that ends with them."""

    def pool(self, launch: Launch) -> torch.Tensor:
        """Vectors float32 [s, size], in row order, neither cut nor normalised. Runs as queued work."""
