"""Measures a hand on a GPU in six minutes: the card's limits, operators, steps and a server, in this order.

    python3 scripts/gpu.py bench --out gpu.json

Weights are made up on the device, in the shapes of Qwen3-0.6B and Qwen3-8B. Each part ends at its deadline and reports
what it left out. Results are written after each part, so that an aborted run loses at most one part. After an error
that CUDA does not survive in this process, the other parts run in a new one.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import torch

from benchmarks import records
from benchmarks.gpu import ceilings, operators, report, server, steps
from benchmarks.gpu.failures import lost
from benchmarks.gpu.shapes import SHAPES
from benchmarks.processes import ServerError
from benchmarks.records import Results, Run
from forebay.device import DeviceError, open_device

SECONDS = 340.0
SHARES = {"ceilings": 15, "operators": 45, "steps": 130, "server": 150}
"""Seconds of each part, of `SECONDS`."""


@dataclass(frozen=True)
class Asked:
    """The flags, and the deadline."""

    device: str
    shapes: list[str]
    deadline: float
    profiles: Path | None

    def late(self) -> bool:
        """True if no further measurement may begin."""
        return time.monotonic() > self.deadline

    @property
    def torch_device(self) -> torch.device:
        """The device of tensors."""
        return torch.device("cuda" if self.device == "cuda" else "cpu")

    @property
    def tiny(self) -> bool:
        """True for the small sizes of tests."""
        return self.shapes == ["tiny"]


def of_ceilings(asked: Asked, found: Results) -> None:
    """Measures the card's limits, and the host's latency to it."""
    for name, values in ceilings.measure(asked.torch_device, 1 / 64 if asked.tiny else 1).items():
        found.runs.append(Run(f"ceilings: {name}", "device", 1, values))


def of_operators(asked: Asked, found: Results) -> None:
    """Measures operators, shape by shape."""
    small = operators.Sizes(((1, 20), (4, 20)), (3, 20, 60), ((0, 16), (20, 8)), (1, 4), (1, 4))
    for shape in asked.shapes:
        sizes = small if shape == "tiny" else operators.Sizes()
        for name, values in operators.measure(SHAPES[shape], asked.torch_device, sizes, asked.late):
            found.runs.append(Run(f"operators: {name}", shape, 1, values))
        if asked.late():
            found.skipped[f"operators of {shape}"] = "no time for all"


def of_steps(asked: Asked, found: Results) -> None:
    """Measures a hand without a server."""
    for shape in asked.shapes:
        cases = steps.cases_of(shape)
        if asked.late():
            found.skipped[f"steps of {shape}"] = "no time"
            continue
        measured = steps.measure_shape(shape, asked.device, cases, asked.deadline)
        found.runs += [Run(f"steps: {step.case}", shape, 1, asdict(step)) for step in measured.steps]
        found.runs.append(Run("steps: start", shape, 1, measured.start))
        found.skipped.update({f"{shape}, {name}": reason for name, reason in measured.left_out.items()})
        release(asked)


def of_server(asked: Asked, found: Results) -> None:
    """Measures a server under load, also with dummy weights."""
    binary = server.binary()
    if binary is None:
        found.skipped["server"] = "there is no binary: make gpu-pack packs one"
        return
    for shape in asked.shapes:
        if asked.late():
            found.skipped[f"server of {shape}"] = "no time"
            continue
        with tempfile.TemporaryDirectory(prefix="forebay-gpu-") as folder:
            place = server.Place(binary, asked.device, Path(folder), found.machine["gpu"])
            try:
                for name, values in server.measure(place, shape, asked.late, asked.profiles):
                    found.runs.append(Run(f"server: {name}", shape, 1, values))
            except (ServerError, OSError, subprocess.SubprocessError) as error:
                # The measurements so far are kept.
                found.skipped[f"rest of the server of {shape}"] = str(error)[-2000:]


PARTS: dict[str, Callable[[Asked, Results], None]] = {
    "ceilings": of_ceilings,
    "operators": of_operators,
    "steps": of_steps,
    "server": of_server,
}


def release(asked: Asked) -> None:
    """Frees the device's memory for other parts of this process and for servers."""
    gc.collect()
    if asked.device == "cuda":
        torch.cuda.empty_cache()


def go_on(options: argparse.Namespace, parts: Sequence[str], seconds: float, found: Results) -> NoReturn:
    """Replaces this process by one that measures the other parts, and so frees all memory on the device."""
    file, onto = tempfile.mkstemp(prefix="forebay-gpu-", suffix=".json")
    os.close(file)
    records.save(found, Path(onto))
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", options.device, "--shapes", *options.shapes]
    command += ["--parts", *parts, "--seconds", str(max(0.0, seconds)), "--onto", onto]
    for flag, value in (("--out", options.out), ("--profiles", options.profiles)):
        command += [] if value is None else [flag, str(value)]
    sys.stdout.flush()
    sys.stderr.flush()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.execv(command[0], command)


def earlier(file: Path) -> Results:
    """Reads and removes the results of the previous process."""
    found = records.from_json(file.read_text())
    file.unlink()
    return found


def commit() -> str:
    """The measured commit: from git, or from the package on a host without git."""
    if "FOREBAY_COMMIT" in os.environ:
        return os.environ["FOREBAY_COMMIT"]
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def new(name: str, benchmark: str = "gpu") -> Results:
    """Empty results of a device."""
    packages = {"torch": version("torch"), "triton": _triton(), "forebay": forebay(), "commit": commit(), "gpu": name}
    machine = records.machine(Path("/proc/cpuinfo").read_text(), Path("/proc/meminfo").read_text(), packages)
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    return Results(benchmark, today, {**machine, "python": platform.python_version()}, rounds=1)


def forebay() -> str:
    """The server's version; empty without a server."""
    binary = server.binary()
    if binary is None:
        return ""
    said = subprocess.run([str(binary), "--version"], check=True, capture_output=True, text=True).stdout
    return said.strip().removeprefix("forebay ")


def _triton() -> str:
    try:
        return version("triton")
    except ImportError:
        return "none"


def device_name(device: str) -> str:
    """A device's name. Raises `DeviceError` if it does not exist here."""
    return open_device(device, None).name if device == "cuda" else device


def main() -> int:
    """Measures, prints tables, and writes JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu", "deferred"))
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["Qwen3-0.6B", "Qwen3-8B"])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="nothing is begun later [%(default)s]")
    parser.add_argument("--out", type=Path, help="a file for the results, in JSON")
    parser.add_argument("--profiles", type=Path, help="a folder for profiles of the device, for `forebay sim`")
    parser.add_argument("--onto", type=Path, help="the results of an earlier process, which are gone on with")
    options = parser.parse_args()
    try:
        name = device_name(options.device)
    except DeviceError as error:
        print(f"skipped: {error}")
        return 0
    begun, found = time.monotonic(), new(name) if options.onto is None else earlier(options.onto)
    share = options.seconds / sum(SHARES[part] for part in options.parts)
    asked = Asked(options.device, options.shapes, begun, options.profiles)
    for number, part in enumerate(options.parts):
        # Time that a part does not use is left to the next one.
        asked, dead = replace(asked, deadline=asked.deadline + share * SHARES[part]), False
        try:
            PARTS[part](asked, found)
            release(asked)
        except Exception as error:
            # An error in a kernel, or too little memory, only skips the rest of its part: time on a GPU is short.
            traceback.print_exc()
            found.skipped[f"rest of {part}"] = " ".join(str(error).split())[:500]
            dead = lost(str(error))
        if options.out is not None:
            records.save(found, options.out)
        rest = options.parts[number + 1 :]
        if dead and rest:
            go_on(options, rest, begun + options.seconds - time.monotonic(), found)
    print(report.text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
