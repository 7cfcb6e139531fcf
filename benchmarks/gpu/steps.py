"""A hand without a server: the time of steps, the host's work for them, and whether the device waits.

Two steps are in flight, as in a server. Host time is that of `launch`. The gap is the time between the events of two
steps. The device is idle where no kernel runs: the time of a step without the profiler, minus the profiled times of its
kernels.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import in_process
from benchmarks.described import handshake_model
from benchmarks.gpu.shapes import SHAPES
from forebay.protocol.constants import FLAG_SAMPLE, SLOT_WORDS, SlotRecord
from forebay.protocol.plan import Plan
from forebay.runner.launched import Launched
from forebay.runner.runner import ModelRunner

MEMORY = 0.9
"""The share of a GPU's memory for weights, pages and steps, as in a server."""
PROFILED = 10
_COPIES = ("Memcpy", "Memset")
WARM = 5


@dataclass(frozen=True)
class Case:
    """Steps with this many rows of `length` tokens after `start` positions; `steps` of them are measured."""

    rows: int
    start: int
    length: int
    steps: int

    @property
    def name(self) -> str:
        """The name in tables."""
        return f"prefill {self.length}" if self.length > 1 else f"decode {self.rows} x {self.start}"


CASES = (
    *(Case(rows, start, 1, 60) for start in (512, 4096) for rows in (1, 8, 64, 256)),
    Case(256, 1500, 1, 60),
    *(Case(1, 0, length, 20) for length in (512, 2048)),
)
TINY_CASES = (Case(1, 20, 1, 4), Case(4, 20, 1, 4), Case(1, 0, 16, 2))


def cases_of(shape: str) -> Sequence[Case]:
    """The steps to measure for a shape."""
    return TINY_CASES if shape == "tiny" else CASES


@dataclass(frozen=True)
class Measured:
    """Values in microseconds, except for shares and names with other units."""

    case: str
    tokens_a_second: float
    step_p50: float
    host_p50: float
    host_p99: float
    gap_p50: float
    gap_p99: float
    gap_percent: float
    """The share of the time that gaps between two steps take."""
    kernels_us: float | None
    """Microseconds of a step in which kernels run; None without a profiler for this device."""
    idle_percent: float | None
    """The share of a step in which no kernel runs."""


def runner_of(shape: str, device: str, cases: Sequence[Case]) -> ModelRunner:
    """A hand with room for every case that the device can hold. Its weights are made up."""
    longest = max(case.start + case.length + case.steps + PROFILED + WARM for case in cases)
    rows = max(case.rows for case in cases)
    model = handshake_model(SHAPES[shape])
    step = max(case.length for case in cases)
    return in_process.runner(
        model,
        slots=rows,
        context=longest,
        tokens=None,
        threads=1,
        device=device,
        memory=MEMORY if device == "cuda" else 0.1,
        step_tokens=step,
        dummy=True,
    )


def plans(runner: ModelRunner, case: Case) -> Iterator[Plan]:
    """Endless plans: the first one writes the slots, and each one continues where the previous one ended."""
    size = runner.config.page_size
    numbers = np.arange(case.rows)
    total = case.start + case.length + (case.steps + PROFILED + WARM if case.length == 1 else 0)
    each = -(-total // size)
    pages = np.random.default_rng(0).permutation(runner.kv.page_count)[: case.rows * each]
    slots = np.zeros((case.rows, SLOT_WORDS), np.int32)
    slots[:, SlotRecord.SLOT] = numbers
    slots[:, [SlotRecord.LOGPROBS, SlotRecord.ARENA_OFFSET]] = -1
    floats = np.tile(np.array([0, 1, 0, 1, 0, 0], np.float32), (case.rows, 1))
    writes = np.stack((np.repeat(numbers, each), np.tile(np.arange(each), case.rows), pages), axis=1).astype(np.int32)
    start = case.start
    first = True
    while True:
        columns = (numbers, np.full(case.rows, start), np.full(case.rows, case.length), np.full(case.rows, FLAG_SAMPLE))
        rows = np.stack(columns, axis=1).astype(np.int32)
        if first:
            yield Plan(slots=slots, slot_floats=floats, page_writes=writes, rows=rows).staged()
        else:
            yield Plan(rows=rows).staged()
        first = False
        # A prompt is computed repeatedly: it overwrites its pages with the same values.
        start += case.length == 1


def fits(runner: ModelRunner, case: Case) -> bool:
    """True if the pool has pages for it."""
    total = case.start + case.length + case.steps + PROFILED + WARM
    return case.rows * -(-total // runner.config.page_size) <= runner.kv.page_count


def run(runner: ModelRunner, planned: Iterator[Plan], steps: int) -> tuple[list[float], list[tuple[int, int]]]:
    """The host's microseconds for each launch, and (device, gap) of each step; two steps are in flight."""
    host, timing = [], []
    flying: deque[Launched] = deque()
    for number in range(steps):
        plan = next(planned)
        begun = time.perf_counter()
        flying.append(runner.launch(plan))
        host.append(1e6 * (time.perf_counter() - begun))
        while len(flying) > (1 if number < steps - 1 else 0):
            device, gap = flying.popleft().collect().timing.tolist()
            timing.append((device, gap))
    return host, timing


def measure(runner: ModelRunner, case: Case) -> Measured:
    """Measures one case, warm, without the profiler."""
    planned = plans(runner, case)
    run(runner, planned, WARM)
    host, timing = run(runner, planned, case.steps)
    device = np.array([step for step, _ in timing], float)
    # The first step's gap is the pause before the run.
    gap = np.array([between for _, between in timing][1:], float)
    took = float(np.median(device) + np.median(gap))
    return Measured(
        case.name,
        1e6 * case.rows * case.length / took,
        float(np.median(device)),
        float(np.median(host)),
        float(np.percentile(host, 99)),
        float(np.median(gap)),
        float(np.percentile(gap, 99)),
        float(100 * gap.sum() / (gap.sum() + device[1:].sum())),
        None,
        None,
    )


def profiled(runner: ModelRunner, case: Case, measured: Measured) -> Measured:
    """Adds the times of kernels, from some steps in the middle of those measured.

    A process that was profiled once launches slowly from then on.
    """
    planned = plans(runner, case)
    run(runner, planned, WARM + max(0, case.steps - PROFILED) // 2)
    kernels_us = busy_us(kernels_of(runner, planned)) / PROFILED
    idle = idle_percent(kernels_us, measured.step_p50 + measured.gap_p50)
    return replace(measured, kernels_us=kernels_us, idle_percent=idle)


@dataclass(frozen=True)
class Kernel:
    """A kernel that ran: its name, and when, in microseconds."""

    name: str
    begin: float
    us: float


def kernels_of(runner: ModelRunner, planned: Iterator[Plan], out: Path | None = None) -> list[Kernel]:
    """The kernels of `PROFILED` steps, without copies; `out` gets the profiler's trace."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run(runner, planned, PROFILED)
    if out is not None:
        profiler.export_chrome_trace(str(out))
    return kernels_among(
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if "CUDA" in str(event.device_type)
    )


def kernels_among(events: Iterable[tuple[str, float, float]]) -> list[Kernel]:
    """The kernels among events (name, begin, end) of the device: all but copies and fills by the copy engine."""
    return [Kernel(name, begin, end - begin) for name, begin, end in events if not name.startswith(_COPIES)]


def busy_us(kernels: Iterable[Kernel]) -> float:
    """The time in which any kernel runs. A kernel that was launched early counts while it waits for the one before."""
    total = end = 0.0
    for kernel in sorted(kernels, key=lambda kernel: kernel.begin):
        behind = max(end, kernel.begin + kernel.us)
        total += behind - max(end, kernel.begin)
        end = behind
    return total


def idle_percent(kernels_us: float, step_us: float) -> float:
    """The share of a step in which no kernel runs."""
    return max(0.0, 100 * (1 - kernels_us / step_us))


@dataclass
class Shape:
    """The measurements of a shape."""

    start: dict[str, Any]
    steps: list[Measured]
    left_out: dict[str, str]


def measure_shape(shape: str, device: str, cases: Sequence[Case], deadline: float) -> Shape:
    """Measures all cases of a shape for which there is time and memory."""
    begun = time.monotonic()
    runner = runner_of(shape, device, cases)
    loaded, free = time.monotonic(), runner.device.available_bytes()
    runner.warm_up()
    start = {
        "load_seconds": loaded - begun,
        "warm_up_seconds": time.monotonic() - loaded,
        "graphs": runner.facts()["graphs"],
        "warm_up_bytes": free - runner.device.available_bytes(),
        "pages": runner.kv.page_count,
        "weight_bytes": runner.weight_bytes,
    }
    found = Shape(start, [], {})
    for case in cases:
        if time.monotonic() > deadline:
            found.left_out[case.name] = "no time"
        elif not fits(runner, case):
            found.left_out[case.name] = "no memory for its pages"
        else:
            found.steps.append(measure(runner, case))
    if runner.device.torch_device.type == "cuda":
        by_name = {case.name: case for case in cases}
        for number, measured in enumerate(found.steps):
            if time.monotonic() < deadline:
                found.steps[number] = profiled(runner, by_name[measured.case], measured)
    return found
