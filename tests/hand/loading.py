"""A process that loads two models, and says how much memory the second took. Reads their configs from its input."""

from __future__ import annotations

import gc
import json
import sys

from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig


def memory_of(process: int | str, name: str) -> int:
    """Bytes that the kernel counts for a process: `VmRSS` now, `VmHWM` at most."""
    with open(f"/proc/{process}/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{name}:"))


def load(config: str) -> ModelRunner:
    """A runner with its weights."""
    runner = ModelRunner(RunnerConfig.from_dict(json.loads(config)))
    runner.load(lambda done, total: None)
    return runner


if __name__ == "__main__":
    small, large = sys.stdin.read().splitlines()
    # Whatever libraries need once is there afterwards.
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
