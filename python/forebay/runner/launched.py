"""A launched step: its queued work, and the memory for its results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from forebay.compute.rows import Launch
from forebay.compute.steps import Answers
from forebay.device import Device, Event, host_array
from forebay.protocol.constants import COPY_END_WORDS, PLACE_END_WORDS, ROW_NOT_FINITE
from forebay.protocol.frames import Float32s, Int32s
from forebay.protocol.result import StepResult
from forebay.state.slots import Int64s

Copied: TypeAlias = Callable[[], tuple[Int32s, Int32s, Int32s]]
"""Returns a result's columns `copied`, `copy_timing` and `copy_wait_us`."""
Wait: TypeAlias = tuple[Event, Event]
"""The end of the model's work, and the start of the sampler's. The device is idle between them."""


_NO_PLACES = np.zeros((0, PLACE_END_WORDS), np.int32)
NO_COPIES = np.zeros((0, COPY_END_WORDS), np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32)


def no_copies() -> tuple[Int32s, Int32s, Int32s]:
    """The columns of a result of a hand without a host tier."""
    return NO_COPIES


def no_places() -> Int32s:
    """The column of a result of a hand without places for adapters."""
    return _NO_PLACES


class Columns(Protocol):
    """Host memory to which a step's work copies its results."""

    def report(self, result: StepResult) -> None:
        """Writes the columns into the result. Called once they are complete."""


class NoColumns:
    """The memory of a step without rows."""

    def report(self, result: StepResult) -> None:
        pass


class TokenColumns:
    """The memory of a step whose rows sample."""

    def __init__(self, answers: Answers, launch: Launch, sampling: Int64s) -> None:
        """`sampling`: the rows [s] that sample a token, ascending."""
        self.sampling = sampling
        self._sampled = answers
        self._found = launch.found
        self._prompts = launch.prompts

    @property
    def finite(self) -> npt.NDArray[np.bool_]:
        """For each of `sampling`, true if its logits are finite. Valid once the step has ended."""
        return self._sampled.finite

    def report(self, result: StepResult) -> None:
        self._sampled.check()
        result.tokens = self._sampled.tokens
        if self._found is not None:
            result.sparse_rows = self._found.counts
        _not_finite(result.row_errors, self.sampling, self._sampled.finite)
        logprobs = self._sampled.logprobs()
        if logprobs is not None:
            result.logprob_counts, result.logprob_ids, result.logprob_values = logprobs
        if self._prompts is not None:
            self._prompts.report(result)


class VectorColumns:
    """The memory of a step whose rows are pooled."""

    def __init__(self, sampling: Int64s, size: int, device: Device) -> None:
        self._sampling = sampling
        self._device = device
        self._vectors: Float32s = host_array(device, (len(sampling), size), np.float32)
        self._finite: npt.NDArray[np.bool_] = host_array(device, (len(sampling),), np.bool_)

    def fill(self, vectors: torch.Tensor, finite: torch.Tensor) -> None:
        """Copies vectors and flags to the host memory. Runs as queued work."""
        self._device.copy_out(vectors, self._vectors)
        self._device.copy_out(finite, self._finite)

    def report(self, result: StepResult) -> None:
        result.pooled = self._vectors.ravel()
        _not_finite(result.row_errors, self._sampling, self._finite)


@dataclass(frozen=True)
class Launched:
    """A plan whose work is queued.

    Until it is collected, the plan's body must not be overwritten.
    """

    step: int
    rows: int
    columns: Columns
    before: Event
    """The end of the previous step."""
    begun: Event
    ended: Event
    release: Callable[[], None]
    copied: Copied
    """Returns the copies that have ended. Waits for the end of a copy if the plan requires that."""
    placed: Callable[[], Int32s] = no_places
    """Returns the places whose adapters have been loaded."""
    wait: Wait | None = None
    """The wait for masks within the step; None: there was none."""

    def collect(self) -> StepResult:
        """Waits for the step's end and returns its result, once. May be called by any thread, in launch order."""
        self.ended.wait()
        result = StepResult(self.step, row_errors=np.zeros(self.rows, np.int32))
        self.columns.report(result)
        waited = 0 if self.wait is None else self.wait[1].since(self.wait[0])
        timing = self.ended.since(self.begun) - waited, self.begun.since(self.before) + waited
        result.timing = np.array(timing, np.int32)
        result.copied, result.copy_timing, result.copy_wait_us = self.copied()
        result.placed = self.placed()
        self.release()
        return result


def _not_finite(row_errors: Int32s, rows: Int64s, finite: npt.NDArray[np.bool_]) -> None:
    row_errors[rows[~finite]] = ROW_NOT_FINITE
