"""No kernel reads or writes outside of its memory, and no two threads race: NVIDIA's compute-sanitizer says so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 60
ERROR = 99
"""The exit status for what the sanitizer finds."""


def tool() -> str | None:
    """The sanitizer, wherever CUDA's toolkit is."""
    homes = [os.environ.get("CUDA_HOME"), *sorted(map(str, Path("/usr/local").glob("cuda*")))]
    folders = [os.path.join(home, "bin") for home in homes if home]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *folders]))


# Races are looked for in shared memory, where kernels that reduce have theirs.
@pytest.mark.parametrize(
    ("family", "check"), [("qwen3", "memcheck"), ("deepseek-v3", "memcheck"), ("qwen3", "racecheck")]
)
def test_a_hand_keeps_to_its_memory(family: str, check: str) -> None:
    sanitizer = tool()
    if sanitizer is None:
        pytest.skip("compute-sanitizer of CUDA's toolkit is not installed")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    program = [sys.executable, "-m", "tests.gpu_device.sanitized", "cuda", family]
    # Libraries ask CUDA about pointers of the host, and get an error for an answer.
    quiet = ["--report-api-errors", "no"] if check == "memcheck" else []
    command = [sanitizer, "--tool", check, *quiet, "--error-exitcode", str(ERROR), *program]
    try:
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{check} takes more than {SECONDS} s")
    if "Device not supported" in found.stdout:
        pytest.skip("compute-sanitizer can't attach to this GPU: a sandbox is between them")
    said = "\n".join(line for line in found.stdout.splitlines() if line.startswith("========="))
    assert found.returncode != ERROR, said[:4000]
    assert not found.returncode, found.stderr[-3000:]
    assert "tokens 30" in found.stdout
