"""The parts of a step: its kernels by time, and the gaps between them.

    python3 -m benchmarks.gpu.trace --out FOLDER

For one row and for 64 it prints a table of kernels and writes FOLDER/trace-ROWS.json, which chrome://tracing shows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.gpu import steps
from benchmarks.gpu.shapes import SHAPES
from benchmarks.gpu.steps import Case, Kernel
from forebay.device import DeviceError, open_device

CASES = (Case(1, 512, 1, 60), Case(64, 512, 1, 60))
LARGEST = 20


def gaps(kernels: Sequence[Kernel]) -> list[float]:
    """Microseconds between the end of a kernel and the start of the next one; 0 if they overlap."""
    ordered = sorted(kernels, key=lambda kernel: kernel.begin)
    return [max(0.0, after.begin - before.begin - before.us) for before, after in pairwise(ordered)]


def largest(kernels: Sequence[Kernel], steps_of: int) -> list[tuple[str, float, float]]:
    """The kernels that take most time: name, microseconds and launches a step."""
    by_name: dict[str, list[float]] = {}
    for kernel in kernels:
        by_name.setdefault(kernel.name, []).append(kernel.us)
    rows = [(name, sum(times) / steps_of, len(times) / steps_of) for name, times in by_name.items()]
    return sorted(rows, key=lambda row: -row[1])[:LARGEST]


def text(case: Case, step_us: float, kernels: Sequence[Kernel], steps_of: int) -> str:
    """The table of a case; `step_us` is the median of steps without the profiler."""
    total = steps.busy_us(kernels) / steps_of
    between = [gap for gap in gaps(kernels) if gap < step_us]
    heading = (
        f"{case.name}: {step_us:.0f} us a step, {total:.0f} of them in {len(kernels) / steps_of:.0f} kernels; "
        f"idle {steps.idle_percent(total, step_us):.0f} %; between two kernels "
        f"{statistics.median(between) if between else 0:.2f} us (median)"
    )
    lines = [heading]
    lines += [f"{us:10.1f} us {count:7.1f} x  {name[:90]}" for name, us, count in largest(kernels, steps_of)]
    return "\n".join(lines)


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="Qwen3-0.6B", choices=sorted(SHAPES))
    parser.add_argument("--out", type=Path, help="a folder for the traces")
    options = parser.parse_args()
    try:
        open_device("cuda", None)
    except DeviceError as error:
        print(f"skipped: {error}")
        return 0
    runner = steps.runner_of(options.shape, "cuda", [*CASES, Case(1, 0, 2048, 1)])
    runner.warm_up()
    for case in CASES:
        planned = steps.plans(runner, case)
        steps.run(runner, planned, steps.WARM)
        _, timing = steps.run(runner, planned, case.steps)
        out = None if options.out is None else options.out / f"trace-{case.rows}.json"
        kernels = steps.kernels_of(runner, planned, out)
        step_us = statistics.median(device + gap for device, gap in timing[1:])
        print(text(case, step_us, kernels, steps.PROFILED), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
