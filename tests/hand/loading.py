"""Loads two models, whose configs it reads from its input, and reports how much memory the second one takes."""

from __future__ import annotations

import gc
import json
import sys

from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig


def memory_of(process: int | str, name: str) -> int:
    """The bytes that Linux counts for a process: `VmRSS` now, or `VmHWM` at the peak."""
    with open(f"/proc/{process}/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{name}:"))


def load(config: str) -> ModelRunner:
    """A runner with loaded weights."""
    runner = ModelRunner(RunnerConfig.from_dict(json.loads(config)))
    runner.load(lambda done, total: None)
    return runner


if __name__ == "__main__":
    small, large = sys.stdin.read().splitlines()
    # The first load allocates what the libraries need once.
    load(small)
    gc.collect()
    before = memory_of("self", "VmRSS")
    runner = load(large)
    found = {
        "before": before,
        "peak": memory_of("self", "VmHWM"),
        "weights": runner.weight_bytes,
        "pages": runner.kv.nbytes,
    }
    print(json.dumps(found))
