"""A hand's steps, from plan to tokens: the interface for the runner, and the reference implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from forebay.compute.graphs import Graphs
from forebay.compute.rows import Compute, Launch
from forebay.compute.sampler import Ask, SampledColumns, Sampler
from forebay.device import Device
from forebay.protocol.frames import Float32s, Int32s
from forebay.state.slots import SlotTables, Writes
from forebay.state.staging import StepInputs


class Answers(Protocol):
    """The sampled tokens of a step, in host memory that is complete at the step's last event; `s` rows."""

    @property
    def tokens(self) -> Int32s:
        """The tokens [s]; 0 where the logits were not finite."""

    @property
    def finite(self) -> npt.NDArray[np.bool_]:
        """True for rows with finite logits, [s]."""

    def logprobs(self) -> tuple[Int32s, Int32s, Float32s] | None:
        """The result's three columns: counts, ids, values; None: no row requested them."""

    def check(self) -> None:
        """Raises `PlanError` if the device found an error in the plan."""


class NoAnswers:
    """`Answers` of a step in which no row samples a token."""

    tokens: Int32s = np.zeros(0, np.int32)
    finite: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)

    def logprobs(self) -> None:
        pass

    def check(self) -> None:
        pass


class Steps(Protocol):
    """Computes steps whose rows sample. A step is prepared on the host, and then computed as queued work."""

    @property
    def graphs(self) -> Graphs | None:
        """The graphs that `capture` has recorded; None: there are none."""

    @property
    def by_slot(self) -> bool:
        """True if the device samples simple rows with parameters that it keeps per slot."""

    def answers(self, launch: Launch, ask: Ask) -> Answers:
        """Allocates memory for a step's results, and makes the host's decisions about the step. Called on the host."""

    def write(self, writes: Writes | None, inputs: StepInputs) -> None:
        """Writes the device's tables, except for the parts that `sample` writes. Runs as queued work."""

    def sample(self, launch: Launch, ask: Ask, answers: Answers) -> None:
        """Computes the rows, and writes the sampled tokens to `answers`. Runs as queued work."""

    def compute(self, launch: Launch) -> None:
        """The first half of `sample`, up to the logits, for steps that wait for masks. Runs as queued work."""

    def choose(self, launch: Launch, ask: Ask, answers: Answers) -> None:
        """The second half of `sample`: it samples from the last computed logits, for all rows or for `ask.rows`.

        Runs as queued work.
        """

    def capture(self) -> None:
        """Prepares faster steps once the weights are loaded. Runs as queued work. Raises `DeviceError`."""


class OperatorSteps:
    """Implements `Steps` with a `Compute` and the sampler. The reference for all other implementations."""

    graphs = None
    by_slot = False

    def __init__(self, compute: Callable[[], Compute], tables: SlotTables, sampler: Sampler, device: Device) -> None:
        """`compute` runs as queued work."""
        self._compute = compute
        self._tables = tables
        self._sampler = sampler
        self._device = device
        self._logits: torch.Tensor | None = None

    def answers(self, launch: Launch, ask: Ask) -> Answers:
        return SampledColumns(ask, self._device)

    def write(self, writes: Writes | None, inputs: StepInputs) -> None:
        if writes is not None:
            self._tables.write(writes, inputs)

    def sample(self, launch: Launch, ask: Ask, answers: Answers) -> None:
        assert isinstance(answers, SampledColumns)
        if launch.prompts is not None:
            self.compute(launch)
            self.choose(launch, ask, answers)
            return
        if ask.plain:
            sampled = self._sampler.greedy(*self._compute().greedy(launch), ask)
        else:
            sampled = self._sampler.sample(self._compute().logits(launch), ask)
        answers.fill(sampled)

    def compute(self, launch: Launch) -> None:
        compute = self._compute()
        if launch.prompts is None:
            self._logits = compute.logits(launch)
            return
        states, sampled = compute.states(launch), len(launch.rows.sampling)
        self._logits = compute.head(states[:sampled])
        launch.prompts.fill(states[sampled:], compute.head)

    def choose(self, launch: Launch, ask: Ask, answers: Answers) -> None:
        assert isinstance(answers, SampledColumns)
        logits, self._logits = self._logits, None
        assert logits is not None
        if ask.rows is not None:
            (rows,) = self._device.copy_in(ask.rows)
            logits = logits.index_select(0, rows)
        answers.fill(self._sampler.sample(logits, ask))

    def capture(self) -> None:
        pass
