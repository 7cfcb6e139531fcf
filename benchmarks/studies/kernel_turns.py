"""Two builds of the compiled kernels, or one at two levels, in turns: what a change of theirs is worth.

    python -m benchmarks.studies.kernel_turns --old /elsewhere/libforebay_kernels.so
    python -m benchmarks.studies.kernel_turns --old-level avx512bf16
    python -m benchmarks.studies.kernel_turns --old-level avx512vnni --quantization w8a8_int8
    FOREBAY_KERNELS=avx2 python -m benchmarks.studies.kernel_turns --old /elsewhere/libforebay_kernels.so

Steps as in `cpu_parts`, without a server. Each side is a process of its own, with its library beside a copy of the
package, and single steps alternate. Both processes are started anew several times, since the place of their memory
makes a difference of some percent. Medians, in milliseconds; ratios are of two steps that followed each other.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import forebay
from benchmarks import models
from benchmarks.studies import cpu_parts
from forebay.kernels.library import NAME, PARTS

READY = "ready"
REST = 0.03
"""Seconds after a step: threads of the other process may still spin."""
LEAST = 0.1
"""Milliseconds: what is shorter is not shown."""

Measured = dict[str, float]
"""Milliseconds of a step and its parts."""


def work(model: str, threads: int, quantization: str | None) -> None:
    """One side: computes the steps whose names it reads, and prints what they took."""
    with torch.inference_mode():
        made = cpu_parts.runner(model, threads, quantization)
        compute = cpu_parts.prepared(made, threads)
        steps = {case.name: case.step(made.device) for case in cpu_parts.CASES}
        print(READY, flush=True)
        for line in sys.stdin:
            print(json.dumps(cpu_parts.parts(compute, steps[line.strip()])), flush=True)


class Side:
    """A process that computes steps."""

    def __init__(self, package: Path, level: str | None, arguments: list[str]) -> None:
        """`package` is the folder that has the package."""
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), str(Path.cwd())])}
        if level is not None:
            env["FOREBAY_KERNELS"] = level
        command = [sys.executable, "-m", "benchmarks.studies.kernel_turns", "--work", *arguments]
        self._process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a side has ended; what it wrote is above")
        return line.strip()

    def wait(self) -> None:
        """Until it has loaded."""
        while self._line() != READY:
            pass

    def step(self, case: str) -> Measured:
        """Computes one."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{case}\n")
        self._process.stdin.flush()
        found: Measured = json.loads(self._line())
        time.sleep(REST)
        return found

    def end(self) -> None:
        """And waits for it."""
        self._process.communicate()


Pairs = dict[str, list[tuple[Measured, Measured]]]
"""Old and new, by case."""


def turns(old: Side, new: Side, cases: list[str], rounds: int, found: Pairs) -> None:
    """Adds `rounds` pairs of each case, after one that warms up."""
    for case in cases:
        for turn in range(rounds + 1):
            first, second = (old, new) if turn % 2 else (new, old)
            took = {side: side.step(case) for side in (first, second)}
            if turn:
                found.setdefault(case, []).append((took[old], took[new]))


def table(found: Pairs) -> str:
    """Markdown."""
    lines = [
        "| step | part | old ms | new ms | old / new | half of them between |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for case, pairs in found.items():
        for part in ("step", *PARTS):
            if min(min(old[part], new[part]) for old, new in pairs) < LEAST:
                continue
            ratios = [old[part] / new[part] for old, new in pairs]
            low, middle, high = statistics.quantiles(ratios, n=4)
            old_ms, new_ms = (statistics.median(pair[side][part] for pair in pairs) for side in (0, 1))
            lines.append(f"| {case} | {part} | {old_ms:.2f} | {new_ms:.2f} | {middle:.2f} | {low:.2f} and {high:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """The command."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--old", type=Path, help="the other library; default: the one in use")
    flags.add_argument("--old-level", help="FOREBAY_KERNELS of the old side")
    flags.add_argument("--rounds", type=int, default=8, help="of each start; default: %(default)s")
    flags.add_argument("--starts", type=int, default=3, help="default: %(default)s")
    flags.add_argument("--threads", type=int, default=2)
    flags.add_argument("--model", default=str(models.directory("smollm2")))
    flags.add_argument("--quantization", choices=["w8a8_int8"], help="of the matrices; default: none")
    flags.add_argument("--cases", default="", help="only those whose name has this in it")
    flags.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    chosen = flags.parse_args()
    if chosen.work:
        work(chosen.model, chosen.threads, chosen.quantization)
        return
    if chosen.rounds * chosen.starts < 2:
        flags.error("one pair says nothing: --rounds or --starts has to be larger")
    cases = [case.name for case in cpu_parts.CASES if chosen.cases in case.name]
    arguments = ["--model", chosen.model, "--threads", str(chosen.threads)]
    if chosen.quantization is not None:
        arguments += ["--quantization", chosen.quantization]
    package = Path(forebay.__file__).parent
    found: Pairs = {}
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder)
        shutil.copytree(package, other / package.name)
        if chosen.old is not None:
            shutil.copyfile(chosen.old, other / package.name / "kernels" / NAME)
        for start in range(chosen.starts):
            sides = [(other, chosen.old_level), (package.parent, None)]
            # Whoever starts first may find better memory.
            started = {place: Side(place, level, arguments) for place, level in (sides if start % 2 else sides[::-1])}
            for side in started.values():
                side.wait()
            turns(started[other], started[package.parent], cases, chosen.rounds, found)
            for side in started.values():
                side.end()
    print(table(found))


if __name__ == "__main__":
    main()
