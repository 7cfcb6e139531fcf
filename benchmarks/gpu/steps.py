"""A hand on a GPU without a server: what steps take, what the host does for them, and whether the GPU waits.

    python3 scripts/gpu.py bench --out gpu.json

Weights are made up on the device, in the shapes of Qwen3-0.6B and Qwen3-8B. Two steps are in flight, as in a server.
Host time is that of `launch`. The gap is what CUDA's events say between two steps; waits inside of a step show in the
share of time in which kernels run, which the profiler tells. It stops at its deadline and says what it left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import in_process
from benchmarks.gpu.shapes import SHAPES
from forebay.device import DeviceError, open_device
from forebay.protocol.plan import FLAG_SAMPLE, SLOT_WORDS, Plan, SlotWord
from forebay.runner.launched import Launched
from forebay.runner.runner import ModelRunner

PROFILED = 10
WARM = 5


@dataclass(frozen=True)
class Case:
    """Steps of so many rows of `length` tokens behind `start` positions; `steps` of them are measured."""

    rows: int
    start: int
    length: int
    steps: int

    @property
    def name(self) -> str:
        """For people."""
        return f"prefill {self.length}" if self.length > 1 else f"decode {self.rows} x {self.start}"


CASES = [
    *(Case(rows, start, 1, 60) for start in (512, 4096) for rows in (1, 8, 64, 256)),
    *(Case(1, 0, length, 20) for length in (512, 2048)),
]
TINY_CASES = [Case(1, 20, 1, 4), Case(4, 20, 1, 4), Case(1, 0, 16, 2)]


@dataclass(frozen=True)
class Measured:
    """Microseconds, but for the share and what goes by another unit."""

    case: str
    tokens_a_second: float
    step_p50: float
    host_p50: float
    host_p99: float
    gap_p50: float
    gap_p99: float
    idle_percent: float
    busy_percent: float | None
    """Of the time of steps in which a kernel or a copy runs; None: no profiler for this device."""


def runner_of(shape: str, device: str, cases: list[Case]) -> ModelRunner:
    """A hand with room for every case; seconds of loading are those of made-up weights."""
    longest = max(case.start + case.length + case.steps + PROFILED + WARM for case in cases)
    rows = max(case.rows for case in cases)
    model = {"format": "safetensors", "directory": "", "files": [], "config": SHAPES[shape]}
    step = max(case.length for case in cases)
    return in_process.runner(
        model, slots=rows, context=longest, tokens=None, threads=1, device=device, step_tokens=step, dummy=True
    )


def plans(runner: ModelRunner, case: Case) -> Iterator[Plan]:
    """Plans without end: the first writes the slots, each goes on where the one before ended."""
    size = runner.config.page_size
    numbers = np.arange(case.rows)
    total = case.start + case.length + (case.steps + PROFILED + WARM if case.length == 1 else 0)
    each = -(-total // size)
    pages = np.random.default_rng(0).permutation(runner.kv.page_count)[: case.rows * each]
    slots = np.zeros((case.rows, SLOT_WORDS), np.int32)
    slots[:, SlotWord.SLOT] = numbers
    slots[:, [SlotWord.LOGPROBS, SlotWord.ARENA_OFFSET]] = -1
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
        # A prompt is computed again and again: what it writes is what was there.
        start += case.length == 1


def fits(runner: ModelRunner, case: Case) -> bool:
    """True if the pool has pages for it."""
    total = case.start + case.length + case.steps + PROFILED + WARM
    return case.rows * -(-total // runner.config.page_size) <= runner.kv.page_count


def run(runner: ModelRunner, planned: Iterator[Plan], steps: int) -> tuple[list[float], list[tuple[int, int]]]:
    """Microseconds of the host a launch, and (device, gap) of each step; two are in flight."""
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
    """One case, warm."""
    planned = plans(runner, case)
    run(runner, planned, WARM)
    host, timing = run(runner, planned, case.steps)
    device = np.array([step for step, _ in timing], float)
    # The first step's gap is the pause before it.
    gap = np.array([between for _, between in timing][1:], float)
    busy = None
    if runner.device.torch_device.type == "cuda":
        busy = busy_percent(runner, planned)
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
        busy,
    )


def busy_percent(runner: ModelRunner, planned: Iterator[Plan]) -> float:
    """The share of the steps' time in which the GPU does something, by the profiler's kernels and copies."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        _, timing = run(runner, planned, PROFILED)
    busy = sum(event.self_device_time_total for event in profiler.key_averages())
    return float(100 * busy / sum(device for device, _ in timing))


def shape_results(shape: str, device: str, cases: list[Case], deadline: float) -> dict[str, Any]:
    """All cases of a shape for which there is time and memory."""
    begun = time.monotonic()
    runner = runner_of(shape, device, cases)
    runner.warm_up()
    found: dict[str, Any] = {
        "load_seconds": round(time.monotonic() - begun, 2),
        "pages": runner.kv.page_count,
        "weight_bytes": runner.weight_bytes,
        "steps": [],
        "left_out": [],
    }
    for case in cases:
        if time.monotonic() > deadline:
            found["left_out"].append(f"{case.name}: no time")
        elif not fits(runner, case):
            found["left_out"].append(f"{case.name}: no memory for its pages")
        else:
            found["steps"].append(asdict(measure(runner, case)))
    return found


def commit() -> str:
    """The commit that was measured."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def table(results: dict[str, Any]) -> str:
    """For people."""
    head = f"{'':24}{'step us':>10}{'tokens/s':>11}{'host p50':>10}{'p99':>8}{'gap p50':>9}{'idle %':>8}{'busy %':>8}"
    lines = [f"{results['device']}, torch {results['torch']}, {results['commit']}; microseconds", head]
    for shape, found in results["shapes"].items():
        lines.append(f"{shape}: ready after {found['load_seconds']} s")
        for step in found["steps"]:
            busy = "-" if step["busy_percent"] is None else f"{step['busy_percent']:.1f}"
            lines.append(
                f"  {step['case']:22}{step['step_p50']:10.0f}{step['tokens_a_second']:11.0f}{step['host_p50']:10.0f}"
                f"{step['host_p99']:8.0f}{step['gap_p50']:9.0f}{step['idle_percent']:8.2f}{busy:>8}"
            )
        lines += [f"  left out: {reason}" for reason in found["left_out"]]
    return "\n".join(lines)


def main() -> int:
    """Measures, prints a table, and writes JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu", "deferred"))
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["Qwen3-0.6B", "Qwen3-8B"])
    parser.add_argument("--seconds", type=float, default=130, help="no case is begun later than this")
    parser.add_argument("--out", type=Path, help="a file for the results, in JSON")
    options = parser.parse_args()
    if options.device == "cuda":
        try:
            name = open_device("cuda", None).name
        except DeviceError as error:
            print(f"skipped: {error}")
            return 0
    else:
        name = options.device
    deadline = time.monotonic() + options.seconds
    results: dict[str, Any] = {"commit": commit(), "device": name, "torch": torch.__version__, "shapes": {}}
    for shape in options.shapes:
        cases = TINY_CASES if shape == "tiny" else CASES
        if time.monotonic() > deadline:
            results["shapes"][shape] = {"load_seconds": 0, "steps": [], "left_out": ["all of it: no time"]}
            continue
        results["shapes"][shape] = shape_results(shape, options.device, cases, deadline)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    print(table(results))
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
