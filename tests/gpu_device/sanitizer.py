"""Runs NVIDIA's compute-sanitizer on a module, and reports what it finds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

NAME = "compute-sanitizer"
FAULTS = 86
"""The exit status of a run with faults. Python itself never uses it."""
_LINES = 60
_CLEAN = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: 0 (?:errors|hazards)\b", re.MULTILINE)
_REFUSAL = re.compile(r"^=+ (Error: .*)", re.MULTILINE)


class UnusableError(RuntimeError):
    """The tool can't check programs on this machine."""


def find() -> Path | None:
    """The path of the tool, from PATH or from CUDA's folders."""
    on_path = shutil.which(NAME)
    roots = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    roots += sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    places = [root / folder / NAME for root in roots for folder in ("bin", "compute-sanitizer")]
    found = [path for path in places if os.access(path, os.X_OK)]
    return Path(on_path) if on_path is not None else next(iter(found), None)


def check(
    tool: Path, kind: str, module: Sequence[str], last_words: str, seconds: float, kernels: Sequence[str] = ()
) -> None:
    """Fails with the tool's output if the tool finds faults in a module, which is given with its arguments.

    `kernels`: parts of the names of the kernels to check. Without them all are checked. The module must end with a line
    that begins with `last_words`, because a tool that runs nothing finds no fault either.

    Raises `UnusableError`, or `subprocess.TimeoutExpired`.
    """
    options = ["--tool", kind, "--error-exitcode", str(FAULTS)]
    if kind == "memcheck":
        # Libraries query CUDA about host pointers, and expect an error as the result.
        options += ["--report-api-errors", "no"]
    for name in kernels:
        options += ["--kernel-name", f"kns={name}"]
    # Each tensor gets its own memory, so that a read beyond its end does not hit another tensor.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [str(tool), *options, sys.executable, "-m", *module],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=seconds,
    )
    output = done.stdout
    own = [line for line in output.splitlines() if line.startswith("=====")]
    if done.returncode == FAULTS:
        raise AssertionError("\n".join([f"{kind} has found faults:", *own[:_LINES]]))
    ended = re.search(f"^{re.escape(last_words)}", output, re.MULTILINE)
    refusal = _REFUSAL.search(output)
    if ended is None and refusal is not None and "Traceback" not in output:
        raise UnusableError(refusal[1])
    last = "\n".join(output.splitlines()[-_LINES:])
    assert done.returncode == 0, f"{kind} ended with status {done.returncode}:\n{last}"
    assert ended is not None, f"{kind} is content with a program that did not end:\n{last}"
    assert _CLEAN.search(output), f"{kind} does not say that there is nothing:\n{last}"
