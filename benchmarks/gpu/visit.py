"""A short run on a GPU: the most important parts come first, and a failed part does not stop the others.

    python3 scripts/gpu.py visit first --out FOLDER

Each part is a process with a time limit. When a part ends, all processes that it started are killed. FOLDER/NAME.log
has its output, FOLDER/NAME.json its results. FOLDER/gpu.json has the results of all parts. The last lines are a
summary.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import records
from benchmarks.processes import Running
from forebay.device import DeviceError
from forebay.device.cuda_open import require_gpu
from forebay.gpu.choose import VARIABLE

MOST_LOG = 1 << 20
"""Bytes of a part's output that are kept: half from the beginning, half from the end."""
GRACE_SECONDS = 2.0
WORTH_SECONDS = 10.0
"""With less time left, no part begins."""
_LINE = 100


@dataclass(frozen=True)
class Part:
    """A command and its limit."""

    name: str
    seconds: float
    """The time limit in seconds."""
    arguments: Sequence[str]
    """Arguments for this Python interpreter; FOLDER is replaced by the folder of results."""
    variables: Mapping[str, str] = field(default_factory=dict)
    after_failure_of: str | None = None
    """Run this part only if the named one failed, to explain the failure."""


@dataclass(frozen=True)
class Outcome:
    """How a part ended."""

    name: str
    how: str
    """`ok`, or what went wrong."""
    seconds: float
    last: str
    """The last line of the part's output."""

    def __str__(self) -> str:
        return f"{self.name:<10} {self.how:<18} {self.seconds:5.0f} s  {self.last[:_LINE]}"


def _tests(*arguments: str) -> list[str]:
    return ["-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *arguments]


def _bench(name: str, seconds: int, parts: str, shape: str, *more: str) -> list[str]:
    flags = ["--parts", *parts.split(), "--shapes", shape, "--seconds", str(seconds), "--out", f"FOLDER/{name}.json"]
    return ["-m", "benchmarks.gpu", *flags, *more]


_DEVICE = "tests/gpu_device"
_HELLO = _tests("--maxfail=2", f"{_DEVICE}/test_steps.py", "-k", "float32_tokens and llama and not yarn")

VISITS: dict[str, tuple[float, Sequence[Part]]] = {
    "first": (
        300.0,
        (
            Part("hello", 60, _HELLO),
            Part("twins", 45, _HELLO, {VARIABLE: "reference"}, after_failure_of="hello"),
            Part("steps", 70, _bench("steps", 60, "ceilings steps", "Qwen3-0.6B")),
            Part("trace", 30, ["-m", "benchmarks.gpu.trace", "--out", "FOLDER"]),
            Part("sweep", 60, ["-m", "benchmarks.gpu.sweep", "--seconds", "50", "--out", "FOLDER/tried.json"]),
            Part("kernels", 80, _tests("-n", "12", "--maxfail=60", f"{_DEVICE}/test_kernels.py")),
        ),
    ),
    "second": (
        360.0,
        (
            Part("server", 85, _bench("server", 72, "server", "Qwen3-0.6B", "--profiles", "FOLDER")),
            Part("large", 62, _bench("large", 54, "ceilings steps", "Qwen3-8B")),
            Part("operators", 33, _bench("operators", 25, "ceilings operators", "Qwen3-0.6B")),
            Part(
                "rest",
                92,
                _tests(
                    "-n",
                    "6",
                    "--maxfail=60",
                    *(f"{_DEVICE}/test_{n}.py" for n in ("graphs", "steps", "states", "stored", "sparse")),
                ),
            ),
            # The test takes most of the memory, so no other part runs at the same time.
            Part("memory", 42, _tests(f"{_DEVICE}/test_memory.py")),
            Part("killed", 46, _tests(f"{_DEVICE}/test_server.py")),
        ),
    ),
}
"""The seconds of each visit, and its parts."""


def run(part: Part, folder: Path, seconds: float) -> Outcome:
    """Runs a part for at most `seconds`, and ends all processes that it started."""
    log = folder / f"{part.name}.log"
    command = [sys.executable, *(word.replace("FOLDER", str(folder)) for word in part.arguments)]
    begun = time.monotonic()
    # All parts share one cache, so that later parts reuse compiled kernels.
    cache = os.environ.get("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir(), "forebay-triton")))
    variables = {"TRITON_CACHE_DIR": cache, "PYTHONUNBUFFERED": "1", **part.variables}
    with Running(command, variables, 0, log, GRACE_SECONDS) as running:
        status = running.wait(seconds)
    text = _cut(log)
    how = "out of time" if status is None else "ok" if status == 0 else _failed(status)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return Outcome(part.name, how, time.monotonic() - begun, lines[-1] if lines else "printed nothing")


def visit(parts: Sequence[Part], folder: Path, seconds: float, say: Callable[[str], None]) -> list[Outcome]:
    """Runs the parts, one after the other, and skips those for which no time is left."""
    deadline, found = time.monotonic() + seconds, list[Outcome]()
    for part in parts:
        explained = next((outcome for outcome in found if outcome.name == part.after_failure_of), None)
        if explained is not None and explained.how == "ok":
            continue
        left = deadline - time.monotonic()
        if left < WORTH_SECONDS:
            found.append(Outcome(part.name, "not begun", 0, "no time was left"))
            continue
        found.append(run(part, folder, min(part.seconds, left)))
        say(str(found[-1]))
    return found


def join(folder: Path, parts: Sequence[Part]) -> records.Results | None:
    """Joins the results of all parts; None without results."""
    found: records.Results | None = None
    for part in parts:
        path = folder / f"{part.name}.json"
        if not path.is_file():
            continue
        more = records.from_json(path.read_text())
        if found is None:
            found = more
            continue
        known = {(run.workload, run.server) for run in found.runs}
        found.runs += [run for run in more.runs if (run.workload, run.server) not in known]
        found.skipped.update(more.skipped)
    return found


def main() -> int:
    """Runs a visit; returns 1 if a part failed."""
    parser = argparse.ArgumentParser(prog="gpu.py visit", description=__doc__)
    parser.add_argument("which", choices=list(VISITS))
    parser.add_argument(
        "--out", type=Path, default=os.environ.get("OUT", "visit"), help="the folder for results [$OUT, or visit]"
    )
    options = parser.parse_args()
    try:
        require_gpu()
    except DeviceError as error:
        print(f"skipped: {error}")
        return 0
    seconds, parts = VISITS[options.which]
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    print(_card(), flush=True)
    outcomes = visit(parts, folder, seconds, lambda line: print(line, flush=True))
    joined = join(folder, parts)
    if joined is not None:
        records.save(joined, folder / "gpu.json")
    print(f"\n{options.which} visit, in {folder}:", *outcomes, sep="\n")
    return 0 if all(outcome.how == "ok" for outcome in outcomes) else 1


def _failed(status: int) -> str:
    return f"status {status}" if status > 0 else f"signal {-status}"


def _cut(log: Path) -> str:
    """The text of a log. If it is long, its middle is removed from the file."""
    data = log.read_bytes()
    if len(data) > MOST_LOG:
        half = MOST_LOG // 2
        data = data[:half] + f"\n[{len(data) - MOST_LOG} bytes are left out]\n".encode() + data[-half:]
        log.write_bytes(data)
    return data.decode(errors="replace")


def _card() -> str:
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.used,memory.total", "--format=csv,noheader"]
        return subprocess.run(query, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi: {error}"


if __name__ == "__main__":
    sys.exit(main())
